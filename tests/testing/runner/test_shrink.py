"""Test shrinking: the smallest graph, valid candidates, determinism and the time limit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import HEALTH_CHECKS
from hypothesis import given, settings

from fusec.ir import Constant, DType, Graph, TensorType, channels_last
from fusec.ops import BY_NAME, Conv, MaxPool, Reduce, Split, Transpose, pw
from fusec.testing.case import Case
from fusec.testing.failure import ops_of
from fusec.testing.runner.shrink import STAGES, digest, shrink_case, shrink_graph
from fusec.testing.strategies import graphs

F32 = DType.F32


def model() -> Graph:
    """A convolution with bias, residual and relu, then pooling, a product by a number and two more outputs."""
    rng = np.random.default_rng(0)
    graph = Graph("model")
    x = graph.add_input("x", TensorType((2, 4, 8, 8), F32, channels_last(4)))
    z = graph.add_input("z", TensorType((2, 4, 8, 8), F32))
    w = graph.constant(rng.standard_normal((4, 4, 3, 3)).astype(np.float32))
    b = graph.constant(rng.standard_normal((4, 1, 1)).astype(np.float32))
    conv = graph.add(Conv((1, 1), (1, 1, 1, 1), (1, 1)), x, w)
    biased = graph.add(pw("add"), conv, b)
    summed = graph.add(pw("add"), biased, z)
    active = graph.add(pw("relu"), summed)
    pooled = graph.add(MaxPool((2, 2), (2, 2), (0, 0, 0, 0), (1, 1)), active)
    scaled = graph.add(pw("mul"), pooled, graph.constant(np.float32(0.37)))
    turned = graph.add(Transpose((0, 2, 3, 1)), scaled)
    left, right = graph.insert(Split(3, (2, 2)), [turned]).results
    total = graph.add(Reduce("sum", (0, 1)), left)
    graph.set_outputs([total, right, active])
    return graph


def contains(*names: str) -> Callable[[Graph], bool]:
    def fails(graph: Graph) -> bool:
        graph.verify()
        return set(names) <= set(ops_of(graph))

    return fails


@pytest.mark.parametrize("name", ["conv", "add", "relu", "max_pool", "mul", "transpose", "split", "reduce"])
def test_graph_shrinks_to_the_op_that_fails(name: str) -> None:
    small = shrink_graph(model(), contains(name))
    assert ops_of(small) == {name: 1}
    assert len(small.outputs) == 1
    assert small.inputs[0].type.size <= 16


def test_graph_shrinks_to_two_connected_ops() -> None:
    assert ops_of(shrink_graph(model(), contains("conv", "relu"))) == {"conv": 1, "relu": 1}  # the sums are bypassed

    def joined(graph: Graph) -> bool:
        """A sum of a convolution and an input."""
        return any(
            n.op.name == "add" and any(v.node is not None and v.node.op.name == "conv" for v in n.operands)
            for n in graph.nodes
        )

    small = shrink_graph(model(), joined)
    assert ops_of(small) == {"conv": 1, "add": 1}
    assert not any(v.type.order for v in small.values())


def test_two_outputs_stay_if_both_are_needed() -> None:
    small = shrink_graph(model(), lambda g: len(g.outputs) >= 2 and "relu" in ops_of(g))
    assert len(small.outputs) == 2
    assert ops_of(small) == {"relu": 1}


def test_constants_attributes_sizes_and_types_become_simple() -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType((3, 6, 9, 7), DType.BF16, (3, 1, 0, 2)))
    w = graph.constant(np.random.default_rng(1).standard_normal((6, 3, 3, 3)).astype(DType.BF16.numpy))
    y = graph.add(Conv((2, 1), (1, 0, 2, 1), (1, 2), 2), x, w)
    graph.set_outputs([graph.add(pw("leaky_relu", alpha=0.3), y)])
    small = shrink_graph(graph, contains("conv", "leaky_relu"))
    conv, relu = (n for n in small.nodes if not isinstance(n.op, Constant))
    assert conv.op == Conv((1, 1), (0, 0, 0, 0), (1, 1), conv.op.attributes["groups"])
    assert relu.op == BY_NAME["leaky_relu"]()
    assert all(v.type.dtype is F32 and not v.type.order for v in small.values())
    literals = [n.op.literal for n in small.nodes if isinstance(n.op, Constant)]
    assert all(not literal.array.any() for literal in literals)


def test_one_input_replaces_two() -> None:
    graph = Graph("g")
    x, y = (graph.add_input(n, TensorType((4,), F32)) for n in "xy")
    graph.add_input("unused", TensorType((4,), F32))
    graph.set_outputs([graph.add(pw("add"), x, y)])
    assert len(shrink_graph(graph, contains("add")).inputs) == 1

    def different(g: Graph) -> bool:
        return any(n.op.name == "add" and n.operands[0] is not n.operands[1] for n in g.nodes)

    assert len(shrink_graph(graph, different).inputs) == 2


def test_shrinking_is_deterministic_and_never_grows() -> None:
    seen: list[int] = []

    def fails(graph: Graph) -> bool:
        holds = contains("add", "max_pool")(graph)
        if holds:
            seen.append(len(graph))
        return holds

    first = shrink_graph(model(), fails)
    assert digest(shrink_graph(model(), contains("add", "max_pool"))) == digest(first)
    assert digest(shrink_graph(first, contains("add", "max_pool"))) == digest(first), "there was more to take"
    assert all(a >= b for a, b in itertools.pairwise(seen))
    assert str(first).startswith('graph "fuzz" (%x0: f32[')


def test_shrinking_stops_after_its_time() -> None:
    start = time.monotonic()
    calls = 0

    def fails(graph: Graph) -> bool:
        nonlocal calls
        calls += 1
        time.sleep(0.02)
        return contains("relu")(graph)

    shrink_graph(model(), fails, seconds=0.1)
    assert time.monotonic() - start < 1.0
    assert calls < 10


def test_graph_stays_if_no_smaller_one_fails() -> None:
    graph = model()
    kept = shrink_graph(graph, lambda g: g is graph)
    assert kept is graph


@settings(max_examples=25, deadline=None, suppress_health_check=HEALTH_CHECKS, derandomize=True)
@given(graphs())
def test_every_candidate_is_a_valid_graph(graph: Graph) -> None:
    before = digest(graph)
    for stage in STAGES:
        for candidate in stage(graph):
            if candidate is not None:
                candidate.verify()
    assert digest(graph) == before


@settings(max_examples=15, deadline=None, suppress_health_check=HEALTH_CHECKS, derandomize=True)
@given(graphs())
def test_any_op_of_a_random_graph_can_be_isolated(graph: Graph) -> None:
    """The op stays alone, with nothing that it does not need."""
    wanted = next(n.op for n in graph.nodes if not isinstance(n.op, Constant))

    def fails(g: Graph) -> bool:
        return any(n.op.name == wanted.name for n in g.nodes)

    assert sum(ops_of(shrink_graph(graph, fails)).values()) == 1


def test_cases_become_simple() -> None:
    case = Case(7, "special", "bf16", frozenset({"cse", "assign_layout", "simplify"}), "moody")

    def fails(**needs: Any) -> Case:
        return shrink_case(case, lambda c: all(getattr(c, name) == value for name, value in needs.items()))

    assert fails().to_json() == Case(0, "integers").to_json()
    assert fails(precision="bf16", seed=7).to_json() == Case(7, "integers", "bf16").to_json()
    kept = shrink_case(case, lambda c: "assign_layout" in c.disable)
    assert kept.disable == {"assign_layout"}
