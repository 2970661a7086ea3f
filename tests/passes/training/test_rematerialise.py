"""Test recomputing cheap values: the arena shrinks, results stay, and inference graphs do not change."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers import assert_close, one_program

import fusec
from fusec import training
from fusec.builder import Builder, Tensor
from fusec.passes.base import Options, run
from fusec.passes.training.rematerialise import MAX_OPS, Rematerialise

Array = np.ndarray[Any, Any]


def network(depth: int = 6) -> Builder:
    """Layers whose activations (of the bias's sum and the relu) the backward half wants again."""
    rng = np.random.default_rng(0)
    b = Builder()
    x, t = b.input("x", (64, 32)), b.input("t", (64, 32))
    weights: list[Tensor] = []
    h = x
    for i in range(depth):
        w = b.parameter(f"w{i}", (rng.standard_normal((32, 32)) / 6).astype(np.float32))
        c = b.parameter(f"c{i}", (rng.standard_normal(32) / 6).astype(np.float32))
        weights += [w, c]
        h = (h @ w + c).gelu()
    loss = ((h - t) * (h - t)).mean()
    training.sgd(b, weights, fusec.backward(loss, weights), 0.1)
    b.output(loss=loss)
    return b


def test_the_arena_shrinks_and_the_answers_stay(rng: np.random.Generator) -> None:
    plain = one_program(fusec.compile(network(), target="cpu", disable=["rematerialise"]))
    lean = one_program(fusec.compile(network(), target="cpu"))
    assert lean.memory.nbytes < 0.8 * plain.memory.nbytes
    x, t = (rng.standard_normal((64, 32)).astype(np.float32) for _ in range(2))
    for _ in range(3):
        assert_close(lean.step(x, t), plain.step(x, t), 1e-6)
    assert_close(lean.value("w0"), plain.value("w0"), 1e-6)


def test_without_state_nothing_is_computed_twice() -> None:
    graph = network().graph()
    text = str(graph)
    assert str(run((Rematerialise(),), graph, Options())) == text


def test_long_recomputations_are_stored() -> None:
    """A value that takes many ops to recompute from stored values is cheaper to store."""
    b = Builder()
    w = b.parameter("w", np.ones((64, 64), np.float32))
    h = w
    for _ in range(MAX_OPS + 1):
        h = h.sigmoid()
    late = h
    for _ in range(40):
        late = (late @ late).tanh()
    b.output(y=late * h)
    graph = b.graph()
    before = len(graph)
    assert len(run((Rematerialise(),), graph, Options(state=(("w", ""),)))) == before


def test_later_users_share_one_copy() -> None:
    b = Builder()
    w = b.parameter("w", np.ones((64, 64), np.float32))
    h = w.sigmoid()
    late = h
    for _ in range(40):
        late = (late @ late).tanh()
    b.output(y=late * h, z=late + h)
    graph = run((Rematerialise(),), b.graph(), Options(state=(("w", ""),)))
    assert sum(n.op.name == "sigmoid" for n in graph.nodes) == 2
