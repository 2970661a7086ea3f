"""Plan how threads share the elements of a reduction, softmax or norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.indexing import Strided
from fusec.gpu.kernels.codegen.kernel import BLOCK, ceil_div, power_of_two
from fusec.gpu.kernels.codegen.pointwise_code import strides_from, widest_vector
from fusec.ir import Op, TensorType
from fusec.ops import GroupNorm, LayerNorm, Reduce, RmsNorm, Softmax
from fusec.system.dataclass import dataclass

CACHED = 32  # elements that a thread caches in registers; with more, each pass reads them again
COALESCED_BYTES = 64  # that neighbouring threads read together, at least


@dataclass(frozen=True)
class Axis:
    """One loop over coordinate `name` of a logical dim.

    scale: elements of the dim for one step of the coordinate.
    """

    name: str
    dim: int
    size: int
    reduced: bool
    scale: int = 1


@dataclass(frozen=True)
class RowPlan:
    """Shares of the elements of x among threads.

    A thread reduces to one number, or to a vector of them.

    axes: the loops, in memory order.
    row: the innermost dim is reduced, so neighbours belong to one number.
    vector: elements of one load.
    threads: threads that share one number (or vector of numbers).
    lanes: numbers (or vectors) that a block handles.
    count: vectors (rows) or elements (columns) that go into one number.
    groups: numbers, in vectors unless `row`.
    chunks: blocks that share one number, because few numbers alone would not fill the GPU.
    unrolled: turns whose loads are issued together.
    whole: the size of each chunk, except the last, is a multiple of this.
    """

    axes: tuple[Axis, ...]
    row: bool
    vector: int
    threads: int
    lanes: int
    count: int
    groups: int
    chunks: int = 1
    unrolled: int = 1
    whole: int = 1

    @property
    def along(self) -> int:
        return self.axes[-1].dim if self.axes else -1

    @property
    def each(self) -> int:
        """Vectors of a chunk."""
        return ceil_div(ceil_div(self.count, self.chunks), self.whole) * self.whole

    @property
    def turns(self) -> int:
        """Vectors that a thread visits."""
        return ceil_div(self.each, self.threads)

    @property
    def blocks(self) -> int:
        """Blocks of one chunk."""
        return ceil_div(max(self.groups, 1), self.lanes)

    @property
    def block(self) -> int:
        return self.threads * self.lanes

    @property
    def width(self) -> int:
        """Numbers that a thread reduces to."""
        return 1 if self.row else self.vector


def _axes(op: Op, x: TensorType) -> list[Axis]:
    if isinstance(op, Reduce):
        reduced = set(op.axes)
    elif isinstance(op, Softmax):
        reduced = {op.axis % x.rank}
    elif isinstance(op, (LayerNorm, RmsNorm)):
        reduced = set(range(op.axis % x.rank, x.rank))
    else:
        reduced = set(range(2, x.rank))
    axes: list[Axis] = []
    for dim in x.order or range(x.rank):
        if isinstance(op, GroupNorm) and dim == 1:
            each = x.shape[1] // op.groups
            axes += [Axis("g1", 1, op.groups, False, each), Axis("c1", 1, each, True)]
        else:
            axes.append(Axis(f"c{dim}", dim, x.shape[dim], dim in reduced))
    return [axis for axis in axes if axis.size != 1]


class RowShape(NamedTuple):
    """The shape of a block of a row plan.

    block: threads of a block, if there are enough numbers.
    unrolled: turns whose loads are issued together.
    column: the most threads that share a number, where neighbours have numbers of their own.
    """

    block: int
    unrolled: int
    column: int = BLOCK


def plan_rows(op: Op, x: TensorType, types: Sequence[Strided], shape: RowShape, figures: GpuFigures) -> RowPlan:
    """Plan an op over x.

    types: all tensors that are read or written element by element.
    figures: figures of the GPU, which enough threads must fill.
    """
    block, unrolled, column = shape
    axes, rank = _axes(op, x), x.rank
    row = not axes or axes[-1].reduced
    vector = 1
    if axes and axes[-1].scale == 1:
        vector = widest_vector(axes[-1].size, types, [strides_from(t, rank, axes[-1].dim) for t in types])
    count = math.prod(a.size for a in axes if a.reduced) // (vector if row else 1)
    groups = math.prod(a.size for a in axes if not a.reduced) // (1 if row else vector)
    side_by_side = max(1, COALESCED_BYTES // (vector * x.dtype.itemsize))
    if row:
        fitting = power_of_two(ceil_div(count, max(1, CACHED // vector)))  # so that a row fits into registers
        threads = min(BLOCK, max(fitting, min(side_by_side, power_of_two(count))))
    else:
        most = max(1, BLOCK // min(side_by_side, power_of_two(groups)))
        filling = power_of_two(ceil_div(figures.enough_threads, max(groups, 1)))
        wanted = min(power_of_two(ceil_div(count, 8)), filling)
        threads = min(most, wanted, column)
    lanes = max(1, min(block // threads, power_of_two(max(groups, 1))), 32 // threads)
    return RowPlan(tuple(axes), row, vector, threads, lanes, count, groups, unrolled=unrolled)
