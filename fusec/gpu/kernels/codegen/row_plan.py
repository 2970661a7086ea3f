"""How the elements that a reduction, softmax or norm goes through are shared out among threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusec.gpu.kernels.codegen.indexing import Laid
from fusec.gpu.kernels.codegen.kernel import BLOCK, ceil_div, power_of_two
from fusec.gpu.kernels.codegen.pointwise_code import step, widest
from fusec.ir import Op, TensorType
from fusec.ops import GroupNorm, LayerNorm, Reduce, RmsNorm, Softmax

CACHED = 32  # elements a thread keeps in registers, rather than to read them once for each pass
COALESCED_BYTES = 64  # that threads side by side read in one go, at least
ENOUGH_THREADS = 1 << 17  # to fill the largest GPU


@dataclass(frozen=True)
class Axis:
    """One loop: coordinate `name` of a logical dim, of which one step is `scale` elements."""

    name: str
    dim: int
    size: int
    reduced: bool
    scale: int = 1


@dataclass(frozen=True)
class Plan:
    """How the elements of x are shared out: `threads` for one number (or vector of them), `lanes` of those a block."""

    axes: tuple[Axis, ...]  # in memory order
    row: bool
    vector: int
    threads: int
    lanes: int
    count: int  # of what the threads of one number go through, in vectors
    groups: int  # of numbers, in vectors
    chunks: int = 1  # that go to blocks of their own, where there are too few numbers to fill the GPU
    unrolled: int = 1  # turns whose elements are asked for before the first of them has come
    whole: int = 1  # what the size of a chunk, the last one's excepted, is a multiple of

    @property
    def along(self) -> int:
        return self.axes[-1].dim if self.axes else -1

    @property
    def each(self) -> int:
        """What one chunk goes through, in vectors."""
        return ceil_div(ceil_div(self.count, self.chunks), self.whole) * self.whole

    @property
    def turns(self) -> int:
        return ceil_div(self.each, self.threads)

    @property
    def blocks(self) -> int:
        """Of one chunk."""
        return ceil_div(max(self.groups, 1), self.lanes)

    @property
    def block(self) -> int:
        return self.threads * self.lanes

    @property
    def width(self) -> int:
        """Numbers a thread reduces to."""
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


def planned(op: Op, x: TensorType, types: Sequence[Laid], block: int, unrolled: int, column: int = BLOCK) -> Plan:
    """The plan for an op over x; types: of everything that is moved element by element. block: its threads, where
    there are numbers enough; column: how many of them share a number at most, where neighbours have their own."""
    axes, rank = _axes(op, x), x.rank
    row = not axes or axes[-1].reduced
    vector = 1
    if axes and axes[-1].scale == 1:
        along = axes[-1].dim
        steps = [[step(t, rank, along), *(step(t, rank, d) for d in range(rank) if d != along)] for t in types]
        vector = widest(axes[-1].size, types, steps)
    count = math.prod(a.size for a in axes if a.reduced) // (vector if row else 1)
    groups = math.prod(a.size for a in axes if not a.reduced) // (1 if row else vector)
    if row:
        side_by_side = max(1, COALESCED_BYTES // (vector * x.dtype.itemsize))
        kept = power_of_two(ceil_div(count, max(1, CACHED // vector)))  # so that registers hold the row
        threads = min(BLOCK, max(kept, min(side_by_side, power_of_two(count))))
    else:
        side_by_side = max(1, COALESCED_BYTES // (vector * x.dtype.itemsize))
        most = max(1, BLOCK // min(side_by_side, power_of_two(groups)))
        wanted = min(power_of_two(ceil_div(count, 8)), power_of_two(ceil_div(ENOUGH_THREADS, max(groups, 1))))
        threads = min(most, wanted, column)
    lanes = max(1, min(block // threads, power_of_two(max(groups, 1))), 32 // threads)
    return Plan(tuple(axes), row, vector, threads, lanes, count, groups, unrolled=unrolled)
