"""Make arrays on the device from arrays of any library."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from fusec.gpu import device
from fusec.gpu.launch.device_constants import arranged, arranged_from, packed, stored_order, to_device
from fusec.ir import Array, TensorType
from fusec.lowering.dlpack import from_dlpack

DLPACK_CUDA = 2  # kDLCUDA


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
            return to_device(from_dlpack(np, array))
        return to_device(array)

    def packed(self, array: Array, type: TensorType) -> Array:
        """Return a flat buffer with an array of NumPy in the type's memory order; see `packing.pack`."""
        if type.dtype.is_narrow:
            return packed(array, type)
        order = stored_order(array)
        if order is None:
            return arranged(self.from_any(array), type)
        return arranged_from(self.from_any(array.transpose(order)), order, type)
