"""Copy constants to the device, and arrange them there in the memory order in which steps read them.

NumPy takes seconds to arrange a large weight in the many dims that a kernel of packed products reads.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from fusec.gpu.launch.reorder import DIMS, can_reorder, reordered, reordered_codes
from fusec.gpu.launch.stream_calls import TO_DEVICE
from fusec.ir import Array, TensorType
from fusec.lowering.packing import pack, to_codes

LARGE_BYTES = 1 << 20  # of an array that is copied as it lies in memory, and then arranged


class DeviceConstants:
    """Packs constants of the host, each copied to the device once for all orders. It holds what it copied."""

    def __init__(self) -> None:
        self._moved: dict[int, tuple[Array, Array]] = {}  # by identity: the array on the host, and on the device

    def __call__(self, array: np.ndarray[Any, Any], type: TensorType) -> Array:
        """Return a flat buffer with an array in the type's memory order; see `packing.pack`."""
        if not _is_arranged_here(type):
            return packed(array, type)
        if id(array) not in self._moved:
            self._moved[id(array)] = array, _moved(array, type)
        return arranged(self._moved[id(array)][1], type)


def packed(array: np.ndarray[Any, Any], type: TensorType) -> Array:
    """Return a flat buffer on the device with an array of the host in the type's memory order; see `packing.pack`."""
    if _is_arranged_here(type):
        return arranged(_moved(array, type), type)
    return to_device(to_codes(pack(np, array, type), type.dtype))


def arranged(moved: Array, type: TensorType) -> Array:
    """Return a flat buffer with an array of the device in the type's memory order.

    moved: row-major, of the size of the type; bytes for a narrow type, one for each element.
    """
    if not type.within and moved.size == type.size:
        moved = moved.reshape(type.shape)  # which may split dims
        order = type.order or tuple(range(type.rank))
        if type.dtype.bits < 8:
            return reordered_codes(moved, order, type.dtype.bits)
        if order != tuple(range(type.rank)) and can_reorder(moved):
            return reordered(moved, order)
    return pack(cupy, moved, type)


def stored_order(array: Any) -> tuple[int, ...] | None:
    """Return the order of dims in which a large host array is contiguous; None if it is row-major or not contiguous."""
    if not isinstance(array, np.ndarray) or array.nbytes < LARGE_BYTES or array.flags.c_contiguous:
        return None
    order = tuple(sorted(range(array.ndim), key=lambda dim: -array.strides[dim]))
    return order if array.transpose(order).flags.c_contiguous else None


def arranged_from(moved: Array, order: tuple[int, ...], type: TensorType) -> Array:
    """Return a flat buffer with an array of the device in the type's memory order.

    moved: contiguous, with its dims in an order
    """
    logical = tuple(order.index(dim) for dim in range(moved.ndim))
    shape = tuple(moved.shape[place] for place in logical)
    if not type.within and shape == type.shape:
        wanted = tuple(logical[dim] for dim in type.order or range(type.rank))
        if wanted == tuple(range(moved.ndim)):
            return moved.reshape(-1)
        if can_reorder(moved):
            return reordered(moved, wanted)
    row_major = reordered(moved, logical) if can_reorder(moved) else cupy.ascontiguousarray(moved.transpose(logical))
    return arranged(row_major.reshape(shape), type)


def to_device(array: Any) -> Array:
    """Copy an array or a number to the device on the current stream, an array without pinned memory.

    CuPy copies by way of pinned memory, which takes longer to allocate than most arrays to copy.
    """
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or not array.size:
        return cupy.asarray(array)
    raw = cupy.empty(array.nbytes, np.uint8)
    stream = cupy.cuda.get_current_stream().ptr
    cupy.cuda.runtime.memcpyAsync(raw.data.ptr, array.ctypes.data, array.nbytes, TO_DEVICE, stream)
    return raw.view(array.dtype).reshape(array.shape)


def _is_arranged_here(type: TensorType) -> bool:
    """Tell if the device arranges constants of a type: of narrow types, those that `reordered_codes` takes."""
    return not type.dtype.is_narrow or (not type.within and 0 < type.rank <= DIMS and type.size > 0)


def _moved(array: np.ndarray[Any, Any], type: TensorType) -> Array:
    return to_device(np.ascontiguousarray(array).view(np.uint8) if type.dtype.is_narrow else array)
