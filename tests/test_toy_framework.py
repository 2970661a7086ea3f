"""Test the toy framework of the examples: lazy tensors, modules, and a trained model that is exported to ONNX."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_close, one_program

import fusec
from examples.toy_framework import losses, models, nn, tape
from examples.toy_framework.data import DataLoader, digits
from examples.toy_framework.optim import SGD, AdamW
from examples.toy_framework.tape import Tape, numpy
from examples.toy_framework.trainer import Trainer, accuracy, in_batches


def test_nothing_is_computed_before_it_is_asked_for(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[fusec.Graph] = []
    compile = fusec.compile
    monkeypatch.setattr(fusec, "compile", lambda graph, **kw: built.append(graph) or compile(graph, **kw))
    monkeypatch.setattr(tape, "_compiled", {})
    for _ in range(2):  # the second tape asks for the same work
        a, b = rng.standard_normal((3, 4)).astype(np.float32), rng.standard_normal((4,)).astype(np.float32)
        t = Tape()
        x, y, unused = t.leaf(a), t.leaf(b), t.leaf(np.zeros(5, np.float32))
        z = (x * y).relu().sum(1)
        assert unused.shape == (5,) and z.shape == (3,)
        assert_close(numpy(z), np.maximum(a * b, 0).sum(1), 1e-6)
    assert len(built) == 1
    assert len(built[0].inputs) == 2, "what it does not depend on is left out"


def test_parameters_are_known_by_dotted_names() -> None:
    names = [name for name, _ in models.cnn(4).named_parameters()]
    assert names[:3] == ["modules.0.weight", "modules.1.scale", "modules.1.bias"]
    assert len(names) == len(set(names))


def test_batch_norm_keeps_running_statistics(rng: np.random.Generator) -> None:
    module = nn.Sequential(nn.BatchNorm2d(3))
    dict(module.named_parameters())
    t = Tape(training=True)
    t.output(y=module(t.input("x", (8, 3, 4, 4))))
    exe = one_program(fusec.compile(t, target="cpu"))
    x = (rng.standard_normal((8, 3, 4, 4)) * 2 + 1).astype(np.float32)
    y = exe.step(x)
    assert_close(exe.value("modules.0.mean"), 0.1 * x.mean((0, 2, 3)), 1e-5)
    assert_close(exe.value("modules.0.variance"), 0.9 + 0.1 * x.var((0, 2, 3)), 1e-5)
    assert_close(y.mean((0, 2, 3)) + 1, np.ones(3), 1e-5)


def test_attention_is_what_its_formula_says(rng: np.random.Generator) -> None:
    module = nn.MultiHeadAttention(6, 2)
    t, x = Tape(frozen=True), rng.standard_normal((2, 5, 6)).astype(np.float32)
    got = numpy(module(t.leaf(x)))
    packed = x @ module.project.weight.array + module.project.bias.array
    heads = []
    for h in range(2):
        q, k, v = (packed[..., 6 * i + 3 * h : 6 * i + 3 * h + 3] for i in range(3))
        scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(3))
        heads.append(scores / scores.sum(-1, keepdims=True) @ v)
    want = np.concatenate(heads, -1) @ module.out.weight.array + module.out.bias.array
    assert_close(got, want, 1e-5)


def test_losses(rng: np.random.Generator) -> None:
    t = Tape()
    a, b = (rng.standard_normal((4, 3)).astype(np.float32) for _ in range(2))
    assert_close(numpy(losses.mean_square(t.leaf(a), t.leaf(b))), np.square(a - b).mean(), 1e-6)


def test_a_cnn_learns_digits_and_survives_onnx() -> None:
    nn.seed(3)
    images, labels, test_images, test_labels = digits()
    trainer = Trainer(models.cnn(8), AdamW(), (1, 8, 8), 64)
    loader = DataLoader(images, labels, 64, np.random.default_rng(0))
    said: list[str] = []
    before = trainer.accuracy(test_images, test_labels)
    trainer.fit(loader, 3, 1e-2, said.append)
    after = trainer.accuracy(test_images, test_labels)
    assert before < 0.4 and after > 0.85
    assert said and "epoch   3" in said[-1]
    reloaded = fusec.compile(trainer.export(), target="cpu")
    logits = in_batches(reloaded, test_images, 64)
    assert accuracy(logits, test_labels) == after
    assert_close(logits, trainer.logits(test_images), 1e-4)


def test_a_transformer_step_is_one_program_that_lowers_the_loss() -> None:
    nn.seed(1)
    images, labels, *_ = digits()
    trainer = Trainer(models.ViT(16, 1, 2), SGD(0.9), (1, 8, 8), 32)
    assert trainer.training.in_place == sum(1 for output in trainer.training.state.values() if output)
    found = [trainer.step(images[:32], labels[:32], 0.05) for _ in range(40)]
    assert found[-1] < 0.8 * found[0]
