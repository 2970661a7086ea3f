"""Which nodes cost nothing: their result is the operand's memory, read with other strides."""

from __future__ import annotations

from fusec.errors import LoweringError
from fusec.frame import reshape_strides
from fusec.ir import Node, TensorType
from fusec.ops import Expand, Pointwise, Relayout, Reshape, Slice, Split, Transpose


def same_storage(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two memory orders of a shape put the elements in the same places (dims of 1 do not count)."""
    rank = range(len(shape))
    return [d for d in (a or rank) if shape[d] != 1] == [d for d in (b or rank) if shape[d] != 1]


def is_view(node: Node) -> bool:
    """Whether every result of the node can share the memory of its operand."""
    return len(node.operands) == 1 and all(_offset(node, index) is not None for index in range(len(node.results)))


def view_offset(node: Node, index: int) -> int:
    """Where the memory of result `index` of a view begins in the operand's, in elements."""
    offset = _offset(node, index)
    assert offset is not None, f"{node!r} is no view"
    return offset


def _offset(node: Node, index: int) -> int | None:
    op, source, result = node.op, node.operands[0].type, node.results[index].type
    if source.dtype is not result.dtype:
        return None
    if isinstance(op, Relayout) or (isinstance(op, Pointwise) and op.name == "identity"):
        return 0 if same_storage(source.shape, source.order, result.order) else None
    if isinstance(op, Expand):
        return 0 if source.shape == result.shape and same_storage(source.shape, source.order, result.order) else None
    if isinstance(op, Reshape):
        try:
            strides = reshape_strides(node, source.shape, source.strides, result.shape)
        except LoweringError:
            return None
        return 0 if _reads(result, strides) else None
    if isinstance(op, Transpose):
        return 0 if _reads(result, tuple(source.strides[p] for p in op.perm)) else None
    if isinstance(op, Slice) and all(step == 1 for step in op.steps):
        return _block(source, result, op.starts)
    if isinstance(op, Split):
        starts = [0] * source.rank
        starts[op.axis] = sum(op.sizes[:index])
        return _block(source, result, tuple(starts))
    return None


def _reads(result: TensorType, strides: tuple[int, ...]) -> bool:
    """Whether the packed result is what memory read by `strides` holds."""
    return all(a == b for a, b, d in zip(result.strides, strides, result.shape, strict=True) if d != 1)


def _block(source: TensorType, result: TensorType, starts: tuple[int, ...]) -> int | None:
    """The offset of a part that is one contiguous, packed block of the operand; None if it is not."""
    if not same_storage(source.shape, source.order, result.order) or result.size == 0:
        return None
    if not _reads(result, source.strides):
        return None
    return sum(start * stride for start, stride in zip(starts, source.strides, strict=True))
