"""Test optimisers against their formulas, and loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import assert_close, one_program

import fusec
from fusec import training
from fusec.builder import Builder, Tensor
from fusec.errors import ModelError
from fusec.runtime import Executable

Array = np.ndarray[Any, Any]
RATE, STEPS = 0.05, 5


def run(add: Callable[[Builder, list[Tensor], list[Tensor]], None], start: Array, gradients: list[Array]) -> Array:
    """A parameter after as many steps as there are gradients, which are given from outside."""
    b = Builder()
    w, g = b.parameter("w", start), b.input("g", start.shape)
    add(b, [w], [g])
    b.output(moved=w * 1.0)
    exe = one_program(fusec.compile(b, target="cpu"))
    for gradient in gradients:
        exe.step(gradient)
    assert exe.in_place == len(b.updates) - 1, "all but the one an output reads are written in place"
    return exe.value("w")


@pytest.mark.parametrize("add", [training.sgd, training.adam])
def test_a_gradient_for_each_parameter(add: Callable[..., None]) -> None:
    b = Builder()
    p, g = b.parameter("p", np.zeros(3, np.float32)), b.input("g", (2,))
    with pytest.raises(ModelError, match=r"test_optimizers\.py:\d+: 1 parameters and 0 gradients"):
        add(b, [p], [], 0.1)
    with pytest.raises(ModelError, match="has another shape than the parameter"):
        add(b, [p], [g], 0.1)


@pytest.fixture
def drawn(rng: np.random.Generator) -> tuple[Array, list[Array]]:
    return rng.standard_normal((4, 3)).astype(np.float32), [
        rng.standard_normal((4, 3)).astype(np.float32) for _ in range(STEPS)
    ]


@pytest.mark.parametrize(("momentum", "decay", "nesterov"), [(0.0, 0.0, False), (0.9, 0.1, False), (0.9, 0.0, True)])
def test_sgd(drawn: tuple[Array, list[Array]], momentum: float, decay: float, nesterov: bool) -> None:
    start, gradients = drawn
    got = run(lambda b, p, g: training.sgd(b, p, g, RATE, momentum, decay, nesterov), start, gradients)
    w, velocity = start.astype(np.float64), np.zeros((4, 3))
    for g in gradients:
        g = g + decay * w
        velocity = momentum * velocity + g
        w = w - RATE * (g + momentum * velocity if nesterov else velocity)
    assert_close(got, w, 1e-6)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam(drawn: tuple[Array, list[Array]], decoupled: bool) -> None:
    start, gradients = drawn
    add = training.adamw if decoupled else training.adam
    got = run(lambda b, p, g: add(b, p, g, RATE, weight_decay=0.1), start, gradients)
    w, mean, square = start.astype(np.float64), np.zeros((4, 3)), np.zeros((4, 3))
    for t, g in enumerate(gradients, 1):
        g = g.astype(np.float64) if decoupled else g + 0.1 * w
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
        move = mean / (1 - 0.9**t) / (np.sqrt(square / (1 - 0.999**t)) + 1e-8)
        w = w - RATE * (move + 0.1 * w if decoupled else move)
    assert_close(got, w, 1e-5)


def scaled(growth: int = 2) -> Executable:
    """The gradient of a 16-bit product by an fp32 master weight; its input decides whether it overflows."""
    b = Builder()
    x, w = b.input("x", (4,)), b.parameter("w", np.ones(4, np.float32))
    loss = (w.astype("f16") * x.astype("f16")).sum()
    gradients, finite = training.scaled_backward(loss, [w], growth, start=1024.0)
    training.sgd(b, [w], gradients, 1.0, keep=finite)
    b.output(g=gradients[0])
    return one_program(fusec.compile(b, target="cpu"))


def test_small_gradients_survive_fp16() -> None:
    """1e-7 is hardly a number of fp16; its gradient times 1024 is."""
    exe = scaled()
    tiny = np.float32(np.float16(6e-5))
    assert_close(exe.step(np.full(4, tiny)), np.full(4, tiny), 1e-3)
    assert exe.value("loss.good") == 1.0


def test_an_overflow_changes_no_parameter_and_halves_the_scale() -> None:
    exe = scaled()
    exe.step(np.full(4, 100.0, np.float32))
    assert exe.value("loss.scale") == 512.0
    assert (exe.value("w") == 1.0).all()
    for _ in range(2):
        exe.step(np.full(4, 0.5, np.float32))
    assert exe.value("loss.scale") == 1024.0, "doubled after two good steps"
    assert exe.value("loss.good") == 0.0
    assert (exe.value("w") == 0.0).all()


def test_the_scale_never_falls_below_one() -> None:
    exe = scaled()
    for _ in range(14):
        exe.step(np.full(4, np.inf, np.float32))
    assert exe.value("loss.scale") == 1.0


def test_a_gradient_that_overflows_as_it_is_narrowed_is_not_finite() -> None:
    """It is finite in fp32, in which it was computed, and infinite in the parameter's 16 bits."""
    b = Builder()
    x, w = b.input("x", (4,)), b.parameter("w", np.ones(4, np.float16))
    gradients, finite = training.scaled_backward((w.astype("f32") * x).sum(), [w], start=1024.0)
    training.sgd(b, [w], gradients, 1.0, keep=finite)
    b.output(finite=finite)
    exe = one_program(fusec.compile(b, target="cpu"))
    assert not exe.step(np.full(4, 100.0, np.float32))
    assert (exe.value("w") == 1.0).all()
    assert exe.step(np.full(4, 0.5, np.float32))
    assert (exe.value("w") == 0.5).all()


@pytest.mark.parametrize("keeps", [True, False])
def test_adam_counts_applied_steps_only(drawn: tuple[Array, list[Array]], keeps: bool) -> None:
    """A skipped step changes no state: the next one does what it would have done."""
    start, gradients = drawn
    found: list[Array] = []
    for skipped in ([], [gradients[0]] * 3):
        b = Builder()
        w, g, keep = b.parameter("w", start), b.input("g", start.shape), b.input("keep", (), "bool")
        training.adam(b, [w], [g], RATE, keep=keep)
        b.output(kept=~keep)
        exe = one_program(fusec.compile(b, target="cpu"))
        for gradient in skipped:
            exe.step(gradient, np.array(not keeps))
        exe.step(gradients[1], np.array(True))
        assert exe.value("adam.step") == 1.0 + (0 if keeps else len(skipped))
        found.append(exe.value("w"))
    assert (found[0] == found[1]).all() == keeps


def test_a_network_learns() -> None:
    """Train two layers on parity, which one layer cannot learn."""
    rng = np.random.default_rng(0)
    b = Builder()
    x, labels = b.input("x", (4, 2)), b.input("labels", (4,), "i64")
    weights = [
        b.parameter(f"w{i}", rng.standard_normal(s).astype(np.float32)) for i, s in enumerate([(2, 16), (16, 2)])
    ]
    loss = b.cross_entropy((x @ weights[0]).relu() @ weights[1], labels)
    training.adam(b, weights, fusec.backward(loss, weights), 0.1)
    b.output(loss=loss)
    exe = one_program(fusec.compile(b, target="cpu"))
    corners = np.array([[-1, -1], [-1, 1], [1, -1], [1, 1]], np.float32)
    losses = [float(exe.step(corners, np.array([0, 1, 1, 0]))) for _ in range(100)]
    assert losses[-1] < 0.05 < losses[0]
