"""Test that training steps on a GPU do what they do in NumPy: state in place, random bits, one CUDA graph."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.models.test_training_on_stand_in import network as attending
from helpers import assert_close, one_program
from test_training_models import SIZES, first

import fusec
from examples.training_models import training_step
from fusec import training
from fusec.builder import Builder
from fusec.gpu import device
from fusec.schedule.program import Kind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device.device_name() is None, reason="no GPU"),
]


def network() -> Builder:
    """A convolution with batch norm, pooling, dropout and a classifier, with momentum."""
    rng = np.random.default_rng(0)
    b = Builder()
    x, labels = b.input("x", (16, 8, 12, 12)), b.input("labels", (16,), "i64")
    state = b.parameter("random", np.array([7, 0], np.uint64))
    b.update(state, state + np.array([0, 1], np.uint64))
    w = b.parameter("w", (rng.standard_normal((16, 8, 3, 3)) / 8).astype(np.float32))
    scale, bias = (b.parameter(n, np.full(16, v, np.float32)) for n, v in (("scale", 1.0), ("bias", 0.0)))
    head = b.parameter("head", (rng.standard_normal((16 * 36, 10)) / 24).astype(np.float32))
    y = b.max_pool(b.batch_norm_train(b.conv(x, w, padding=1), scale, bias)[0].relu(), 2)
    logits = b.dropout(y, 0.25, state).reshape(16, -1) @ head
    loss = b.cross_entropy(logits, labels)
    weights = [w, scale, bias, head]
    training.sgd(b, weights, fusec.backward(loss, weights), 0.005, 0.9)
    b.output(loss=loss)
    return b


def test_steps_agree_with_numpy(rng: np.random.Generator) -> None:
    here, there = one_program(fusec.compile(network())), one_program(fusec.compile(network(), target="cpu"))
    for _ in range(5):
        x = rng.standard_normal((16, 8, 12, 12)).astype(np.float32)
        labels = rng.integers(0, 10, 16)
        assert_close(here.step(x, labels), there.step(x, labels), 1e-3)
    for name in ("w", "scale", "head", "w.momentum"):
        assert_close(here.value(name), there.value(name), 1e-3)
    np.testing.assert_array_equal(here.value("random"), there.value("random"))


def blocks() -> Builder:
    """A residual block and a normed linear layer, in 16 bits with parameters of 32."""
    rng = np.random.default_rng(1)
    b, weights = Builder("f16"), list[fusec.Tensor]()

    def parameter(name: str, array: np.ndarray) -> fusec.Tensor:
        weights.append(b.parameter(name, array.astype(np.float32)))
        return weights[-1]

    def norm(x: fusec.Tensor, name: str) -> fusec.Tensor:
        size = x.shape[1]
        scale, bias = parameter(f"{name}.scale", np.ones(size)), parameter(f"{name}.bias", np.zeros(size))
        running = b.parameter(f"{name}.mean", np.zeros(size, np.float32))
        y, mean, _ = b.batch_norm_train(x, scale, bias)
        b.update(running, running * 0.9 + mean * 0.1)
        return y

    def conv(x: fusec.Tensor, name: str) -> fusec.Tensor:
        w = parameter(name, rng.standard_normal((x.shape[1], x.shape[1], 3, 3)) / 12)
        return norm(b.conv(x, w.astype("f16"), padding=1), name)

    x, labels = b.input("x", (8, 16, 14, 14)), b.input("labels", (8,), "i64")
    y = b.max_pool((conv(conv(x, "a").relu(), "b") + x).relu(), 3, 2, 1).mean((2, 3))
    scale, bias = parameter("layer.scale", np.ones(16)), parameter("layer.bias", np.zeros(16))
    y = b.layer_norm(y, scale.astype("f16"), bias.astype("f16"))
    head = parameter("head", rng.standard_normal((16, 10)) / 4)
    loss = b.cross_entropy((y @ head.astype("f16")).astype("f32"), labels)
    training.sgd(b, weights, fusec.backward(loss, weights), 0.05, 0.9)
    b.output(loss=loss)
    return b


def test_a_residual_block_agrees_with_numpy(rng: np.random.Generator) -> None:
    """And gives the same bits each time."""
    here, again, there = (
        one_program(fusec.compile(blocks())),
        one_program(fusec.compile(blocks())),
        one_program(fusec.compile(blocks(), target="cpu")),
    )
    for _ in range(3):
        x = rng.standard_normal((8, 16, 14, 14)).astype(np.float16)
        labels = rng.integers(0, 10, 8)
        loss = here.step(x, labels)
        np.testing.assert_array_equal(loss, again.step(x, labels))
        assert_close(loss, there.step(x, labels), 5e-3)
    for name in ("a", "b.scale", "b.bias", "a.mean", "layer.scale", "head"):
        np.testing.assert_array_equal(here.value(name), again.value(name))
        assert_close(here.value(name), there.value(name), 2e-2)
    by_reference = [s for s in here.compiled.program.steps if s.kind is Kind.KERNEL and s not in here.kernels]
    assert not by_reference, [s.signature for s in by_reference]


def test_random_bits_are_the_same() -> None:
    b = Builder()
    b.output(bits=b.random_bits(b.input("state", (2,), "u64"), (1000, 3)))
    state = np.array([3, 9], np.uint64)
    np.testing.assert_array_equal(fusec.compile(b)(state), fusec.compile(b, target="cpu")(state))


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_lists_of_parameters_and_attention_in_fp16(optimiser: str, rng: np.random.Generator) -> None:
    """Master weights cast, gradients searched and parameters moved by kernels over all of them, in place."""
    b = attending(optimiser, heads=2, size=128, rate=1e-3)
    here, there = one_program(fusec.compile(b)), one_program(fusec.compile(b, target="cpu"))
    names = [step.signature for step in here.compiled.program.steps]
    assert {"attention_train", "attention_backward", "all_finite"} <= {op for name in names for op in name.split("+")}
    assert any(" x " in name for name in names)
    batches = [(rng.standard_normal((4, 8, 128)).astype(np.float16), rng.integers(0, 10, 4)) for _ in range(4)]
    for x, labels in batches:
        assert_close(here.step(x, labels), there.step(x, labels), 5e-3)
    for name in ("qkv", "head"):
        assert_close(here.value(name), there.value(name), 2e-2)
    here.step(np.full((4, 8, 128), np.inf, np.float16), batches[-1][1])  # not finite: nothing moves but the scale
    assert_close(here.value("qkv"), there.value("qkv"), 2e-2)
    assert here.value("loss.scale") == there.value("loss.scale") / 2


def test_deterministic_steps_are_the_same_bits(rng: np.random.Generator) -> None:
    nets = [
        one_program(fusec.compile(attending("sgd", heads=2, size=128, rate=1e-3), deterministic=True)) for _ in range(2)
    ]
    batches = [(rng.standard_normal((4, 8, 128)).astype(np.float16), rng.integers(0, 10, 4)) for _ in range(6)]
    losses = [[np.asarray(net.step(*batch)).tolist() for batch in batches] for net in nets]
    assert losses[0] == losses[1]
    for name in nets[0].state:
        np.testing.assert_array_equal(nets[0].value(name), nets[1].value(name))


@pytest.mark.parametrize("name", SIZES)
def test_models_learn_what_they_do_in_numpy(name: str, rng: np.random.Generator) -> None:
    held = first(training_step(name, 2, 32, **SIZES[name]))
    b = training_step(name, 2, 32, first=held, **SIZES[name])
    here, there = one_program(fusec.compile(b)), one_program(fusec.compile(b, target="cpu"))
    for _ in range(4):
        x, labels = rng.standard_normal((2, 3, 32, 32)).astype(np.float16), rng.integers(0, 1000, 2)
        assert_close(here.step(x, labels), there.step(x, labels), 1e-2)
    kernels = {step for step in here.compiled.program.steps if step.kind is Kind.KERNEL}
    assert kernels == here.kernels
