"""Map the memory with request bodies in a worker, and page-lock it, so that a GPU copies rows from there itself.

Without page-locking, rows are copied to page-locked memory first, by threads that compete with the rest of the worker.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from typing import Any

import numpy as np

_PORTABLE = 1  # cudaHostRegisterPortable: for all threads and contexts of the process
_log = logging.getLogger("fusec.serving")


class RequestMemory:
    """The memory of one front end. page_locked: the device may copy from it without the host.

    It is released when nothing refers to this object.
    """

    def __init__(self, handle: int, xp: Any):
        """Map the memory of a front end.

        handle: its descriptor, which may be closed afterwards.
        xp: cupy, or numpy in simulation.
        """
        self.data = memoryview(mmap.mmap(handle, os.fstat(handle).st_size))
        self.page_locked = xp is not np and _page_lock(self, xp)


def _page_lock(memory: RequestMemory, xp: Any) -> bool:
    start: int = np.frombuffer(memory.data, np.uint8).ctypes.data
    try:
        xp.cuda.runtime.hostRegister(start, len(memory.data), _PORTABLE)
    except RuntimeError as error:  # CUDARuntimeError
        _log.warning("the memory of requests cannot be page-locked, so their rows are copied once more: %s", error)
        return False
    # The arguments hold the mapping until it is unregistered.
    weakref.finalize(memory, _unlock, xp, start, memory.data).atexit = False
    return True


def _unlock(xp: Any, start: int, data: memoryview) -> None:
    xp.cuda.runtime.hostUnregister(start)
