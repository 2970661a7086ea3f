"""Storage: a logical array to the flat buffer that its type describes, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusec.ir import Array, TensorType


def pack(xp: Any, array: Array, type: TensorType) -> Array:
    """A flat, contiguous buffer holding `array` in the type's memory order; shares memory if it can. What lies within
    something larger has zeros around it."""
    if type.within:
        buffer = xp.zeros(type.span, type.dtype.numpy)
        unpack(buffer, type)[...] = array
        return buffer
    order = type.order or tuple(range(type.rank))
    return xp.ascontiguousarray(array.transpose(order)).reshape(-1)


def unpack(buffer: Array, type: TensorType) -> Array:
    """The logical array, a view of the flat buffer (the first `type.span` elements of it)."""
    if type.within:
        return _strided(buffer[: type.span], type)
    order = type.order or tuple(range(type.rank))
    stored = buffer[: type.size].reshape([type.shape[i] for i in order])
    return stored.transpose(np.argsort(order).tolist()) if order else stored


def _strided(buffer: Array, type: TensorType) -> Array:
    strides = tuple(stride * buffer.itemsize for stride in type.strides)
    if isinstance(buffer, np.ndarray):
        return np.lib.stride_tricks.as_strided(buffer, type.shape, strides, subok=True)
    module: Any = buffer.__class__  # CuPy's array, which is made like this
    return module(type.shape, buffer.dtype, memptr=buffer.data, strides=strides)
