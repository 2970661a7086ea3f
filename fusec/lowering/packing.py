"""Convert between logical arrays and the flat buffers that their types describe."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusec.ir import Array, DType, TensorType


def pack(xp: Any, array: Array, type: TensorType) -> Array:
    """Return a flat buffer with the array in the type's memory order; it shares the array's memory if possible.

    A tensor within a larger one gets zeros around it. The type may split dims of the array, so only the sizes must be
    equal.
    """
    if type.within:
        buffer = xp.zeros(type.span, type.dtype.numpy)
        unpack(buffer, type)[...] = array
        return buffer
    order = type.order or tuple(range(type.rank))
    return xp.ascontiguousarray(array.reshape(type.shape).transpose(order)).reshape(-1)


def stored_dtype(xp: Any, dtype: DType) -> np.dtype[Any]:
    """Return the dtype of flat buffers: bytes for types of 8 bits and fewer on a GPU, because CuPy has none of them."""
    return np.dtype(np.uint8) if dtype.is_narrow and xp is not np else dtype.numpy


def as_stored(type: TensorType) -> tuple[int, ...]:
    """Return the shape of the bytes of a narrow tensor on a GPU: its own, or one dim where elements share bytes."""
    return type.shape if type.dtype.bits >= 8 else (code_bytes(type.span, type.dtype),)


def code_bytes(count: int, dtype: DType) -> int:
    """Return the bytes of `count` elements where those below 8 bits share bytes, as on a GPU."""
    return -(-count * dtype.bits // 8)


def to_codes(flat: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """Return the bytes that a GPU holds for a flat array. Types below 8 bits share bytes, the first in the low bits."""
    raw = np.ascontiguousarray(flat).view(np.uint8)
    if dtype.bits >= 8:
        return raw
    each = 8 // dtype.bits
    wide = np.zeros(-(-raw.size // each) * each, np.uint8)
    np.bitwise_and(raw, (1 << dtype.bits) - 1, out=wide[: raw.size])
    codes = wide[::each].copy()
    for i in range(1, each):
        codes |= wide[i::each] << dtype.bits * i
    return codes


def from_codes(raw: np.ndarray[Any, Any], count: int, dtype: DType) -> np.ndarray[Any, Any]:
    """Return the first `count` elements that bytes of a GPU stand for, as a flat array of the type."""
    if dtype.bits >= 8:
        return raw[: count * dtype.itemsize].view(dtype.numpy)
    shifts = np.arange(0, 8, dtype.bits, dtype=np.uint8)
    codes = (raw[:, None] >> shifts & ((1 << dtype.bits) - 1)).astype(np.uint8).reshape(-1)[:count]
    if dtype is DType.F4E2M1:
        return codes.view(dtype.numpy)
    low = 1 << (dtype.bits - 1)
    signed = dtype in (DType.I4, DType.I2)
    return ((codes.astype(np.int8) ^ low) - low if signed else codes).astype(dtype.numpy)


def unpack(buffer: Array, type: TensorType) -> Array:
    """Return the logical array as a view of the flat buffer (of its first `type.span` elements).

    Bytes that elements share, on a GPU, stay flat.
    """
    if type.dtype.bits < 8 and buffer.dtype == np.uint8:
        return buffer
    if type.within:
        return _strided(buffer[: type.span], type)
    order = type.order or tuple(range(type.rank))
    stored = buffer[: type.size].reshape([type.shape[i] for i in order])
    return to_logical(stored, order)


def is_packed_as(array: Array, type: TensorType) -> bool:
    """Tell if an array is packed in the type's memory order; strides of dims of 1 do not matter."""
    return not type.within and (array.transpose(type.order) if type.order else array).flags.c_contiguous


def to_logical(array: Array, order: tuple[int, ...]) -> Array:
    """Transpose an array whose dims are in a memory order to the logical order."""
    return array.transpose(np.argsort(order).tolist()) if order else array


def empty(xp: Any, type: TensorType) -> Array:
    """Allocate an uninitialised array of the type, packed in its memory order."""
    shape = tuple(type.shape[d] for d in type.order) if type.order else type.shape
    return to_logical(xp.empty(shape, type.dtype.numpy), type.order)


def zeros(xp: Any, type: TensorType) -> Array:
    """Allocate zeros of the type's shape; of bytes where a GPU stores those."""
    stored = stored_dtype(xp, type.dtype)
    return xp.zeros(type.shape if stored == type.dtype.numpy else as_stored(type), stored)


def in_order(array: np.ndarray[Any, Any], type: TensorType) -> np.ndarray[Any, Any]:
    """Copy an array into the type's memory order, packed."""
    copy = empty(np, type)
    copy[...] = array
    return copy


def _strided(buffer: Array, type: TensorType) -> Array:
    strides = tuple(stride * buffer.itemsize for stride in type.strides)
    if isinstance(buffer, np.ndarray):
        return np.lib.stride_tricks.as_strided(buffer, type.shape, strides, subok=True)
    module: Any = buffer.__class__  # cupy.ndarray, whose constructor takes strides
    return module(type.shape, buffer.dtype, memptr=buffer.data, strides=strides)
