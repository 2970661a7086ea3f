"""Draw steps for the kernels that choose elements, rows or boxes."""

from __future__ import annotations

import numpy as np

from fusec.ir import DType, TensorType
from fusec.ops import Cast, Reduce, TopK, pw
from fusec.testing.generators.graph_builder import RandomGraph
from fusec.testing.generators.operations import DRAWS


def arg_max(b: RandomGraph) -> None:
    """Draw the place of the largest element of long rows."""
    rows, size = b.pick([1, 3]), b.pick([1024, 2050, 5000])
    x = b.input(TensorType((rows, size), b.pick([DType.F16, DType.F32, DType.BF16])))
    is_largest = b.add(pw("cmp_ge"), x, b.add(Reduce("max", (1,), True), x))
    places, last = (b.graph.constant(np.asarray(v, np.int32)) for v in (np.arange(size)[None], size - 1))
    least = b.add(Reduce("min", (1,), b.chance(50)), b.add(pw("where"), is_largest, places, last))
    if b.chance(50):
        b.add(Cast(DType.I64), least)


def top_k(b: RandomGraph) -> None:
    """Draw the largest or smallest elements of rows, of which some are equal."""
    size = b.pick([7, 64, 300])
    x = b.input(TensorType((b.pick([1, 3, 5]), size), b.pick([DType.I32, DType.I16, DType.I8])))
    b.insert(TopK(1 + b.below(size), -1, b.chance(60)), x)


def non_max_suppression(b: RandomGraph) -> None:
    """Draw the boxes of some classes that do not overlap better ones."""
    b.input(TensorType((b.pick([1, 2, 4]), b.pick([5, 64, 90, 1100])), DType.I32))
    DRAWS["non_max_suppression"](b)
