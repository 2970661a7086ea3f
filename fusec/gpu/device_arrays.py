"""Make arrays on the device from arrays of any library."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from fusec.gpu import device
from fusec.gpu.launch.reorder import can_reorder, reordered
from fusec.gpu.launch.stream_calls import TO_DEVICE
from fusec.ir import Array, TensorType
from fusec.lowering.dlpack import from_dlpack
from fusec.lowering.packing import pack

DLPACK_CUDA = 2  # kDLCUDA
LARGE_BYTES = 1 << 20  # CuPy copies by way of pinned memory, which takes longer to allocate than such an array to copy


class DeviceArrays:
    """Arrays on the device, also for what runs no program. name: that of the device; xp: their module."""

    @property
    def name(self) -> str:
        return device.device_name() or "cuda"

    @property
    def xp(self) -> Any:
        return cupy

    def from_any(self, array: Any) -> Array:
        """Return a CuPy array from a NumPy or CuPy array, or any object with DLPack."""
        if isinstance(array, cupy.ndarray):
            return array
        device = getattr(array, "__dlpack_device__", None)
        if device is not None and not isinstance(array, np.ndarray) and device()[0] == DLPACK_CUDA:
            return from_dlpack(cupy, array)
        if device is not None and not isinstance(array, (np.ndarray, np.generic)):
            return _to_device(from_dlpack(np, array))
        return _to_device(array)

    def packed(self, array: Array, type: TensorType) -> Array:
        """Return a flat buffer with an array of NumPy in the type's memory order; see `packing.pack`."""
        moved, order = self.from_any(array), type.order
        if not type.within and order not in ((), tuple(range(type.rank))) and moved.size == type.size:
            moved = moved.reshape(type.shape)  # which may split dims
            if can_reorder(moved):
                return reordered(moved, order)
        return pack(cupy, moved, type)


def _to_device(array: Any) -> Array:
    """Copy an array or a number to the device, a large array without pinned memory, on the current stream."""
    if not isinstance(array, np.ndarray) or array.nbytes < LARGE_BYTES or not array.flags.c_contiguous:
        return cupy.asarray(array)
    raw = cupy.empty(array.nbytes, np.uint8)
    stream = cupy.cuda.get_current_stream().ptr
    cupy.cuda.runtime.memcpyAsync(raw.data.ptr, array.ctypes.data, array.nbytes, TO_DEVICE, stream)
    return raw.view(array.dtype).reshape(array.shape)
