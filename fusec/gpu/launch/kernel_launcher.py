"""Compile kernels by NVRTC through CuPy, which caches them on disk, and launch them over bound memory."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from threading import Lock
from typing import Any

import cupy
import numpy as np

from fusec.gpu.kernels.codegen.kernel import Kernel, Launch, prelude
from fusec.gpu.launch.dependent_launch import DependentFunction, driver
from fusec.gpu.measure.random_inputs import RandomInputs, kernels_apart
from fusec.gpu.measure.tolerance import TOLERANCE
from fusec.ir import Array, TensorType, Value
from fusec.system.compile_timer import spent_on

OPTIONS = ("--std=c++17",)
VOTERS = 2  # variants of a kernel that the fastest is compared with, until one agrees
LEAST_DOORS = 1 << 14  # numbers, so that the memory stays the same one
NUMBERS = {"u32": np.uint32, "u64": np.uint64}
Memory = Callable[[Value, TensorType], Array]  # a value's flat buffer, constants in the order of the type


class Launcher:
    """Launcher that compiles each source once. Kernels launched in order on one stream share scratch memory."""

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}
        self._refused: set[str] = set()  # sources, by entry
        self._wrong: set[str] = set()  # kernels, by key
        self._scratch: Array | None = None
        self._doors: Array | None = None
        self._fastest: dict[str, int] = {}  # by key of a kernel: which of it and its others
        self._times_us: dict[str, list[float]] = {}  # of them all

    def fastest(self, kernel: Kernel) -> Kernel:
        """Return the fastest variant of a kernel; the kernel itself before variants were timed."""
        return (kernel, *kernel.others)[self._fastest.get(kernel.key, 0)] if kernel.others else kernel

    def is_measured(self, kernel: Kernel) -> bool:
        """Return True if the variants of a kernel were timed."""
        return kernel.key in self._fastest

    @spent_on("kernels are timed")
    def measure(self, kernel: Kernel, time_us: Callable[[Callable[[], None]], float]) -> float:
        """Time the variants of a kernel, use the fastest from now on, and return its time.

        A variant whose results differ from the others is not used, with a warning. The time is infinite if no variant
        runs.
        """
        every, samples = variants_of(kernel), RandomInputs()
        times = [time_us(self.bind(each, samples.memory)) if self.runs(each) else math.inf for each in every]
        self._times_us[kernel.key] = times
        live = sorted((i for i, took in enumerate(times) if took < math.inf), key=times.__getitem__)
        for place in live:
            if len(live) == 1 or self._has_company(every, place, live, samples):
                break
            warnings.warn(
                f"a variant of {kernel.name} computes other results than the others, so it is not used", stacklevel=2
            )
            times[place] = math.inf
        if live and min(times) == math.inf:
            self._wrong.update(each.key for each in every)
        self._fastest[kernel.key] = min(range(len(times)), key=times.__getitem__)
        return min(times)

    def _has_company(self, every: Sequence[Kernel], place: int, live: Sequence[int], samples: RandomInputs) -> bool:
        """Return True if one of two other variants computes the same."""
        others = [other for other in live if other != place][:VOTERS]
        return any(self.agree(every[place], every[other], samples) for other in others)

    def agree(self, one: Kernel, other: Kernel, samples: RandomInputs | None = None) -> bool:
        """Return True if two kernels compute the same from random data, into memory that was poisoned before."""
        samples = samples or RandomInputs()
        results = [samples.results(way, self.bind(way, samples.memory)) for way in (one, other)]
        return kernels_apart(*results) <= TOLERANCE

    def times_us(self, kernel: Kernel) -> Sequence[float]:
        """Return the times of a kernel's variants, if they were timed in this process."""
        return self._times_us.get(kernel.key, ())

    def take(self, kernel: Kernel, key: str) -> bool:
        """Use the variant of this key from now on; False if the kernel has none."""
        keys = [way.key for way in variants_of(kernel)]
        if key in keys:
            self._fastest[kernel.key] = keys.index(key)
        return key in keys

    @spent_on("kernels are compiled")
    def compile(self, kernels: Iterable[Kernel]) -> None:
        """Compile kernels that are not compiled yet, several at a time; warn about those that NVRTC refuses."""
        missing = self.missing(kernels)
        if not missing:
            return
        workers = min(len(missing), os.cpu_count() or 1, 16)
        with ThreadPoolExecutor(max_workers=workers) as pool:
            for (kernel, launch), made in zip(missing, pool.map(_compiled, missing), strict=True):
                if made is None:
                    self._refused.add(launch.entry)
                elif isinstance(made, str):
                    self._refused.add(launch.entry)
                    warnings.warn(f"NVRTC refuses the kernel for {kernel.name}, it is not used: {made}", stacklevel=2)
                else:
                    self._functions[launch.entry] = made

    def missing(self, kernels: Iterable[Kernel]) -> list[tuple[Kernel, Launch]]:
        """List the launches of kernels, each as its fastest variant, that are not compiled yet."""
        wanted = {launch.entry: (kernel, launch) for kernel in map(self.fastest, kernels) for launch in kernel.launches}
        return [item for entry, item in wanted.items() if entry not in self._functions and entry not in self._refused]

    def runs(self, kernel: Kernel) -> bool:
        """Tell if a kernel compiles and fits on the GPU; fall back from its fastest variant to the kernel itself."""
        if kernel.key in self._wrong:
            return False
        self.compile([kernel])
        if all(launch.entry in self._functions for launch in self.fastest(kernel).launches):
            return True
        if not kernel.others or not self._fastest.get(kernel.key):
            return False
        warnings.warn(f"{kernel.name} does not run here the way it was found to be fastest in", stacklevel=2)
        self._fastest[kernel.key] = 0
        return self.runs(kernel)

    def bind(self, kernel: Kernel, memory: Memory) -> Callable[..., None]:
        """Return a function that launches a kernel on the current stream; it neither allocates nor waits.

        The function takes arrays to use in place of bound ones, by their addresses.
        """
        kernel = self.fastest(kernel)
        self.compile([kernel])
        if kernel.scratch_bytes and (self._scratch is None or self._scratch.size < kernel.scratch_bytes):
            self._scratch = cupy.empty(kernel.scratch_bytes, cupy.uint8)
        calls: list[tuple[Any, tuple[int], tuple[int], int, tuple[Array, ...], tuple[Any, ...]]] = []
        for launch in kernel.launches:
            buffers: list[Array] = []
            for argument in launch.arguments:
                if argument.value is None and argument.type is not None:
                    buffers.append(self._zeros(argument.type.size))
                elif argument.value is None or argument.type is None:
                    assert self._scratch is not None
                    buffers.append(self._scratch)
                else:
                    buffers.append(memory(argument.value, argument.type))
            function = self._functions[launch.entry]
            numbers = tuple(NUMBERS[c_type](value) for c_type, value in launch.numbers)
            calls.append((function, (launch.grid,), (launch.block,), launch.resident_bytes, tuple(buffers), numbers))

        def run(instead: Mapping[int, Array] | None = None) -> None:
            for function, grid, block, resident_bytes, arguments, numbers in calls:
                if instead:
                    arguments = tuple(instead.get(array.data.ptr, array) for array in arguments)
                function(grid, block, (*arguments, *numbers), shared_mem=resident_bytes)

        return run

    def _zeros(self, count: int) -> Array:
        """Return the counters at which blocks meet; each launch leaves them at zero for the next one."""
        if self._doors is None or self._doors.size < count:
            self._doors = cupy.zeros(max(count, LEAST_DOORS), cupy.uint32)
            cupy.cuda.get_current_stream().synchronize()  # other streams may come first
        return self._doors

    def with_random_data(self, kernel: Kernel) -> Callable[[], None]:
        """Return a function that launches a kernel over its own memory: normal numbers, and indices within bounds."""
        return self.bind(kernel, RandomInputs().memory)


def variants_of(kernel: Kernel) -> tuple[Kernel, ...]:
    """Return the variants of a kernel, itself first."""
    return (replace(kernel, others=()), *kernel.others)


def _compiled(item: tuple[Kernel, Launch]) -> Any:
    """The function of a launch; the compiler's words if it refuses, None if this GPU has no room for all blocks that
    must be there at once, or lacks the instructions."""
    _, launch = item
    if launch.architecture and not is_here(launch.architecture):
        return None
    try:
        function = function_of(launch.source, launch.entry, launch.meets, launch.architecture)
    except cupy.cuda.compiler.CompileException as error:
        return str(error)
    if (launch.resident_bytes or launch.meets) and not _has_room(function, launch):
        return None
    begin = driver() if launch.early else None
    return function if begin is None else DependentFunction(function, begin)


def function_of(source: str, entry: str, meets: bool, architecture: str = "") -> Any:
    """A function of a source. CuPy keeps what NVRTC made of it on disk, for all processes. architecture: the first
    that it is for; the only one (`sm_90a`) goes before the one that CuPy asks for."""
    own = (f"-arch={architecture}",) if architecture.endswith("a") else ()
    options = (*OPTIONS, *own)
    with _AT_FIRST:
        _ask_compiler(options, meets)
    return _module(prelude() + source, options, meets).get_function(entry)


_AT_FIRST = Lock()


@cache
def _ask_compiler(options: tuple[str, ...], meets: bool) -> None:
    """CuPy asks NVRTC for its version in front of the first module with the same options. Threads that come at once
    would each ask, and wait for one another: this module comes before all of theirs."""
    _module('extern "C" __global__ void fusec_nothing() {}', options, meets).compile()


def _module(code: str, options: tuple[str, ...], meets: bool) -> Any:
    return cupy.RawModule(code=code, options=options, backend="nvrtc", enable_cooperative_groups=meets)


def is_here(architecture: str) -> bool:
    """Tell if this GPU has the instructions of an architecture; `sm_90a` means that architecture alone."""
    own, wanted = int(cupy.cuda.Device().compute_capability), int(architecture.strip("sm_a"))
    return own == wanted if architecture.endswith("a") else own >= wanted


def _has_room(function: Any, launch: Launch) -> bool:
    attributes = cupy.cuda.Device().attributes
    static_bytes, most_bytes = function.shared_size_bytes, attributes["MaxSharedMemoryPerBlockOptin"]
    if static_bytes + launch.resident_bytes > most_bytes:
        return False
    function.max_dynamic_shared_size_bytes = launch.resident_bytes
    cupy.cuda.runtime.memGetInfo()  # a thread that found the module loaded by another has no context until it asks this
    each = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
        function.kernel.ptr, launch.block, launch.resident_bytes
    )
    return not launch.meets or launch.grid <= each * attributes["MultiProcessorCount"]
