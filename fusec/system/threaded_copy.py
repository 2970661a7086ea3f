"""Copy large arrays in several threads, because one thread uses only part of the memory's bandwidth.

NumPy releases Python's lock while it copies. The threads end when nothing refers to the object any more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
PART_BYTES = 2 << 20  # a thread copies at least so much: that takes ten times as long as to start it
MOST_THREADS = 4  # for one array; more gained nothing


def threads_for(workers: int) -> int:
    """Return the threads for one copy, where as many workers have copies at the same time."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // (2 * workers)))


class ThreadedCopy:
    """Copies arrays in parts. The threads serve all workers of a pool.

    threads: that copy one array.
    """

    def __init__(self, workers: int, threads: int | None = None):
        self.threads = threads_for(workers) if threads is None else threads
        self._pool = ThreadPoolExecutor(workers * (self.threads - 1), "fusec-copy") if self.threads > 1 else None

    def __call__(self, target: Array, source: Array) -> None:
        """Copy an array over another one of the same shape and dtype."""
        count = min(self.threads, source.nbytes // PART_BYTES)
        if self._pool is None or count < 2:
            target[...] = source
            return
        if source.flags.c_contiguous and target.flags.c_contiguous:
            source, target = (array.reshape(-1).view(np.uint8) for array in (source, target))
        ends = [len(source) * number // count for number in range(count + 1)]
        parts = [slice(first, end) for first, end in pairwise(ends)]
        others = [self._pool.submit(np.copyto, target[part], source[part]) for part in parts[1:]]
        np.copyto(target[parts[0]], source[parts[0]])
        for other in others:
            other.result()

    def each(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Copy the second array of each pair over the first one. Many small arrays are shared out to the threads."""
        sizes = [source.nbytes for _, source in pairs]
        count = min(self.threads, sum(sizes) // PART_BYTES, len(pairs))
        if self._pool is None or count < 2:
            for target, source in pairs:
                self(target, source)
            return
        ends = np.searchsorted(np.cumsum(sizes), [sum(sizes) * number // count for number in range(count + 1)])
        parts = [pairs[first:end] for first, end in pairwise([*ends[:-1], len(pairs)])]
        others = [self._pool.submit(_copy_all, part) for part in parts[1:]]
        _copy_all(parts[0])
        for other in others:
            other.result()

    def copy_of(self, array: Array) -> Array:
        """Return a new array with the same elements."""
        made = np.empty(array.shape, array.dtype)
        self(made, array)
        return made


def _copy_all(pairs: Sequence[tuple[Array, Array]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)
