"""Compute large arrays part by part, in several threads. NumPy releases Python's lock while it computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

PARALLEL_BYTES = 1 << 25  # starting threads for less takes longer than it saves
_THREADS = 8  # for one array, because several arrays are computed at the same time


def each_part(act: Callable[[int], None], starts: Sequence[int], nbytes: int) -> None:
    """Compute the parts that begin at `starts`, in several threads if they are large together.

    act: computes a part. Infinities and NaN cause no warning.
    nbytes: size of all parts together.
    """

    def quietly(start: int) -> None:
        with np.errstate(all="ignore"):  # each thread has its own settings
            act(start)

    if nbytes < PARALLEL_BYTES or len(starts) < 2:
        for start in starts:
            quietly(start)
        return
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _THREADS)) as pool:
        for _ in pool.map(quietly, starts):
            pass
