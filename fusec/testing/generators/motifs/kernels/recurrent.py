"""Draw steps for the kernels that compute step by step along a dim."""

from __future__ import annotations

from fusec.ir import TensorType
from fusec.ops import Cumulate
from fusec.testing.generators.graph_builder import RandomGraph
from fusec.testing.generators.motifs.layers import epilogue
from fusec.testing.generators.operations import DRAWS


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
