"""Offer onnxruntime's `OrtValue`: an array on the host or the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusec.ir import Array, DType
from fusec.runtime import on_host
from fusec.session.device_memory import array_module, require_first, to_host

# element types that onnxruntime names otherwise than numpy
_TYPES: Mapping[DType, str] = {
    DType.F64: "double",
    DType.F32: "float",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F8E4M3: "float8e4m3fn",
    DType.F8E4M3FNUZ: "float8e4m3fnuz",
    DType.F8E5M2: "float8e5m2",
    DType.F8E5M2FNUZ: "float8e5m2fnuz",
    DType.F4E2M1: "float4e2m1",
    DType.I4: "int4",
    DType.U4: "uint4",
}


class OrtValue:
    """An array on the host or the device, whose memory a binding reads or writes."""

    def __init__(self, array: Any):
        self._array = array

    @classmethod
    def ortvalue_from_numpy(cls, array: np.ndarray[Any, Any], device_type: str = "cpu", device_id: int = 0) -> OrtValue:
        """Copy an array to a device, `cpu` or `cuda`."""
        require_first(device_id)
        return cls(array_module(device_type).array(array))

    @classmethod
    def ortvalue_from_shape_and_type(
        cls, shape: Sequence[int], element_type: Any, device_type: str = "cpu", device_id: int = 0
    ) -> OrtValue:
        """Make an array without setting its elements."""
        require_first(device_id)
        return cls(array_module(device_type).empty(tuple(shape), np.dtype(element_type)))

    @classmethod
    def from_dlpack(cls, array: Any) -> OrtValue:
        """Wrap an array that shares its memory: of NumPy, or with DLPack or `__cuda_array_interface__`."""
        return cls(array)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the array on the host."""
        return to_host(self._array)

    def device_name(self) -> str:
        """Return the device: `cpu` or `cuda`."""
        return "cpu" if on_host(self._array) else "cuda"

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def data_type(self) -> str:
        """Return the type as onnxruntime writes it, such as `tensor(float)`."""
        return type_name(DType.of(self._array.dtype))

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        interface = getattr(self._array, "__cuda_array_interface__", None) or self._array.__array_interface__
        return int(interface["data"][0])

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    @property
    def array(self) -> Array:
        """Return the array itself."""
        return self._array


def type_name(dtype: DType) -> str:
    return f"tensor({_TYPES.get(dtype, dtype.numpy.name)})"
