"""Test that expanded attention keeps its meaning, for all attributes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from helpers import assert_close

from fusec.ir import DType, Graph, Op, TensorType
from fusec.ops import Attention, AttentionBackward, AttentionTrain
from fusec.passes.attention.expand_attention import expand
from fusec.reference import evaluate

F32 = DType.F32
HEADS = ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 8), (2, 1, 3, 5))  # queries; keys and values shared by two; bias


def graph_of(op: Op, shapes: Sequence[tuple[int, ...]]) -> Graph:
    graph = Graph("g")
    node = graph.insert(op, [graph.add_input(f"x{i}", TensorType(s, F32)) for i, s in enumerate(shapes)])
    graph.set_outputs(node.results, [f"y{i}" for i in range(len(node.results))])
    return graph


def check(graph: Graph, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    written = graph.clone()
    names = {node.results[0].name for node in written.nodes}
    assert set(expand(written, names)) == names
    written.verify()
    assert not any(node.op.name.startswith("attention") for node in written.nodes)
    with np.errstate(all="ignore"):
        want, got = evaluate(graph, feeds), evaluate(written, feeds)
    for name in want:
        np.testing.assert_array_equal(np.isnan(got[name]), np.isnan(want[name]))
        assert_close(np.nan_to_num(got[name]), np.nan_to_num(want[name]), 1e-5)
    return list(want.values())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("guarded", [False, True])
def test_attention(causal: bool, hides: bool, guarded: bool, rng: np.random.Generator) -> None:
    graph = graph_of(Attention(0.5, causal, hides, guarded), HEADS)
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs}
    feeds["x3"][0, 0, 1] = -np.inf  # a query that sees nothing
    feeds["x3"][1, 0, :, 0] = -np.inf
    feeds["x1"][1, 0, 0] = np.nan  # a key that none may see
    (y,) = check(graph, feeds)
    assert np.isnan(y[0, :, 1]).all() != guarded
    assert np.isnan(y[1, :2, 2]).all() != (hides or guarded), "what is hidden may be no number"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_its_gradient(causal: bool, biased: bool, rng: np.random.Generator) -> None:
    train = graph_of(AttentionTrain(0.5, causal), HEADS if biased else HEADS[:3])
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in train.inputs}
    y, sums = check(train, feeds)
    shapes = [y.shape, *HEADS[:3], y.shape, sums.shape, *HEADS[3 : 3 + biased]]
    arrays = [rng.standard_normal(y.shape), *list(feeds.values())[:3], y, sums, *list(feeds.values())[3:]]
    given = {f"x{i}": a.astype(np.float32) for i, a in enumerate(arrays)}
    found = check(graph_of(AttentionBackward(0.5, causal), shapes), given)
    assert [g.shape for g in found] == list(HEADS[:3]) and all(np.abs(g).max() > 0 for g in found)
