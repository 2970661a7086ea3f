"""Storage: a logical array to the flat buffer that its type describes, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusec.ir import Array, TensorType


def pack(xp: Any, array: Array, type: TensorType) -> Array:
    """A flat, contiguous buffer holding `array` in the type's memory order; shares memory if it can. What lies within
    something larger has zeros around it. The type may cut dims in pieces, to order these: of the array's size it is."""
    if type.within:
        buffer = xp.zeros(type.span, type.dtype.numpy)
        unpack(buffer, type)[...] = array
        return buffer
    order = type.order or tuple(range(type.rank))
    return xp.ascontiguousarray(array.reshape(type.shape).transpose(order)).reshape(-1)


def unpack(buffer: Array, type: TensorType) -> Array:
    """The logical array, a view of the flat buffer (the first `type.span` elements of it)."""
    if type.within:
        return _strided(buffer[: type.span], type)
    order = type.order or tuple(range(type.rank))
    stored = buffer[: type.size].reshape([type.shape[i] for i in order])
    return turned(stored, order)


def lies(array: Array, type: TensorType) -> bool:
    """Whether an array of that shape lies packed in the type's memory order; the strides of dims of 1 do not count."""
    return not type.within and (array.transpose(type.order) if type.order else array).flags.c_contiguous


def turned(array: Array, order: tuple[int, ...]) -> Array:
    """An array whose dims are those of a memory order, as the logical one."""
    return array.transpose(np.argsort(order).tolist()) if order else array


def empty(xp: Any, type: TensorType) -> Array:
    """An array of the type, packed in its memory order; what it holds is arbitrary."""
    shape = tuple(type.shape[d] for d in type.order) if type.order else type.shape
    return turned(xp.empty(shape, type.dtype.numpy), type.order)


def in_order(array: np.ndarray[Any, Any], type: TensorType) -> np.ndarray[Any, Any]:
    """A copy that is packed in the type's memory order."""
    copy = empty(np, type)
    copy[...] = array
    return copy


def _strided(buffer: Array, type: TensorType) -> Array:
    strides = tuple(stride * buffer.itemsize for stride in type.strides)
    if isinstance(buffer, np.ndarray):
        return np.lib.stride_tricks.as_strided(buffer, type.shape, strides, subok=True)
    module: Any = buffer.__class__  # CuPy's array, which is made like this
    return module(type.shape, buffer.dtype, memptr=buffer.data, strides=strides)
