"""CuPy, for those above this folder that hold arrays on the device but launch nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import cupy as _cupy
import numpy as np

from fusec.ir import Array

cupy: Any = _cupy


def borrowed(array: Any, dtype: np.dtype[Any]) -> Array:
    """What DLPack shares, its elements read as another type of their size; ordered after its maker's stream."""
    held = cupy.from_dlpack(array)
    return held if held.dtype == dtype else held.view(dtype)


def on_stream(pointer: int) -> AbstractContextManager[Any]:
    """Another library's stream as the current one."""
    return cupy.cuda.ExternalStream(pointer)
