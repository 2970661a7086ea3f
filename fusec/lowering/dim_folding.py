"""Fold the dims of a step to the few dims that cuDNN takes, and describe views of tensors by strides.

cuDNN takes rank 3 for matmul and pointwise graphs, and rank 4 or 5 for convolutions, with explicit strides. A
DimFolding says which dims of the step are merged to each dim of cuDNN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fusec.errors import LoweringError
from fusec.ir import Node, Value, channels_last, quote
from fusec.ops import PART_VIEWS, STRIDED_VIEWS, Relayout, Slice, Split, Transpose
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class Strided:
    """A tensor as a view of the memory of `root`. Strides and offset are in elements."""

    root: Value
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


def trace(value: Value) -> Strided:
    """Follow views back to the value whose memory they share: an input, a constant or a computed value."""
    node = value.node
    if node is None or not isinstance(node.op, STRIDED_VIEWS):
        return Strided(value, value.type.shape, value.type.strides)
    source = trace(node.operands[0])
    if isinstance(node.op, PART_VIEWS):
        starts, steps = part_of(node, value.index)
        offset = sum(start * stride for start, stride in zip(starts, source.strides, strict=True))
        strides = tuple(step * stride for step, stride in zip(steps, source.strides, strict=True))
        return Strided(source.root, value.type.shape, strides, source.offset + offset)
    return Strided(source.root, value.type.shape, forward(node, source.shape, source.strides), source.offset)


def part_of(node: Node, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first index of a result of a slice or split in the operand, and its steps."""
    if isinstance(node.op, Slice):
        return node.op.starts, node.op.steps
    assert isinstance(node.op, Split)
    rank = node.operands[0].type.rank
    before = sum(node.op.sizes[:index])
    return tuple(before if d == node.op.axis % rank else 0 for d in range(rank)), (1,) * rank


def forward(node: Node, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Compute the strides of the result of a reshape, transpose or relayout, for an operand stored with `strides`.

    Raises LoweringError if the op needs a copy.
    """
    if isinstance(node.op, Transpose):
        return tuple(strides[p] for p in node.op.perm)
    if isinstance(node.op, Relayout):
        return strides
    return reshape_strides(node, shape, strides, node.result.type.shape)


def backward(node: Node, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Compute the strides of the operand of a view, for a result that is stored with `strides`.

    Raises LoweringError if there are none.
    """
    source = node.operands[0].type.shape
    if isinstance(node.op, PART_VIEWS):
        raise LoweringError(f"{quote(node.results[0].name)}: part of a result whose rest is not stored")
    if isinstance(node.op, Transpose):
        inverse = [0] * len(strides)
        for place, dim in enumerate(node.op.perm):
            inverse[dim] = strides[place]
        return tuple(inverse)
    if isinstance(node.op, Relayout):
        return strides
    return reshape_strides(node, node.result.type.shape, strides, source)


def reshape_strides(
    node: Node, shape: tuple[int, ...], strides: tuple[int, ...], target: tuple[int, ...]
) -> tuple[int, ...]:
    """Compute the strides of the result of a reshape. Raises LoweringError if the reshape needs a copy."""
    # NumPy computes the strides. One byte stands for the whole tensor, because nothing is read.
    dummy = np.lib.stride_tricks.as_strided(np.empty(1, np.uint8), shape, strides)
    try:
        return tuple(dummy.reshape(target, copy=False).strides)
    except ValueError:
        raise LoweringError(
            f"{quote(node.result.name)}: reshape {list(shape)} to {list(target)} of this memory order needs a copy"
        ) from None


@dataclass(frozen=True)
class DimFolding:
    """The dims of cuDNN, each a group of dims of `shape` that are merged; an empty group is a dim of 1.

    shape: the iteration space of the step, to which all tensors broadcast.
    order: the dims of cuDNN from outermost to innermost in memory, for tensors whose layout is free.
    """

    shape: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[i] for i in group) for group in self.groups)

    def place(self, what: str, shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return dims and strides of a tensor that broadcasts to the iteration space.

        what: name of the tensor, for the message.
        Raises LoweringError if the strides do not let its dims be merged.
        """
        lead = len(self.shape) - len(shape)
        if lead < 0:
            raise LoweringError(f"{what}: rank {len(shape)} in an iteration space of rank {len(self.shape)}")
        full_shape, full_strides = [1] * lead + list(shape), [0] * lead + list(strides)
        dims: list[int] = []
        placed: list[int | None] = []
        for group in self.groups:
            wide = [i for i in group if self.shape[i] != 1]
            full = [i for i in wide if full_shape[i] != 1]
            if not full:
                dims.append(1)
                placed.append(None)
                continue
            if full != wide:
                raise LoweringError(f"{what}: {list(shape)} broadcasts along part of a merged dim")
            for outer, inner in pairwise(full):
                if full_strides[outer] != full_strides[inner] * full_shape[inner]:
                    raise LoweringError(f"{what}: its memory order does not let dims be merged")
            dims.append(math.prod(full_shape[i] for i in full))
            placed.append(full_strides[full[-1]])
        return tuple(dims), self._fill(dims, placed)

    def packed(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return dims and strides of a tensor whose layout is free; it is packed in `order`."""
        lead = len(self.shape) - len(shape)
        full = [1] * lead + list(shape)
        dims = [math.prod(full[i] for i in group) for group in self.groups]
        return tuple(dims), self._fill(dims, [None] * len(dims))

    def _fill(self, dims: Sequence[int], strides: Sequence[int | None]) -> tuple[int, ...]:
        """Give dims without a stride (broadcast, of size 1, or free) the stride of a packed tensor."""
        filled = list(strides)
        step = 1
        for axis in reversed(self.order):
            stride = filled[axis]
            if stride is None:
                filled[axis] = stride = step
            step = max(step, stride * dims[axis])
        return tuple(s if s is not None else 1 for s in filled)


def regular_strides(dims: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Give dims of size 1 the strides that follow from those of the other dims, in a tensor of rank 4 or 5.

    No address depends on these strides, but cuDNN recognises row-major filters and images by them. With other strides
    every engine misread filters [1, 4, 2, 1]. Engines also take the distance between pixels from the width's stride:
    for an image of width 1 within a larger tensor it is the stride of the height.
    """
    rank = len(dims)
    if rank not in (4, 5):
        return strides
    wide = [d for d in range(rank) if dims[d] != 1]
    stored = sorted(wide, key=lambda d: -strides[d])
    for order in (channels_last(rank), tuple(range(rank))):
        if stored == [d for d in order if d in wide]:
            filled, step = list(strides), 1
            for place, d in reversed(list(enumerate(order))):
                outer = [strides[o] for o in order[:place] if o in wide]
                filled[d] = strides[d] if d in wide else outer[-1] if outer and place < rank - 1 else step
                step = filled[d] * dims[d]
            return tuple(filled)
    return strides


def spatial_folding(shape: tuple[int, ...]) -> DimFolding:
    """Return a folding that merges no dims, channels last.

    The runtime engines take rank 4 and 5 only. So one spatial dim gets a dim of 1 before it, and no spatial dim
    becomes two of 1.
    """
    axes: list[tuple[int, ...]] = [(i,) for i in range(len(shape))]
    axes[2:2] = [()] * max(4 - len(shape), 0)
    return DimFolding(shape, tuple(axes), (0, *range(2, len(axes)), 1))


def matrix_folding(shape: tuple[int, ...], fold_batch: bool) -> DimFolding:
    """Return [batch, rows, columns]; with `fold_batch` the batch dims join the rows: [1, batch*rows, columns]."""
    last = len(shape) - 1
    if fold_batch:
        return DimFolding(shape, ((), tuple(range(last)), (last,)), (0, 1, 2))
    return DimFolding(shape, (tuple(range(last - 1)), (last - 1,), (last,)), (0, 1, 2))


def pointwise_folding(shape: tuple[int, ...], order: Sequence[int], tensors: Sequence[Strided]) -> DimFolding:
    """Merge neighbouring dims in memory order wherever the strides of every tensor allow it.

    Raises LoweringError if more than three dims remain.
    """
    rank = len(shape)
    aligned = [
        ((1,) * (rank - len(t.shape)) + tuple(t.shape), (0,) * (rank - len(t.strides)) + tuple(t.strides))
        for t in tensors
    ]

    def mergeable(outer: int, inner: int) -> bool:
        for dims, strides in aligned:
            if (dims[outer] == 1) != (dims[inner] == 1):
                return False
            if dims[outer] != 1 and strides[outer] != strides[inner] * dims[inner]:
                return False
        return True

    groups: list[tuple[int, ...]] = []
    for axis in (a for a in order if shape[a] != 1):
        if groups and mergeable(groups[-1][-1], axis):
            groups[-1] = (*groups[-1], axis)
        else:
            groups.append((axis,))
    if len(groups) == 1 and math.prod(shape) >= _LONG_ROW:
        groups = _split_long_row(shape, groups[0])
    if len(groups) > 3:
        raise LoweringError(f"a pointwise graph over {list(shape)} needs {len(groups)} dims; cuDNN takes 3")
    return DimFolding(shape, tuple([()] * (3 - len(groups)) + groups), (0, 1, 2))


# A long row is split, because it is slower than rows of a good length, and a launch grid has at most 65,535 tiles of
# 128 columns.
_LONG_ROW, _GOOD_ROW = 1 << 16, 1 << 10


def _split_long_row(shape: tuple[int, ...], group: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Split the dims of one long row into rows of a better length, if there is more than one dim."""

    def distance(split_at: int) -> float:
        return abs(math.log(math.prod(shape[a] for a in group[split_at:]) / _GOOD_ROW))

    split_at = min(range(1, len(group)), key=distance, default=0)
    return [group[:split_at], group[split_at:]] if split_at else [group]
