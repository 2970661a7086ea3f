"""Time work on the device by CUDA events. The work starts when all of it is queued."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import cupy
import numpy as np

from fusec.errors import DeviceLostError, ExecutionError, FusecError

SHUT_US = 500.0  # after which a gate opens by itself, because queueing may wait for the device, as to load a kernel
TRIES = 3
AS_LONG = 0.7  # of the time before, beyond which slow queueing is no accident
RUNS = 7
FAR = 1.5  # relative time of work that is not timed exactly; options for the whole model are closer
WARM_RUNS = 4  # consecutive runs, whose operands are in the L2 cache

# The host opens the gate by a number in its own memory, which the device reads again and again.
SOURCE = """
extern "C" __global__ void fusec_gate(const volatile unsigned* opened, unsigned number, unsigned long long most_ns) {
  unsigned long long since, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(since));
  do {
    if (static_cast<int>(*opened - number) >= 0) return;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - since < most_ns);
}
"""


def module() -> Any:
    """Return the module with the gate's kernel; CuPy holds what it compiled."""
    return cupy.RawModule(code=SOURCE, backend="nvrtc")


class Gate:
    """Kernel that holds back the work queued after `shut` until `open`, or for `SHUT_US`."""

    def __init__(self) -> None:
        self._kernel = module().get_function("fusec_gate")
        self._memory = cupy.cuda.alloc_pinned_memory(4)
        self._opened = np.frombuffer(self._memory, np.uint32, 1)
        self._opened[0] = self._number = 0

    def shut(self) -> None:
        self._number += 1
        arguments = (np.uint64(self._memory.ptr), np.uint32(self._number), np.uint64(1000 * SHUT_US))
        self._kernel((1,), (1,), arguments)

    def open(self) -> None:
        self._opened[0] = self._number


class Stopwatch:
    """Timer of work on a stream."""

    def __init__(self, stream: Any):
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self._cache_bytes = int(properties["l2CacheSize"])
        self._stream = stream

    @cached_property
    def _gate(self) -> Gate:
        """Created when something is timed, because a program that is only loaded needs none."""
        return Gate()

    def within_us(self, run: Callable[[], None], footprint_bytes: int, whole: bool = False) -> float:
        """Time one run as within a model, in microseconds.

        footprint_bytes: memory that the model touches; beyond the size of the L2 cache, the cache is emptied before the
            run, because operands come from memory then
        whole: the run is the whole model, so the cache is left as it is
        """
        if footprint_bytes > self._cache_bytes:
            return self.us(run, swept=not whole)
        return self.us(run, WARM_RUNS)

    def median_us(self, run: Callable[[], None], footprint_bytes: int, best_us: float = math.inf) -> float:
        """Return the median time of RUNS runs as within a model, after one that warms up.

        best_us: time of a rival; where two runs are far slower, the faster of them counts, and no more are timed
        """
        self.within_us(run, footprint_bytes)
        times = [self.within_us(run, footprint_bytes) for _ in range(2)]
        if min(times) > FAR * best_us:
            return min(times)
        times += [self.within_us(run, footprint_bytes) for _ in range(RUNS - 2)]
        return statistics.median(times)

    def us(self, run: Callable[[], None], runs: int = 1, swept: bool = False) -> float:
        """Time one run of `runs` queued together, in microseconds.

        swept: empty the L2 cache before the first run

        If queueing was slow, the device may have waited for it, so the runs are timed again and the least time counts.
        Where that takes about as long, the work itself is slow to queue. Raises ExecutionError when the device fails,
        and DeviceLostError if it runs nothing afterwards.
        """
        least_us = float("inf")
        for _ in range(TRIES):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            with self._stream:
                if swept:
                    cupy.empty(2 * self._cache_bytes, cupy.uint8).fill(0)
                since = time.perf_counter()
                self._gate.shut()
                try:
                    start.record(self._stream)
                    for _ in range(runs):
                        run()
                    stop.record(self._stream)
                finally:
                    self._gate.open()
                queueing_us = 1e6 * (time.perf_counter() - since)
            try:
                stop.synchronize()
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise device_failure(f"the GPU reported an error: {error}") from error
            took_us = 1000.0 * float(cupy.cuda.get_elapsed_time(start, stop))
            as_long = took_us / runs > AS_LONG * least_us
            least_us = min(least_us, took_us / runs)
            if as_long or queueing_us < max(SHUT_US, took_us / 2):
                break
        return least_us


def device_failure(said: str) -> FusecError:
    """Return the error to raise after a failure: DeviceLostError if the device runs nothing more, or ExecutionError."""
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        return DeviceLostError(said)
    return ExecutionError(said)
