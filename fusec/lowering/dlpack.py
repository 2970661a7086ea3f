"""Take arrays of 8-bit floats from DLPack, whose codes for them NumPy and CuPy do not read."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from fusec.ir import Array, DType

# DLDataTypeCode of dlpack.h, version 1.1
_FLOATS: Mapping[int, DType] = {
    10: DType.F8E4M3,
    11: DType.F8E4M3FNUZ,
    12: DType.F8E5M2,
    13: DType.F8E5M2FNUZ,
    14: DType.F8E8M0,
}
_UNSIGNED = 1
_DTYPE_OFFSET = 20  # in DLTensor: after the address, the device and the rank
_VERSIONED_OFFSET = 32  # of the DLTensor in DLManagedTensorVersioned: after version, context, deleter and flags
_REFUSALS = (BufferError, RuntimeError, TypeError, ValueError)  # of NumPy and CuPy, for a type that they lack

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def from_dlpack(xp: Any, array: Any) -> Array:
    """Return an array that shares the memory of another library's.

    8-bit floats come as the types of ml_dtypes in NumPy, and as bytes in CuPy, which lacks them.
    """
    try:
        return xp.from_dlpack(array)
    except _REFUSALS as error:
        carried = _Bytes(array)
        try:
            held = xp.from_dlpack(carried)
        except _REFUSALS:
            raise error from None
        if carried.dtype is None:
            raise
        return held.view(carried.dtype.numpy) if xp is np else held


class _Bytes:
    """An array of 8-bit floats that says of itself that it holds bytes. dtype: what it holds, once it was asked."""

    def __init__(self, array: Any):
        self._array = array
        self.dtype: DType | None = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__(**options)
        for name, offset in ((b"dltensor", 0), (b"dltensor_versioned", _VERSIONED_OFFSET)):
            if _is_valid(capsule, name):
                code = ctypes.c_uint8.from_address(_pointer(capsule, name) + offset + _DTYPE_OFFSET)
                self.dtype = _FLOATS.get(code.value)
                if self.dtype is not None:
                    code.value = _UNSIGNED
        return capsule
