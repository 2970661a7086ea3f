"""Draw steps for the kernels that compute step by step along a dim."""

from __future__ import annotations

import numpy as np

from fusec.ir import DType, TensorType, Value
from fusec.ops import Concat, Cumulate, Expand, MatMul, Pad, Reduce, Reshape, Slice
from fusec.testing.generators.graph_builder import RandomGraph
from fusec.testing.generators.motifs.layers import epilogue
from fusec.testing.generators.operations import DRAWS
from fusec.testing.generators.operations.scans import run


def recurrent(b: RandomGraph) -> None:
    """Draw a layer of LSTM, GRU or RNN."""
    DRAWS["recurrent"](b)


def linear_scan(b: RandomGraph) -> None:
    """Draw a linear recurrence, of fewer steps than a thread loads together or of more."""
    x = b.input(TensorType((b.pick([2, 1]), b.pick([3, 8, 17, 1]), b.pick([4, 1, 33])), b.dtype))
    with b.focused(x):
        DRAWS["linear_scan"](b)


def cumulate(b: RandomGraph) -> None:
    """Draw a running sum or product between pointwise ops: of a line for a thread, for some threads, or in parts."""
    size = b.pick([3, 8, 70, 300, 1100, 1])
    x = b.input(TensorType((b.pick([2, 1]), size, b.pick([1, 1, 3])), b.dtype))
    kind = b.pick(["sum", "sum", "prod"])
    low, high = (-1.0, 1.0) if kind == "sum" else (0.9, 1.0)
    x = b.bounded(x, low, high) if kind == "prod" or b.chance(50) else x
    epilogue(b, b.add(Cumulate(kind, 1), x), 2)


def scan(b: RandomGraph) -> None:
    """Draw a loop whose rows are independent, so that each block runs one, or a loop of a random body."""
    b.pick([_paths, _layer, DRAWS["scan"]])(b)


def _paths(b: RandomGraph) -> None:
    """Draw the recursion of the probabilities of paths through a sequence, as in connectionist classification."""
    body, batch, size = b.nested(), b.pick([3, 1, 5]), b.pick([7, 2, 40])
    alpha, x = (body.input(TensorType((batch, size), b.dtype)) for _ in range(2))
    skips = body.input(TensorType((batch, size), DType.BOOL))
    low = body.graph.constant(np.array(-1e4, b.dtype.numpy))

    def shifted(by: int) -> Value:
        padded = body.add(Pad((0, by, 0, 0), "constant", -1e4), alpha)
        return body.add(Slice((0, 0), (batch, size), (1, 1)), padded)

    before = body.pointwise("where", skips, shifted(2), body.add(Expand((batch, size)), low))
    paths = [body.add(Reshape((1, batch, size)), v) for v in (alpha, shifted(1), before)]
    total = body.add(Reduce("log_sum_exp", (0,), False), body.add(Concat(0), *paths))
    total = body.pointwise("add", total, x)
    best = body.add(Reduce("max", (1,), True), total)
    run(b, body, ([body.pointwise("sub", total, best)], [best]), (b.pick([9, 1, 30]), 1))


def _layer(b: RandomGraph) -> None:
    """Draw a recurrent layer: the state is multiplied by weights in each step."""
    body, batch, size = b.nested(), b.pick([3, 1, 4]), b.pick([4, 9, 33])
    state, x = (body.input(TensorType((batch, size), b.dtype)) for _ in range(2))
    weights = body.input(TensorType((size, size), b.dtype))
    scaled = body.pointwise("mul", weights, body.graph.constant(np.array(1 / 16, b.dtype.numpy)))
    total = body.pointwise("add", body.add(MatMul(), state, scaled), x)
    after = body.pointwise(body.pick(["tanh", "sigmoid", "relu"]), total)
    after = body.pointwise("clip", after, min=-1.0, max=1.0)
    run(b, body, ([after], [after] if b.chance(70) else []), (b.pick([5, 1, 11]), 1))
