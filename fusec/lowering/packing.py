"""Convert between logical arrays and the flat buffers that their types describe."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusec.ir import Array, DType, TensorType
from fusec.system.threaded_parts import each_part

_RUN = 1 << 17  # bytes of codes that a thread converts at a time, which stay in the processor's cache


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
    each, low = 8 // dtype.bits, (1 << dtype.bits) - 1
    codes = np.empty(-(-raw.size // each), np.uint8)
    whole = raw.size // each * each
    wide, rest = raw[:whole].view(f"<u{each}"), raw[whole:]

    def pack(start: int) -> None:
        some = wide[start : start + _RUN]
        made = some & low
        for i in range(1, each):
            made |= some >> (8 - dtype.bits) * i & low << dtype.bits * i
        codes[start : start + some.size] = made

    each_part(pack, range(0, wide.size, _RUN), raw.nbytes)
    if rest.size:
        codes[-1] = sum(int(code & low) << dtype.bits * i for i, code in enumerate(rest))
    return codes


def from_codes(raw: np.ndarray[Any, Any], count: int, dtype: DType) -> np.ndarray[Any, Any]:
    """Return the first `count` elements that bytes of a GPU stand for, as a flat array of the type.

    An element of fewer than 8 bits has a byte of its own in NumPy, whose high bits are zero.
    """
    if dtype.bits >= 8:
        return raw[: count * dtype.itemsize].view(dtype.numpy)
    each, low = 8 // dtype.bits, (1 << dtype.bits) - 1
    made = np.empty(raw.size, f"<u{each}")

    def spread(start: int) -> None:
        some = raw[start : start + _RUN].astype(made.dtype)
        wide = some.copy()
        for i in range(1, each):
            wide |= some << (8 - dtype.bits) * i
        made[start : start + some.size] = wide & int.from_bytes([low] * each)

    each_part(spread, range(0, raw.size, _RUN), made.nbytes)
    return made.view(np.uint8)[:count].view(dtype.numpy)


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
