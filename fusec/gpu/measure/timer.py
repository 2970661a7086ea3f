"""How long work takes on the device, by events; it starts when all of it is queued."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import cupy
import numpy as np

from fusec.errors import ExecutionError

SHUT_US = 500.0  # after which a gate opens by itself: to queue work may wait for the device, to load a kernel say
TRIES = 3
WARM_RUNS = 4  # behind each other, each of which finds in the cache what it reads

# The host opens it by a number in its own memory, which the device reads anew each time.
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


class Gate:
    """Work queued on the current stream behind `shut` waits until `open`, or for `SHUT_US`."""

    def __init__(self) -> None:
        self._kernel = cupy.RawModule(code=SOURCE, backend="nvrtc").get_function("fusec_gate")
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
    """Times what is queued on a stream."""

    def __init__(self, stream: Any):
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self._cache_bytes = int(properties["l2CacheSize"])
        self._stream = stream

    @cached_property
    def _gate(self) -> Gate:
        """Made when something is timed: a program that is only loaded does without."""
        return Gate()

    def within_us(self, run: Callable[[], None], footprint_bytes: int, whole: bool = False) -> float:
        """Microseconds of one run as it would go within a model that touches so much: where that is more than the
        second-level cache holds, operands come from memory when their turn comes. whole: the run is all of the model,
        and leaves in the cache what it leaves."""
        if footprint_bytes > self._cache_bytes:
            return self.us(run, swept=not whole)
        return self.us(run, WARM_RUNS)

    def us(self, run: Callable[[], None], runs: int = 1, swept: bool = False) -> float:
        """Microseconds of one run, of so many queued at once. swept: nothing of what they read is in the cache before
        the first. The least of some times if this process was kept from queueing them, which the device may have
        waited for. ExecutionError if the device fails."""
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
                raise ExecutionError(f"the GPU reported an error: {error}") from error
            took_us = 1000.0 * float(cupy.cuda.get_elapsed_time(start, stop))
            least_us = min(least_us, took_us / runs)
            if queueing_us < max(SHUT_US, took_us / 2):
                break
        return least_us
