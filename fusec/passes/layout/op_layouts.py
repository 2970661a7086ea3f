"""Tell in which memory orders ops read their operands and write their results.

Some ops need operands in the order of the result; others read any order, or rows only.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusec.ir import Node, Return, TensorType, Value
from fusec.ops import (
    AvgPool,
    BatchNorm,
    BatchNormBackward,
    BatchNormBySums,
    BatchNormTrain,
    Cast,
    Concat,
    Dilate,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LayerNormBackward,
    LocalResponseNorm,
    MatMul,
    MaxPool,
    MaxPoolBackward,
    MaxPoolTrain,
    PackedMatMul,
    Pad,
    Pointwise,
    Reduce,
    Reshape,
    Resize,
    RmsNorm,
    Rotary,
    Slice,
    Softmax,
    Split,
    Transpose,
)
from fusec.schedule.aliasing import same_storage

_FIRST_OPERAND = (
    AvgPool,
    BatchNorm,
    BatchNormBySums,
    BatchNormTrain,
    Cast,
    Dilate,
    GroupNorm,
    InstanceNorm,
    LocalResponseNorm,
    MaxPool,
    MaxPoolTrain,
    Pad,
    Resize,
    Rotary,
    Slice,
    Split,
)
_FIRST_TWO = (BatchNormBackward, MaxPoolBackward)
# ops that cuDNN runs over one iteration space, where operands need the result's order
LOWERED_AS_ONE = (Pointwise, Cast, InstanceNorm)
# kernels write any order, but are fastest in the operand's
KERNELS = (
    *(AvgPool, Concat, GroupNorm, LocalResponseNorm, MaxPool, Dilate, Pad, Resize, Rotary),
    *(BatchNormTrain, BatchNormBySums, BatchNormBackward, MaxPoolTrain, MaxPoolBackward),
)
ROW_MAJOR = (MatMul, PackedMatMul, LayerNorm, RmsNorm, LayerNormBackward)  # cuDNN and the kernel write rows
READS_ROWS = (MatMul, PackedMatMul, LayerNorm, RmsNorm, LayerNormBackward, Softmax)
FREE_VIEWS = (Reshape, Transpose)  # free if the orders of operand and result fit


def tied_operands(node: Node) -> Iterator[int]:
    """Yield indices of operands that must have the memory order of the (first) result."""
    if isinstance(node.op, Pointwise):
        shape = node.result.type.shape
        yield from (i for i, v in enumerate(node.operands) if v.type.shape == shape)
    elif isinstance(node.op, Concat):
        yield from range(len(node.operands))
    elif isinstance(node.op, _FIRST_OPERAND) or (isinstance(node.op, Reduce) and node.op.keepdims):
        yield 0
    elif isinstance(node.op, _FIRST_TWO):
        yield from range(2)


def reads_result_order(user: Node, index: int) -> bool:
    """Tell if a cuDNN graph needs this operand in the memory order of its result."""
    return isinstance(user.op, LOWERED_AS_ONE) and index in tied_operands(user)


def tied_values(node: Node) -> list[Value]:
    """List the tied operands. `node.operands` is a new tuple each time, and a concat may have thousands."""
    operands = node.operands
    return [operands[i] for i in tied_operands(node)]


def may_change_order(node: Node) -> bool:
    """Tell if a kernel's result may have another order than its operands.

    It may if no cuDNN graph reads the result, and readers might have to copy it.
    """
    return isinstance(node.op, KERNELS) and all(
        isinstance(user.op, (Return, *FREE_VIEWS, *READS_ROWS)) for user in node.results[0].users
    )


def reads_as_rows(user: Node, index: int, type: TensorType) -> bool:
    """Tell if a matmul, row norm or softmax reads this operand row by row; a matmul may be transposed."""
    if index and not isinstance(user.op, (MatMul, LayerNormBackward)):
        return True
    if isinstance(user.op, MatMul) and type.rank >= 2:
        rank = type.rank
        if same_storage(type.shape, type.order, (*range(rank - 2), rank - 1, rank - 2)):
            return True
    return not type.order


def adds_channels(pad: Pad) -> bool:
    """Tell if a pad adds channels."""
    return len(pad.pads) > 2 and any(pad.pads[1 :: len(pad.pads) // 2])
