"""Give access to CuPy to modules that hold arrays on the device but launch nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import cupy as _cupy
import numpy as np

from fusec.ir import Array, DType
from fusec.system.dataclass import dataclass

cupy: Any = _cupy


def borrowed(array: Any, dtype: np.dtype[Any]) -> Array:
    """View an array shared by DLPack as another type of the same size, ordered after its producer's stream.

    Bytes of a type that CuPy lacks stay bytes.
    """
    held = cupy.from_dlpack(array)
    return held if held.dtype == dtype or DType.of(dtype).is_narrow else held.view(dtype)


@dataclass(frozen=True)
class _Foreign:
    """Stream of another library, in CUDA's stream protocol."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def on_stream(pointer: int) -> AbstractContextManager[Any]:
    """Make a stream of another library the current one."""
    return cupy.cuda.Stream.from_external(_Foreign(pointer))
