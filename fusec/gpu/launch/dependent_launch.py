"""Launch kernels that may begin before the launch before them ends (dependent launch, Hopper and later).

Such a kernel itself waits before it reads results of that launch. The driver is called, because CuPy cannot do this.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import cupy

PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
CAPTURED = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


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
    """Return the driver's launch function with attributes; None if the driver or the GPU is too old."""
    return None if int(cupy.cuda.Device().compute_capability) < 90 else driver_function("cuLaunchKernelEx")


@cache
def _capture_info() -> Any:
    """Return the driver's function that lists what the next launch on a captured stream waits for; None without it."""
    return driver_function("cuStreamGetCaptureInfo_v2")


def driver_function(name: str) -> Any:
    """Return a function of the driver; None if it has none of that name, or there is no driver."""
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None


def dependencies(stream: int) -> int:
    """Count the nodes of a graph that the next launch on a stream waits for: 0 if the stream is not captured.

    2 stands for "several" where the driver does not say.
    """
    ask = _capture_info()
    status, number, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
    graph, nodes = ctypes.c_void_p(), ctypes.c_void_p()
    places = (ctypes.byref(each) for each in (status, number, graph, nodes, count))
    if ask is None or ask(ctypes.c_void_p(stream), *places):
        return 2
    return count.value if status.value == CAPTURED else 0


class DependentFunction:
    """Function of a module with CuPy's interface. It is launched plainly where it cannot begin early.

    That is where the driver refuses it, and where it waits for several launches in a graph. On an H200, such a kernel
    read results that one of them had not written yet.
    """

    def __init__(self, function: Any, launch: Any):
        self._function, self._launch = function, launch
        self._attributes = (Attribute * 1)()
        self._attributes[0].name, self._attributes[0].value = PROGRAMMATIC, 1

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: Sequence[Any], *, shared_mem: int = 0) -> None:
        """Launch the function on the current stream."""
        stream = cupy.cuda.get_current_stream().ptr
        config = Config((grid[0], 1, 1), (block[0], 1, 1), shared_mem, stream)
        if dependencies(stream) > 1 or not self._is_launched(config, arguments):
            self._function(grid, block, arguments, shared_mem=shared_mem)

    def _is_launched(self, config: Config, arguments: Sequence[Any]) -> bool:
        """Launch the function early; False if the driver refuses that."""
        held = [_passed(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        config.attributes, config.count = ctypes.addressof(self._attributes), 1
        return not self._launch(ctypes.byref(config), ctypes.c_void_p(self._function.kernel.ptr), places, None)


def _passed(argument: Any) -> ctypes.c_uint32 | ctypes.c_uint64:
    """Return the address of an array, or a number, as a launch argument."""
    if isinstance(argument, cupy.ndarray):
        return ctypes.c_uint64(argument.data.ptr)
    return (ctypes.c_uint32 if argument.itemsize == 4 else ctypes.c_uint64)(int(argument))
