"""Give access to CuPy to modules that hold arrays on the device but launch nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import cupy as _cupy
import numpy as np

from fusec.ir import Array, DType
from fusec.lowering.dlpack import from_dlpack

cupy: Any = _cupy


def borrowed(array: Any, dtype: np.dtype[Any]) -> Array:
    """View an array shared by DLPack as another type of the same size, ordered after its producer's stream.

    Bytes of a type that CuPy lacks stay bytes.
    """
    held = cupy.from_dlpack(array)
    return held if held.dtype == dtype or DType.of(dtype).is_narrow else held.view(dtype)


class CupyArrays:
    """Arrays on the device, for what runs no program. xp: the array module."""

    xp: Any = cupy

    def from_any(self, array: Any) -> Array:
        """Return a CuPy array from a NumPy or CuPy array, or any object with DLPack."""
        if isinstance(array, cupy.ndarray):
            return array
        device = getattr(array, "__dlpack_device__", None)
        if device is not None and not isinstance(array, np.ndarray) and device()[0] == 2:  # DLPack: kDLCUDA
            return from_dlpack(cupy, array)
        if device is not None and not isinstance(array, (np.ndarray, np.generic)):
            return cupy.asarray(from_dlpack(np, array))
        return cupy.asarray(array)


@dataclass(frozen=True)
class _Foreign:
    """Stream of another library, in CUDA's stream protocol."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def on_stream(pointer: int) -> AbstractContextManager[Any]:
    """Make a stream of another library the current one."""
    return cupy.cuda.Stream.from_external(_Foreign(pointer))
