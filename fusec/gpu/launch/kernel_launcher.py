"""Compile kernels by NVRTC, in child processes or through CuPy, and launch them over bound memory.

CuPy caches on disk what it compiles.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from fusec.gpu.kernels.codegen.kernel import Kernel, Launch, variants_of
from fusec.gpu.launch.cubin_function import CubinFunction
from fusec.gpu.launch.cubins import Cubins, most_compilers, source_of
from fusec.gpu.launch.dependent_launch import DependentFunction, PreparedLaunch, driver, prepared
from fusec.gpu.launch.device_constants import DeviceConstants
from fusec.gpu.measure.random_inputs import RandomInputs, kernels_apart
from fusec.gpu.measure.tolerance import TOLERANCE
from fusec.gpu.nvrtc import compute_capability, function_of
from fusec.ir import Array, TensorType, Value
from fusec.system.compile_timer import spent_on

_log = logging.getLogger(__name__)
LOADERS = 4  # threads that load kernels ahead
VOTERS = 2  # variants of a kernel that the fastest is compared with, until one agrees
MIN_COUNTERS = 1 << 14  # barrier counters, so that the memory is seldom allocated again
NUMBERS = {"u32": np.uint32, "u64": np.uint64}
Memory = Callable[[Value, TensorType], Array]  # returns a value's flat buffer, constants in the layout of the type


class Launcher:
    """Launcher that compiles each source once. Kernels launched in order on one stream share scratch memory.

    cubins: compiled kernels of a file or the cache, and child processes; None: CuPy compiles all kernels
    """

    def __init__(self, cubins: Cubins | None = None) -> None:
        self._cubins = cubins
        self._functions: dict[str, Any] = {}
        self._refused: set[str] = set()  # sources, by entry
        self._coming: dict[str, Future[Any]] = {}  # by entry, what threads compile
        self._wrong: set[str] = set()  # kernels, by key
        self._scratch: Array | None = None
        self._counters: Array | None = None  # at which the blocks of a kernel wait for each other
        self._fastest: dict[str, int] = {}  # number of the fastest variant, by key of the kernel
        self._fitting: dict[str, int] = {}  # number of the first variant that fits on the GPU, where none was timed
        self._times_us: dict[str, list[float]] = {}  # of all variants, by key of the kernel

    def fastest(self, kernel: Kernel) -> Kernel:
        """Return the fastest variant of a kernel; before variants were timed, the first that fits on the GPU."""
        if not kernel.others:  # also a variant, whose key the whole kernel may have
            return kernel
        return (kernel, *kernel.others)[self._fastest.get(kernel.key, self._fitting.get(kernel.key, 0))]

    def is_measured(self, kernel: Kernel) -> bool:
        """Return True if the variants of a kernel were timed."""
        return kernel.key in self._fastest

    @spent_on("kernels are timed")
    def measure(self, kernel: Kernel, time_us: Callable[[Callable[[], None], float], float]) -> float:
        """Time the variants of a kernel, use the fastest from now on, and return its time.

        time_us: takes a variant, and the least time so far; the time of one that is far slower need not be exact

        A variant whose results differ from the others is not used, with a warning. The time is infinite if no variant
        runs.
        """
        every, samples = variants_of(kernel), RandomInputs(DeviceConstants())
        times: list[float] = []
        for each in every:
            best_us = min(times, default=math.inf)
            times.append(time_us(self.bind(each, samples.in_place), best_us) if self.runs(each) else math.inf)
        self._times_us[kernel.key] = times
        live = sorted((i for i, took in enumerate(times) if took < math.inf), key=times.__getitem__)
        for place in live:
            if len(live) == 1 or self._is_confirmed(every, place, live, samples):
                break
            warnings.warn(
                f"a variant of {kernel.name} computes other results than the others, so it is not used", stacklevel=2
            )
            times[place] = math.inf
        if live and min(times) == math.inf:
            self._wrong.update(each.key for each in every)
        self._fastest[kernel.key] = min(range(len(times)), key=times.__getitem__)
        return min(times)

    def _is_confirmed(self, every: Sequence[Kernel], place: int, live: Sequence[int], samples: RandomInputs) -> bool:
        """Return True if one of two other variants computes the same."""
        others = [other for other in live if other != place][:VOTERS]
        return any(self.agree(every[place], every[other], samples) for other in others)

    def agree(self, one: Kernel, other: Kernel, samples: RandomInputs | None = None) -> bool:
        """Return True if two kernels compute the same from random data, into memory that was poisoned before."""
        samples = samples or RandomInputs(DeviceConstants())
        results = [samples.results(each, self.bind(each, samples.memory)) for each in (one, other)]
        return kernels_apart(*results) <= TOLERANCE

    def times_us(self, kernel: Kernel) -> Sequence[float]:
        """Return the times of a kernel's variants, if they were timed in this process."""
        return self._times_us.get(kernel.key, ())

    def take(self, kernel: Kernel, key: str) -> bool:
        """Use the variant of this key from now on; False if the kernel has none."""
        keys = [variant.key for variant in variants_of(kernel)]
        if key in keys:
            self._fastest[kernel.key] = keys.index(key)
        return key in keys

    @spent_on("kernels are compiled")
    def compile(self, kernels: Iterable[Kernel]) -> None:
        """Compile kernels that are not compiled yet, several at a time; warn about those that NVRTC refuses."""
        missing = self.missing(kernels)
        self._start(missing)
        for kernel, launch in missing:
            made = self._coming.pop(launch.entry).result()
            if made is None:
                self._refused.add(launch.entry)
            elif isinstance(made, str):
                self._refused.add(launch.entry)
                warnings.warn(f"NVRTC refuses the kernel for {kernel.name}, it is not used: {made}", stacklevel=2)
            else:
                self._functions[launch.entry] = made

    def loaded(self, kernels: Iterable[Kernel]) -> dict[str, Any]:
        """Load kernels whose cubins are known, or come from child processes; return their functions, by entry."""
        launches = [launch for kernel in kernels for launch in kernel.launches]
        cubins, sm = self._cubins, compute_capability()
        if cubins is not None:
            self.compile(k for k in kernels if all(cubins.has(source_of(launch, sm)) for launch in k.launches))
        return {each.entry: self._functions[each.entry] for each in launches if each.entry in self._functions}

    def compile_soon(self, kernels: Iterable[Kernel]) -> None:
        """Start to compile kernels in threads, which release Python's lock; `compile` waits for those it needs."""
        self._start(self.missing(kernels))

    def store_cubins(self, kernels: Iterable[Kernel]) -> None:
        """Store what child processes compiled for kernels, each as its fastest variant, for the next process."""
        if self._cubins is not None:
            launches = (launch for kernel in map(self.fastest, kernels) for launch in kernel.launches)
            self._cubins.store(source_of(launch, compute_capability()) for launch in launches)

    def _start(self, items: Sequence[tuple[Kernel, Launch]]) -> None:
        new = [item for item in items if item[1].entry not in self._coming]
        if not new:
            return
        if self._cubins is not None:
            sm = compute_capability()
            self._cubins.expect(source_of(launch, sm) for _, launch in new if launch.runs_on(sm))
        pool = ThreadPoolExecutor(min(len(new), most_compilers(), 16), thread_name_prefix="fusec-nvrtc")
        for _, launch in new:
            ahead = _LOADED_AHEAD.pop(launch.entry, None)
            self._coming[launch.entry] = pool.submit(_taken_over, ahead, launch, self._cubins)
        pool.shutdown(wait=False)  # the threads end when all is compiled

    def missing(self, kernels: Iterable[Kernel]) -> list[tuple[Kernel, Launch]]:
        """List the launches of kernels, each as its fastest variant, that are not compiled yet."""
        wanted = {launch.entry: (kernel, launch) for kernel in map(self.fastest, kernels) for launch in kernel.launches}
        return [item for entry, item in wanted.items() if entry not in self._functions and entry not in self._refused]

    def runs(self, kernel: Kernel) -> bool:
        """Return True if a kernel compiles and fits on the GPU.

        Falls back from its fastest variant, or from its first, to the first that runs.
        """
        if kernel.key in self._wrong:
            return False
        if self._is_ready(self.fastest(kernel)):
            return True
        if self._fastest.pop(kernel.key, 0):
            warnings.warn(f"the variant of {kernel.name} that was fastest does not run on this GPU", stacklevel=2)
        for place, variant in enumerate(variants_of(kernel) if kernel.others else ()):
            if self._is_ready(variant):
                self._fitting[kernel.key] = place
                return True
        return False

    def _is_ready(self, variant: Kernel) -> bool:
        variant = replace(variant, others=())
        self.compile([variant])
        return all(launch.entry in self._functions for launch in variant.launches)

    def bind(self, kernel: Kernel, memory: Memory) -> Callable[..., None]:
        """Return a function that launches a kernel on the current stream; it neither allocates nor waits.

        The function takes arrays to use in place of bound ones, by their addresses.
        """
        kernel = self.fastest(kernel)
        self.compile([kernel])
        if kernel.scratch_bytes and (self._scratch is None or self._scratch.size < kernel.scratch_bytes):
            self._scratch = cupy.empty(kernel.scratch_bytes, cupy.uint8)
        calls: list[PreparedLaunch] = []
        for launch in kernel.launches:
            buffers: list[Array] = []
            for argument in launch.arguments:
                if argument.value is None and argument.type is not None:
                    buffers.append(self._zero_counters(argument.type.size))
                elif argument.value is None or argument.type is None:
                    assert self._scratch is not None
                    buffers.append(self._scratch)
                else:
                    buffers.append(memory(argument.value, argument.type))
            numbers = (NUMBERS[c_type](value) for c_type, value in launch.numbers)
            size = (launch.grid, launch.block, launch.resident_bytes)
            calls.append(prepared(self._functions[launch.entry], size, (*buffers, *numbers)))

        def run(instead: Mapping[int, Array] | None = None) -> None:
            for call in calls:
                call(instead)

        return run

    def _zero_counters(self, count: int) -> Array:
        """Return the barrier counters; each launch leaves them at zero for the next one."""
        if self._counters is None or self._counters.size < count:
            self._counters = cupy.zeros(max(count, MIN_COUNTERS), cupy.uint32)
            cupy.cuda.get_current_stream().synchronize()  # because another stream may use them first
        return self._counters


# What is loaded before it is known which launcher needs it, by entry.
_LOADED_AHEAD: dict[str, Future[Any]] = {}


def load_ahead(kernels: Iterable[Kernel], coming: Mapping[str, Future[bytes | None]]) -> None:
    """Load kernels on the GPU as they are compiled, before a launcher needs them. The driver loads one at a time.

    coming: their cubins, by key of the source
    """
    sm = compute_capability()
    launches = {each.entry: each for kernel in kernels for each in kernel.launches if each.runs_on(sm)}
    with_cubins = [(each, coming.get(source_of(each, sm).key)) for each in launches.values()]
    pool = ThreadPoolExecutor(LOADERS, thread_name_prefix="fusec-load")
    for launch, cubin in with_cubins:
        if cubin is not None:
            _LOADED_AHEAD[launch.entry] = pool.submit(_loaded_ahead, launch, cubin)
    pool.shutdown(wait=False)  # the threads end when all is loaded


def forget_loaded() -> None:
    """Drop what was loaded ahead and nothing needed."""
    while _LOADED_AHEAD:
        _LOADED_AHEAD.popitem()[1].cancel()


def _loaded_ahead(launch: Launch, coming: Future[bytes | None]) -> Any:
    """Return the function of a launch once it is compiled; see `_compiled`. Raises LookupError if it is refused."""
    cubin = coming.result()
    if cubin is None:
        raise LookupError(launch.entry)
    cupy.cuda.runtime.memGetInfo()  # creates a CUDA context in this thread
    return _fitted(CubinFunction(cubin, launch.entry, launch.cooperative), launch)


def _taken_over(ahead: Future[Any] | None, launch: Launch, cubins: Cubins | None) -> Any:
    """Return what was loaded ahead; where that failed, compile it as without it."""
    if ahead is not None:
        try:
            return ahead.result()
        except Exception:  # noqa: BLE001  # raised or reported again, if it fails again
            _log.debug("%s was not loaded ahead", launch.entry, exc_info=True)
    return _compiled(launch, cubins)


def _compiled(launch: Launch, cubins: Cubins | None) -> Any:
    """Return the function of a launch, or the compiler's message if it refuses the source.

    None means that the GPU lacks the instructions, or room for all blocks that must run at the same time.
    """
    if not launch.runs_on(compute_capability()):
        return None
    try:
        function = None if cubins is None else _loaded(launch, cubins)
        if function is None:
            function = function_of(launch.source, launch.entry, launch.cooperative, launch.architecture)
    except cupy.cuda.compiler.CompileException as error:
        return str(error)
    return _fitted(function, launch)


def _fitted(function: Any, launch: Launch) -> Any:
    """Return a function ready to launch; None if the GPU lacks room for all blocks that must run at the same time."""
    if (launch.resident_bytes or launch.cooperative) and not _has_room(function, launch):
        return None
    begin = driver() if launch.dependent and not launch.cooperative else None
    return function if begin is None else DependentFunction(function, begin)


def _loaded(launch: Launch, cubins: Cubins) -> Any:
    """Return the function of a launch from its cubin; None if there is no cubin, or the driver refuses it."""
    cubin = cubins.get(source_of(launch, compute_capability()))
    if cubin is None:
        return None
    cupy.cuda.runtime.memGetInfo()  # creates a CUDA context in this thread
    try:
        return CubinFunction(cubin, launch.entry, launch.cooperative)
    except cupy.cuda.driver.CUDADriverError as error:  # compiled for a newer driver
        warnings.warn(f"the compiled kernel {launch.entry} does not load, so it is compiled: {error}", stacklevel=2)
        return None


def _has_room(function: Any, launch: Launch) -> bool:
    attributes = cupy.cuda.Device().attributes
    static_bytes, most_bytes = function.shared_size_bytes, attributes["MaxSharedMemoryPerBlockOptin"]
    if static_bytes + launch.resident_bytes > most_bytes:
        return False
    function.max_dynamic_shared_size_bytes = launch.resident_bytes
    cupy.cuda.runtime.memGetInfo()  # creates a CUDA context in a thread that did not load the module itself
    each = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
        function.kernel.ptr, launch.block, launch.resident_bytes
    )
    return not launch.cooperative or launch.grid <= each * attributes["MultiProcessorCount"]
