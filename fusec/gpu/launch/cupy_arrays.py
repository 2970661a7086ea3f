"""CuPy, for those above this folder that hold arrays on the device but launch nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import cupy as _cupy
import numpy as np

from fusec.ir import Array

cupy: Any = _cupy


def borrowed(array: Any, dtype: np.dtype[Any]) -> Array:
    """What DLPack shares, its elements read as another type of their size; ordered after its maker's stream."""
    held = cupy.from_dlpack(array)
    return held if held.dtype == dtype else held.view(dtype)


@dataclass(frozen=True)
class _Foreign:
    """A stream of another library, as CUDA's stream protocol has it."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def on_stream(pointer: int) -> AbstractContextManager[Any]:
    """Another library's stream as the current one."""
    return cupy.cuda.Stream.from_external(_Foreign(pointer))
