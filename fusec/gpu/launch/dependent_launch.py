"""Launch kernels that may begin before the launch before them ends (dependent launch, Hopper and later).

Such a kernel itself waits before it reads results of that launch. The driver is called, because CuPy cannot do this.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import cupy
import numpy as np

from fusec.ir import Array

Size = tuple[int, int, int]  # of a launch: blocks, threads of a block, and bytes of dynamic shared memory of a block
PreparedLaunch = Callable[[Mapping[int, Array] | None], None]  # takes arrays to use in place of others, by address

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

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: Sequence[Any], *, shared_mem: int = 0) -> None:
        """Launch the function on the current stream."""
        self.prepared((grid[0], block[0], shared_mem), tuple(arguments))()

    def prepared(self, size: Size, arguments: tuple[Any, ...]) -> DependentLaunch:
        """Return a launch of the function over arguments."""
        return DependentLaunch(self._function, self._launch, size, arguments)


class DependentLaunch:
    """Launch of a function, whose arguments are laid out for the driver once, because a concat may have hundreds."""

    def __init__(self, function: Any, launch: Any, size: Size, arguments: tuple[Any, ...]):
        self._function, self._launch, self._size, self._arguments = function, launch, size, arguments
        self._attributes = (Attribute * 1)()
        self._attributes[0].name, self._attributes[0].value = PROGRAMMATIC, 1
        grid, block, shared_bytes = size
        where = ctypes.addressof(self._attributes)
        self._config = Config((grid, 1, 1), (block, 1, 1), shared_bytes, None, where, 1)
        self._passed = [*map(_passed, arguments)]
        self._places = _places(self._passed)

    def __call__(self, instead: Mapping[int, Array] | None = None) -> None:
        """Launch the function on the current stream. instead: arrays to use in place of others, by their addresses."""
        self._config.stream = stream = cupy.cuda.get_current_stream().ptr
        arguments, passed, places = self._arguments, self._passed, self._places
        if instead:
            arguments = _replaced(arguments, instead)
            pairs = zip(self._passed, self._arguments, arguments, strict=True)
            passed = [known if new is old else _passed(new) for known, old, new in pairs]
            places = _places(passed)
        config, kernel = ctypes.byref(self._config), ctypes.c_void_p(self._function.kernel.ptr)
        if dependencies(stream) > 1 or self._launch(config, kernel, places, None):
            grid, block, shared_bytes = self._size
            self._function((grid,), (block,), arguments, shared_mem=shared_bytes)


def prepared(function: Any, size: Size, arguments: tuple[Any, ...]) -> PreparedLaunch:
    """Return a call that launches a function of a module over arguments, on the stream that is current then."""
    if isinstance(function, DependentFunction):
        return function.prepared(size, arguments)
    grid, block, shared_bytes = size

    def launch(instead: Mapping[int, Array] | None = None) -> None:
        given = _replaced(arguments, instead) if instead else arguments
        function((grid,), (block,), given, shared_mem=shared_bytes)

    return launch


def _replaced(arguments: tuple[Any, ...], instead: Mapping[int, Array]) -> tuple[Any, ...]:
    return tuple(a if isinstance(a, np.generic) else instead.get(a.data.ptr, a) for a in arguments)


def _places(passed: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * len(passed))(*map(ctypes.addressof, passed))


def _passed(argument: Any) -> ctypes.c_uint32 | ctypes.c_uint64:
    """Return the address of an array, or a number, as a launch argument."""
    if isinstance(argument, np.generic):
        return (ctypes.c_uint32 if argument.itemsize == 4 else ctypes.c_uint64)(int(argument))
    return ctypes.c_uint64(argument.data.ptr)
