"""Launches that may begin before the one in front has ended (Hopper and later): they wait for it themselves, when they
need what it wrote. CuPy's own launches say nothing of this, so the driver is called."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import cupy

PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("name", ctypes.c_uint32),
        ("gap", ctypes.c_uint32),
        ("value", ctypes.c_int32),
        ("rest", ctypes.c_uint8 * 60),
    )


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    )


@cache
def driver() -> Any:
    """What launches with attributes; None if the driver is too old for it, or the GPU."""
    if int(cupy.cuda.Device().compute_capability) < 90:
        return None
    try:
        return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None


class EarlyFunction:
    """A function of a module, called as CuPy's are; launched plainly where the driver does not launch it early."""

    def __init__(self, function: Any, launch: Any):
        self._function, self._launch = function, launch
        self._attributes = (Attribute * 1)()
        self._attributes[0].name, self._attributes[0].value = PROGRAMMATIC, 1

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: Sequence[Any], *, shared_mem: int = 0) -> None:
        """Launch it on the current stream."""
        held = [_passed(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        config = Config((grid[0], 1, 1), (block[0], 1, 1), shared_mem, cupy.cuda.get_current_stream().ptr)
        config.attributes, config.count = ctypes.addressof(self._attributes), 1
        if self._launch(ctypes.byref(config), ctypes.c_void_p(self._function.kernel.ptr), places, None):
            self._function(grid, block, arguments, shared_mem=shared_mem)


def _passed(argument: Any) -> ctypes.c_uint32 | ctypes.c_uint64:
    """Where an array lies, or a number."""
    if isinstance(argument, cupy.ndarray):
        return ctypes.c_uint64(argument.data.ptr)
    return (ctypes.c_uint32 if argument.itemsize == 4 else ctypes.c_uint64)(int(argument))
