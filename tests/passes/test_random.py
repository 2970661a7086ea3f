"""Test that the pipeline keeps the meaning of random graphs of the ops that rules match."""

from __future__ import annotations

import numpy as np
import pytest
from passes.cases import assert_same_meaning

from fusec.errors import VerifyError
from fusec.ir import DType, Graph, Op, TensorType, Value
from fusec.ops import (
    AvgPool,
    BatchNorm,
    Concat,
    Conv,
    Expand,
    MatMul,
    MaxPool,
    Pad,
    Reduce,
    Reshape,
    Slice,
    Transpose,
    pw,
)
from fusec.passes import PIPELINE
from fusec.passes.base import run

SHAPES = ((2, 4, 3, 3), (2, 3, 3, 4), (4, 1, 1), (1, 4, 1, 1), (4,), (), (3, 1))
UNARY = ("relu", "tanh", "sigmoid", "abs", "neg", "identity", "swish", "gelu")
BINARY = ("add", "add", "mul", "mul", "sub", "max", "min")
NUMBERS = (0.0, 1.0, -1.0, 0.5, 3.0, 6.0, 1 / 6)


def random_graph(rng: np.random.Generator, size: int) -> Graph:
    graph = Graph("g")
    values = [graph.add_input(n, TensorType((2, 4, 3, 3), DType.F64)) for n in ("x", "z")]
    while size:
        new = _step(graph, values, rng)
        if new is not None:
            values.append(new)
            size -= 1
    unused = [v for v in values if not v.uses][-3:]
    graph.set_outputs(unused or [values[-1]], [f"y{i}" for i in range(len(unused) or 1)])
    graph.prune()
    return graph


def _step(graph: Graph, values: list[Value], rng: np.random.Generator) -> Value | None:
    """One more value, or None where the op drawn does not take the operands drawn."""
    x = values[-1] if rng.random() < 0.7 else values[rng.integers(len(values))]
    op, others = _draw(graph, x, values, rng)
    try:
        (type,) = op.infer(x.type, *(v.type for v in others))
    except VerifyError:
        return None
    if not 0 < type.size <= 2000:
        return None
    operands = [x, *others]
    if op.commutative and rng.random() < 0.5:
        operands.reverse()
    return graph.add(op, *operands)


def _constant(graph: Graph, shape: tuple[int, ...], rng: np.random.Generator) -> Value:
    if rng.random() < 0.3:
        return graph.constant(np.full(shape, rng.choice(NUMBERS)))
    return graph.constant(rng.uniform(0.5, 1.5, shape) * rng.choice([-1.0, 1.0], shape))


def _draw(graph: Graph, x: Value, values: list[Value], rng: np.random.Generator) -> tuple[Op, list[Value]]:
    t, rank = x.type, x.type.rank
    channels = t.shape[1] if rank > 1 else 1
    match int(rng.integers(16)):
        case 0 | 1:
            return pw(str(rng.choice(UNARY))), []
        case 2 | 3 | 4:
            return pw(str(rng.choice(BINARY))), [_constant(graph, SHAPES[rng.integers(len(SHAPES))], rng)]
        case 5:
            return pw("div"), [graph.constant(rng.uniform(0.5, 2, SHAPES[rng.integers(2, len(SHAPES))]))]
        case 6:
            return pw(str(rng.choice(BINARY))), [values[rng.integers(len(values))]]
        case 7:
            return pw("clip", min=float(rng.choice([-1.0, 0.0])), max=float(rng.choice([0.5, 6.0]))), []
        case 8:
            return Transpose(tuple(int(i) for i in rng.permutation(rank))), []
        case 9:
            flat = rng.random() < 0.5 and rank > 1
            return Reshape((t.shape[0] * channels, *t.shape[2:]) if flat else (2, 4, 3, 3)), []
        case 10:
            pads = tuple(int(p) for p in rng.integers(0, 2, 2 * max(rank - 2, 0)))
            half = len(pads) // 2
            lead = (0,) * min(rank, 2)
            value = float(rng.choice([0.0, 0.0, 1.0]))
            return Pad((*lead, *pads[:half], *lead, *pads[half:]), "constant", value), []
        case 11:
            groups, pad = int(rng.choice([1, 2])), int(rng.integers(2))
            w = _constant(graph, (4, max(channels // groups, 1), 2, 2), rng)
            return Conv((1, 1), (pad,) * 4, (1, 1), groups), [w]
        case 12:
            scale, mean, var = (graph.constant(rng.uniform(0.5, 1.5, channels)) for _ in range(3))
            return BatchNorm(), [scale, mean, mean, var]
        case 13:
            pool = (MaxPool, AvgPool)[rng.integers(2)]
            pads = tuple(int(p) for p in rng.integers(0, 2, 4))
            return pool((2, 2), (1, 1), pads, (1, 1), bool(rng.random() < 0.3)), []
        case 14:
            return MatMul(), [_constant(graph, (t.shape[-1] if rank else 1, 3), rng)]
        case _:
            axis = int(rng.integers(max(rank, 1)))
            start = tuple(int(rng.integers(d)) for d in t.shape)
            rest = tuple(d - s for d, s in zip(t.shape, start, strict=True))
            options: list[tuple[Op, list[Value]]] = [
                (Reduce("mean", (axis,), bool(rng.random() < 0.7)), []),
                (Concat(axis), [x]),
                (Slice(start, rest, (1,) * rank), []),
                (Expand((2, *t.shape[1:])), []),
            ]
            return options[rng.integers(len(options))]


@pytest.mark.parametrize("start", range(0, 120, 20))
def test_the_pipeline_keeps_the_meaning_of_random_graphs(start: int) -> None:
    for seed in range(start, start + 20):
        rng = np.random.default_rng(seed)
        before = random_graph(rng, 12)
        after = run(PIPELINE, before.clone())
        try:
            assert_same_meaning(before, after, rng, 1e-9)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\n{before}\n=>\n{after}") from error
