"""Read numbers and round them to another type, part by part on several cores.

The numbers are never in memory as a whole in their own type. Using new memory for the first time takes longer than
reading a file that the system has in memory. So each thread reads into one small buffer.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fusec.system.byte_ranges import ByteRanges
from fusec.system.threaded_parts import PARALLEL_BYTES

PART_BYTES = 1 << 22  # of a buffer; with larger parts, a thread waits for Python's lock less often
MOST_THREADS = 8  # for one array, because several arrays are read at the same time


def read_rounded(data: ByteRanges, offset: int, count: int, own: np.dtype[Any], dtype: np.dtype[Any]) -> Any:
    """Return `count` numbers of type `own`, from a byte on, as a flat array of another type, each rounded once.

    Raises OSError if they cannot be read.
    """
    made = np.empty(count, dtype)
    each = PART_BYTES // own.itemsize
    threads = min(len(os.sched_getaffinity(0)), MOST_THREADS) if count * own.itemsize >= PARALLEL_BYTES else 1

    def every(first: int) -> None:
        room = np.empty(min(each, count), own)
        for start in range(first * each, count, threads * each):
            part = room[: min(each, count - start)]
            data.read_into(part.view(np.uint8).data, offset + start * own.itemsize)
            with np.errstate(all="ignore"):  # each thread has its own settings
                made[start : start + part.size] = part

    if threads == 1:
        every(0)
        return made
    with ThreadPoolExecutor(threads, thread_name_prefix="fusec-read") as pool:
        for _ in pool.map(every, range(threads)):
            pass
    return made
