"""Find nodes that need no copy: views of their operand's memory, and concats whose operands are in place."""

from __future__ import annotations

from fusec.errors import LoweringError
from fusec.ir import Node, TensorType
from fusec.lowering.dim_folding import backward, forward, part_of
from fusec.ops import PART_VIEWS, Concat, Expand, Pointwise, Relayout, Reshape, Transpose


def same_storage(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Tell if two memory orders of a shape store the elements in the same places; dims of 1 do not matter."""
    rank = range(len(shape))
    return [d for d in (a or rank) if shape[d] != 1] == [d for d in (b or rank) if shape[d] != 1]


def is_view(node: Node) -> bool:
    """Tell if every result of the node can share the memory of its operand."""
    if len(node.operands) != 1:
        return False
    source = node.operands[0].type
    return all(would_view(node, source, v.type, index) is not None for index, v in enumerate(node.results))


def joins_in_place(node: Node) -> bool:
    """Tell if the types of a concat's operands say that they are parts of its result, so that it copies nothing.

    The memory plan decides where the parts are, and checks that it is possible.
    """
    if not isinstance(node.op, Concat) or node.result.type.dtype.bits < 8:  # a part may begin within a byte
        return False
    joined = node.result.type
    whole = joined.within or joined.shape
    return all(
        (v.type.dtype, v.type.order, v.type.within) == (joined.dtype, joined.order, whole) for v in node.operands
    )


def view_offset(node: Node, index: int) -> int:
    """Return where the memory of result `index` of a view begins in the operand's, in elements."""
    offset = would_view(node, node.operands[0].type, node.results[index].type, index)
    assert offset is not None, f"{node!r} is no view"
    return offset


def would_view(node: Node, source: TensorType, result: TensorType, index: int = 0) -> int | None:
    """Return the offset, in elements, of a result with this type in an operand with this type; None if it is a copy.

    index: number of the result, of a split.
    """
    op = node.op
    if source.dtype is not result.dtype or result.within:
        return None
    if source.within and not isinstance(op, (Reshape, Transpose, *PART_VIEWS)):
        return None
    if isinstance(op, Relayout) or (isinstance(op, Pointwise) and op.name == "identity"):
        return 0 if same_storage(source.shape, source.order, result.order) else None
    if isinstance(op, Expand):
        return 0 if source.shape == result.shape and same_storage(source.shape, source.order, result.order) else None
    if isinstance(op, (Reshape, Transpose)):
        strides = _forward(node, source)
        return 0 if strides is not None and _reads(result, strides) else None
    if isinstance(op, PART_VIEWS):
        starts, steps = part_of(node, index)
        return _block(source, result, starts) if all(step == 1 for step in steps) else None
    return None


def result_order(node: Node, source: TensorType) -> tuple[int, ...] | None:
    """Return the layout in which a reshape or transpose of an operand with this layout is a view, if there is one."""
    strides = _forward(node, source)
    return None if strides is None else _packed(node.result.type.shape, strides)


def operand_order(node: Node, result: TensorType) -> tuple[int, ...] | None:
    """Return the operand's layout in which a reshape or transpose into a result with this layout is a view."""
    try:
        return _packed(node.operands[0].type.shape, backward(node, result.strides))
    except LoweringError:
        return None


def _forward(node: Node, source: TensorType) -> tuple[int, ...] | None:
    try:
        return forward(node, source.shape, source.strides)
    except LoweringError:
        return None


def _packed(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the layout with these strides, dims of 1 outermost; None if the elements are not packed."""
    wide = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: (-strides[d], d))
    step = 1
    for dim in reversed(wide):
        if strides[dim] != step and 0 not in shape:
            return None
        step *= shape[dim]
    return (*(d for d in range(len(shape)) if shape[d] == 1), *wide)


def _reads(result: TensorType, strides: tuple[int, ...]) -> bool:
    """Tell if memory read by `strides` holds the packed result."""
    return all(a == b for a, b, d in zip(result.strides, strides, result.shape, strict=True) if d != 1)


def _block(source: TensorType, result: TensorType, starts: tuple[int, ...]) -> int | None:
    """Return the offset of a part that is one contiguous, packed block of the operand; None if it is not."""
    if result.size == 0 or not _reads(result, source.strides):
        return None
    offset = sum(start * stride for start, stride in zip(starts, source.strides, strict=True))
    return None if offset and source.dtype.bits < 8 else offset  # because it may begin within a byte
