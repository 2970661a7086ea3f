"""Share the bodies of requests with worker processes: one block of memory, from which spans are taken.

The memory is bounded, and a body is copied into it once, as it arrives. A worker maps it and copies rows from there
into a batch (`request_memory.py`).
"""

from __future__ import annotations

import bisect
import mmap
import os

ALIGNMENT = 64  # bytes: a cache line, so that spans do not share one


class SharedArena:
    """Memory in which a front end takes and frees spans. `handle` is the descriptor that workers map.

    The kernel frees it when the last process that has it open ends.
    """

    def __init__(self, nbytes: int):
        self.handle = os.memfd_create("fusec-requests", os.MFD_CLOEXEC)
        os.ftruncate(self.handle, nbytes)
        self.size = nbytes
        self.memory = memoryview(mmap.mmap(self.handle, nbytes))
        self._free = [(0, nbytes)]  # (start, bytes) in ascending order; neighbours are merged

    def take(self, nbytes: int) -> int | None:
        """Take a span and return its start; None if there is no room."""
        nbytes = _rounded(nbytes)
        for place, (start, room) in enumerate(self._free):
            if room >= nbytes:
                self._free[place : place + 1] = [(start + nbytes, room - nbytes)] if room > nbytes else []
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """Free a span."""
        nbytes = _rounded(nbytes)
        place = bisect.bisect(self._free, (start, 0))
        if place < len(self._free) and start + nbytes == self._free[place][0]:
            nbytes += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == start:
            start, room = self._free.pop(place - 1)
            nbytes, place = nbytes + room, place - 1
        self._free.insert(place, (start, nbytes))

    @property
    def free_bytes(self) -> int:
        """Count the bytes that are free."""
        return sum(room for _, room in self._free)


def _rounded(nbytes: int) -> int:
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
