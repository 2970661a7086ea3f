"""Test arrays of 8-bit floats from another library by DLPack: a producer writes dlpack.h's codes into a capsule."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import fusec
from fusec.ir import DType
from fusec.lowering.dlpack import from_dlpack

CODES = {DType.F8E4M3: 10, DType.F8E4M3FNUZ: 11, DType.F8E5M2: 12, DType.F8E5M2FNUZ: 13, DType.F8E8M0: 14}


class Foreign:
    """An array of another library, on the host: NumPy's capsule of bytes, with another type code in it."""

    def __init__(self, array: np.ndarray, code: int, versioned: bool):
        self._raw, self._code, self._versioned = array.view(np.uint8), code, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._raw.__dlpack__(max_version=(1, 1) if self._versioned else None)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        at = pointer(capsule, b"dltensor_versioned" if self._versioned else b"dltensor")
        ctypes.c_uint8.from_address(at + (32 if self._versioned else 0) + 20).value = self._code
        return capsule


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("dtype", CODES, ids=lambda d: d.value)
def test_floats_of_eight_bits_share_memory(dtype: DType, versioned: bool) -> None:
    array = np.arange(254, dtype=np.uint8).view(dtype.numpy).reshape(2, 127)
    got = from_dlpack(np, Foreign(array, CODES[dtype], versioned))
    assert got.dtype == dtype.numpy
    assert got.shape == (2, 127)
    np.testing.assert_array_equal(got.view(np.uint8), array.view(np.uint8))
    assert np.shares_memory(got, array)


def test_a_type_that_nobody_knows_is_refused() -> None:
    array = np.arange(4, dtype=np.uint8)
    with pytest.raises((BufferError, RuntimeError, TypeError, ValueError)):
        from_dlpack(np, Foreign(array, 9, versioned=True))


def test_an_executable_takes_them() -> None:
    text = 'graph "g" (%x: f8e4m3[4]) {\n  %y = cast(%x) {to=f32}\n  return %y\n}'
    exe = fusec.compile(fusec.text.parse(text, {}), target="cpu")
    x = np.array([0.5, -448, 1, 3], np.float32).astype(DType.F8E4M3.numpy)
    np.testing.assert_array_equal(exe(Foreign(x, 10, versioned=True)), x.astype(np.float32))
