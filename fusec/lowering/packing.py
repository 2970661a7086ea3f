"""Convert between logical arrays and the flat buffers that their types describe."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusec.ir import Array, TensorType


def pack(xp: Any, array: Array, type: TensorType) -> Array:
    """Copy `array` into a flat, contiguous buffer in the type's memory order; share memory if possible.

    A tensor within a larger one gets zeros around it. The type may split dims to order the pieces, so only its size
    must be the array's.
    """
    if type.within:
        buffer = xp.zeros(type.span, type.dtype.numpy)
        unpack(buffer, type)[...] = array
        return buffer
    order = type.order or tuple(range(type.rank))
    return xp.ascontiguousarray(array.reshape(type.shape).transpose(order)).reshape(-1)


def unpack(buffer: Array, type: TensorType) -> Array:
    """Return the logical array as a view of the flat buffer (of its first `type.span` elements)."""
    if type.within:
        return _strided(buffer[: type.span], type)
    order = type.order or tuple(range(type.rank))
    stored = buffer[: type.size].reshape([type.shape[i] for i in order])
    return to_logical(stored, order)


def is_packed_as(array: Array, type: TensorType) -> bool:
    """Return True if an array is packed in the type's memory order; strides of dims of 1 do not count."""
    return not type.within and (array.transpose(type.order) if type.order else array).flags.c_contiguous


def to_logical(array: Array, order: tuple[int, ...]) -> Array:
    """Transpose an array whose dims are in a memory order to the logical order."""
    return array.transpose(np.argsort(order).tolist()) if order else array


def empty(xp: Any, type: TensorType) -> Array:
    """Allocate an uninitialised array of the type, packed in its memory order."""
    shape = tuple(type.shape[d] for d in type.order) if type.order else type.shape
    return to_logical(xp.empty(shape, type.dtype.numpy), type.order)


def in_order(array: np.ndarray[Any, Any], type: TensorType) -> np.ndarray[Any, Any]:
    """Copy an array into the type's memory order, packed."""
    copy = empty(np, type)
    copy[...] = array
    return copy


def _strided(buffer: Array, type: TensorType) -> Array:
    strides = tuple(stride * buffer.itemsize for stride in type.strides)
    if isinstance(buffer, np.ndarray):
        return np.lib.stride_tricks.as_strided(buffer, type.shape, strides, subok=True)
    module: Any = buffer.__class__  # CuPy's array, which is made like this
    return module(type.shape, buffer.dtype, memptr=buffer.data, strides=strides)
