"""Offer onnxruntime's `OrtValue`: an array on the host or the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusec.errors import FusecError
from fusec.ir import NUMBERS, Array, DType
from fusec.runtime import on_host
from fusec.session.device_memory import (
    at_address,
    copied,
    copy_into,
    device_of,
    element_dtype,
    empty,
    require_first,
    to_host,
)
from fusec.session.missing_names import MissingNames

# element types that onnxruntime names otherwise than numpy
_TYPES: Mapping[DType, str] = {
    DType.F64: "double",
    DType.STRING: "string",
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


class OrtValue(MissingNames):
    """An array on the host or the device, whose memory a binding reads or writes.

    ortvalue: an array, or an OrtValue of onnxruntime, whose memory is shared.
    numpy_obj, session: accepted as onnxruntime does; they are not needed.
    """

    def __init__(self, ortvalue: Any, numpy_obj: Any = None, session: Any = None):
        self._array = array_of_value(ortvalue)

    @classmethod
    def ortvalue_from_numpy(
        cls, numpy_obj: np.ndarray[Any, Any], /, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """Share the memory of an array on the host, or copy it to `cuda`."""
        require_first(device_id)
        if device_of(device_type) == "cpu":
            return cls(np.asarray(numpy_obj))
        return cls(copied(device_type, np.asarray(numpy_obj)))

    @classmethod
    def ortvalue_from_numpy_with_onnx_type(cls, data: np.ndarray[Any, Any], /, onnx_element_type: int) -> OrtValue:
        """Share the memory of an array on the host, read as a type of ONNX of the same size."""
        dtype = element_dtype(onnx_element_type)
        if dtype.itemsize != data.dtype.itemsize:
            raise FusecError(f"elements of {data.dtype} cannot be read as {dtype}, which has another size")
        return cls(data.view(dtype))

    @classmethod
    def ortvalue_from_shape_and_type(
        cls,
        shape: Sequence[int],
        element_type: Any,
        device_type: str = "cpu",
        device_id: int = 0,
        vendor_id: int = -1,
        memory_info: None = None,
    ) -> OrtValue:
        """Make an array without setting its elements.

        element_type: a NumPy type, or a number from ONNX's TensorProto.
        memory_info: must be None, because fusec has no allocators of onnxruntime.
        """
        require_first(device_id)
        if memory_info is not None:
            raise FusecError("memory_info names an allocator of onnxruntime: give device_type")
        dtype = element_dtype(element_type)
        if DType.of_host(dtype) is DType.STRING:
            raise FusecError("an OrtValue of strings is made from an array, because strings have no fixed size")
        return cls(empty(device_type, shape, dtype))

    @classmethod
    def from_dlpack(cls, data: Any, /) -> OrtValue:
        """Wrap an array that shares its memory: of NumPy, or with DLPack or `__cuda_array_interface__`."""
        return cls(data)

    def update_inplace(self, data: Any) -> None:
        """Copy an array or OrtValue into this memory, whose address stays the same."""
        source = array_of_value(data)
        if tuple(source.shape) != tuple(self._array.shape) or source.dtype != self._array.dtype:
            raise FusecError(
                f"an OrtValue of {self._array.dtype} {list(self._array.shape)} cannot take {source.dtype} "
                f"{list(source.shape)}"
            )
        if on_host(self._array):
            self._array[...] = to_host(source)
        else:
            copy_into(self._array, source)

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
        return type_name(DType.of_host(self._array.dtype))

    def element_type(self) -> int:
        """Return the number of the type in ONNX's TensorProto."""
        from fusec.frontends.onnx.model_file.tensors import ELEMENT_TYPES  # here, because importing onnx takes long

        return ELEMENT_TYPES[DType.of_host(self._array.dtype)]

    def tensor_size_in_bytes(self) -> int:
        return int(np.prod(self._array.shape, dtype=np.int64)) * self._array.dtype.itemsize

    def has_value(self) -> bool:
        return True

    def is_tensor(self) -> bool:
        return True

    def is_sparse_tensor(self) -> bool:
        return False

    def is_tensor_sequence(self) -> bool:
        return False

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        interface = getattr(self._array, "__cuda_array_interface__", None) or self._array.__array_interface__
        return int(interface["data"][0])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

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


def array_of_value(value: Any) -> Any:
    """Return the array of an OrtValue of fusec or onnxruntime, which shares its memory; any other value is returned.

    Raises FusecError if onnxruntime's value is no tensor of numbers.
    """
    if isinstance(value, OrtValue):
        return value.array
    if not (type(value).__module__.startswith("onnxruntime.") and hasattr(value, "data_ptr")):
        return value
    named = {type_name(dtype): dtype for dtype in NUMBERS}
    if value.data_type() not in named:
        raise FusecError(f"an OrtValue of {value.data_type()} is no tensor that fusec has")
    place = value.device_name().lower()
    return at_address(place, named[value.data_type()].numpy, value.shape(), value.data_ptr(), owner=value)
