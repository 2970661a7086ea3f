"""Predicates about how a tensor of a cuDNN graph is stored, and how it broadcasts.

A wide dim is a dim whose size is not 1. The strides of the other dims say nothing about memory.
"""

from __future__ import annotations

from fusec.ir import TensorType, channels_last
from fusec.lowering.cudnn_graph import CudnnTensor


def wide_dims(dims: tuple[int, ...]) -> list[int]:
    """List the axes whose size is not 1."""
    return [axis for axis, size in enumerate(dims) if size != 1]


def memory_order(tensor: CudnnTensor, like: CudnnTensor | None = None) -> list[int]:
    """List the wide dims (of `like`, too) from outermost to innermost in memory."""
    wide = [d for d in wide_dims(tensor.dims) if like is None or like.dims[d] != 1]
    return sorted(wide, key=lambda d: -tensor.strides[d])


def has_innermost_channels(tensor: CudnnTensor) -> bool:
    """Tell if no wide dim has a smaller stride than the channels."""
    wide = wide_dims(tensor.dims)
    return 1 not in wide or all(tensor.strides[d] >= tensor.strides[1] for d in wide)


def is_channels_last(tensor: CudnnTensor) -> bool:
    """Tell if a tensor is stored channels last, packed or as some of the channels of a larger tensor."""
    order = channels_last(len(tensor.dims))
    wide = [d for d in order if tensor.dims[d] != 1]
    outer = [d for d in wide if d != 1]
    pitch = tensor.strides[outer[-1]] if outer else tensor.dims[1]
    whole = tuple(max(pitch, size) if d == 1 else size for d, size in enumerate(tensor.dims))
    strides = TensorType(whole, tensor.dtype, order).strides
    return all(tensor.strides[d] == strides[d] for d in wide)


def is_row_major_or_channels_last(tensor: CudnnTensor) -> bool:
    """Tell if the wide dims of a tensor are in one of the two usual orders."""
    wide = wide_dims(tensor.dims)
    return memory_order(tensor) in (wide, [d for d in wide if d != 1] + [1] * (1 in wide))


def is_packed(tensor: CudnnTensor) -> bool:
    """Tell if the elements of a tensor are contiguous, in some order of dims."""
    step = 1
    for stride, dim in sorted((s, d) for s, d in zip(tensor.strides, tensor.dims, strict=True) if d != 1):
        if stride != step:
            return False
        step *= dim
    return True


def row_length(tensor: CudnnTensor) -> int:
    """Return the size of the innermost dim, the one of stride 1; the least, if several have it."""
    return min((d for d, s in zip(tensor.dims, tensor.strides, strict=True) if s == 1), default=1)


def overlaps(tensor: CudnnTensor) -> bool:
    """Tell if two indices may address one element, because a stride is smaller than the extent it steps over."""
    extent = 0
    for dim, stride in sorted(zip(tensor.dims, tensor.strides, strict=True), key=lambda pair: pair[1]):
        if dim > 1:
            if stride <= extent:
                return True
            extent += (dim - 1) * stride
    return False


def two_of_three(operand: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Tell if an operand is broadcast along exactly two of three wide dims of a result."""
    wide = wide_dims(result)
    return len(wide) == 3 and sum(operand[axis] == 1 for axis in wide) == 2


def fits_convolution(operand: CudnnTensor, result: CudnnTensor) -> bool:
    """Tell if an operand is full, one element, per channel (1,C,1,1) or per pixel (N,1,H,W)."""
    wide = wide_dims(result.dims)
    full = [axis for axis in wide if operand.dims[axis] != 1]
    return not full or full == wide or full == [1] or full == [axis for axis in wide if axis != 1]


def is_broadcast_in_another_order(operand: CudnnTensor, result: CudnnTensor) -> bool:
    """Tell if an operand is broadcast along a dim, and its other dims are not stored row-major."""
    wide = wide_dims(operand.dims)
    return len(wide) < len(wide_dims(result.dims)) and memory_order(operand) != wide
