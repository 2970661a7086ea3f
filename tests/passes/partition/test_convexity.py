"""Test convexity by topological window against networkx, which rebuilds the condensation each time."""

from __future__ import annotations

from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from passes.partition.graphs import random_graphs

from fusec.ir import DType, Graph, TensorType
from fusec.ops import pw
from fusec.passes.partition import convexity
from fusec.passes.partition.convexity import Condensation, Wiring


def quotient(wiring: Wiring, vertex: list[int]) -> nx.DiGraph[int]:
    """The condensation, from scratch."""
    result = nx.DiGraph()
    result.add_nodes_from(vertex)
    for i, preds in enumerate(wiring.preds):
        result.add_edges_from((vertex[p], vertex[i]) for p in preds if vertex[p] != vertex[i])
    return result


@given(random_graphs(), st.randoms(use_true_random=False))
def test_stays_convex_is_acyclicity_of_the_condensation(graph: Graph, random: Any) -> None:
    wiring = Wiring(graph)
    state = Condensation(wiring)
    for _ in range(4):
        single = [i for i in range(len(wiring.nodes)) if state.members(state.vertex[i]) == (i,)]
        random.shuffle(single)
        inside: set[int] = set()
        for i in single[: random.randint(1, 8)]:
            trial = [-1 if j in inside or j == i else v for j, v in enumerate(state.vertex)]
            acyclic = nx.is_directed_acyclic_graph(quotient(wiring, trial))
            assert state.stays_convex(inside, i) == acyclic
            if acyclic:
                inside.add(i)
        if inside:
            state.merge(inside)
        condensation = quotient(wiring, state.vertex)
        assert nx.is_directed_acyclic_graph(condensation)
        assert all(state.place[a] < state.place[b] for a, b in condensation.edges)


def test_a_path_through_a_merged_vertex_counts() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType((4,), DType.F32))
    a = graph.add(pw("relu"), x)
    b, d = graph.add(pw("relu"), a), graph.add(pw("relu"), x)
    c = graph.add(pw("neg"), d)
    graph.set_outputs([b, c])
    state = Condensation(Wiring(graph))  # a -> b and d -> c: numbers 0, 1, 2, 3
    assert state.stays_convex({0}, 3)
    assert state.stays_convex({1}, 2)
    state.merge({0, 3})
    assert not state.stays_convex({1}, 2)  # d -> {c, a} -> b


def test_a_search_that_is_too_long_answers_not_convex(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    v = x = graph.add_input("x", TensorType((4,), DType.F32))
    a = graph.add(pw("exp"), x)
    for _ in range(20):
        v = graph.add(pw("relu"), v)
    b = graph.add(pw("add"), a, v)
    graph.set_outputs([b])
    state = Condensation(Wiring(graph))
    assert state.stays_convex({0}, 21)
    monkeypatch.setattr(convexity, "SEARCH_LIMIT", 10)
    assert not state.stays_convex({0}, 21)
