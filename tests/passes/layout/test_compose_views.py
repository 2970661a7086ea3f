"""Test random views around linear layers: rewriting ends, keeps the meaning, and leaves fewer transposes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from passes.cases import apply, assert_same_meaning

from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import MatMul, Reshape, Transpose, pw
from fusec.passes.base import Options
from fusec.passes.layout.compose_views import common_dims
from fusec.passes.rewriting.rewriter import NoMatch

STEPS = 8


def random_shape(rng: np.random.Generator, size: int) -> tuple[int, ...]:
    """A shape of that size: its prime factors, with some ones, in random groups."""
    factors = [1] * int(rng.integers(1, 3))
    for prime in (2, 3, 5, 7):
        while size % prime == 0:
            factors.append(prime)
            size //= prime
    rng.shuffle(factors)
    ends = sorted({1, *rng.integers(1, len(factors), int(rng.integers(1, 4))).tolist()} - {len(factors)})
    return tuple(math.prod(part) for part in (factors[a:b] for a, b in zip([0, *ends], [*ends, None], strict=True)))


def step(graph: Graph, value: Value, rng: np.random.Generator) -> Value:
    """One more view, linear layer, bias or function."""
    rank, columns = value.type.rank, value.type.shape[-1]
    match int(rng.integers(0, 6)):
        case 0 | 1:
            return graph.add(Transpose(tuple(rng.permutation(rank).tolist())), value)
        case 2:
            return graph.add(Transpose((*rng.permutation(rank - 1).tolist(), rank - 1)), value)
        case 3:
            return graph.add(Reshape(random_shape(rng, value.type.size)), value)
        case 4:
            wanted = int(rng.choice([2, 6, 12]))
            product = graph.add(MatMul(), value, graph.constant(rng.standard_normal((columns, wanted))))
            return graph.add(pw("add"), product, graph.constant(rng.standard_normal(wanted)))
        case _:
            return graph.add(pw("tanh"), value)


@pytest.mark.parametrize("seed", range(150))
def test_random_chains(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = Graph("g")
    values = [graph.add_input("x", TensorType(random_shape(rng, 360), DType.F64))]
    while len(values) <= STEPS:
        values.append(step(graph, values[-1], rng))
    also = values[int(rng.integers(1, len(values)))] if rng.random() < 0.3 else values[-1]
    graph.set_outputs([values[-1], also], ["y", "also"])
    graph.prune()
    before = graph.clone()
    after = apply("sink_views", graph, Options())
    assert_same_meaning(before, after, rng, 1e-12)
    assert turns(after) <= turns(before)


def turns(graph: Graph) -> int:
    """Count transposes of computed values; those of constants are folded."""
    return sum(isinstance(n.op, Transpose) and n.operands[0].literal is None for n in graph.nodes)


def test_common_dims() -> None:
    assert common_dims((9, 3, 32), (9, 12, 8)) == ([(9,), (3,), (4, 8)], [(9,), (3, 4), (8,)])
    assert common_dims((1, 6), (2, 1, 3)) == ([(), (2, 3)], [(2,), (), (3,)])
    with pytest.raises(NoMatch, match=r"\[4, 6\] and \[6, 4\] have no parts in common"):
        common_dims((4, 6), (6, 4))
    with pytest.raises(NoMatch, match="empty"):
        common_dims((0, 6), (6, 0))
