"""Lend shared memory to the caller of a pool, so that a batch reaches its worker without a copy.

A buffer belongs to the arrays that were made over it. It is free again when the last of them, or of their views, is
gone. A batch holds its arrays until it is done, so no buffer is lent again while a worker reads it.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.scale.shared_block import Record, SharedBlock, layout, views_of

POLL_S = 0.1  # between two looks at the reason why no buffer is free

Array = np.ndarray[Any, Any]
Types = Mapping[str, tuple[np.dtype[Any], Sequence[int]]]


class InputBuffers:
    """A fixed number of blocks that all workers of a pool can read.

    blocks: the memory of each buffer. Workers get the descriptors when they start.
    """

    def __init__(self, count: int):
        self.blocks = [SharedBlock() for _ in range(count)]
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()  # a finalizer may put into it at any moment
        self._lent: dict[int, tuple[int, weakref.ref[Array]]] = {}  # by id of the array over a whole buffer
        for index in range(count):
            self._free.put(index)

    def lend(self, types: Types, is_busy: Callable[[], bool]) -> dict[str, Array]:
        """Return arrays of these dtypes and shapes over one buffer, by name. Waits for a buffer that is free.

        is_busy: tells if a batch is unfinished, whose end may free a buffer.
        Raises ExecutionError if all buffers are lent and no batch is unfinished, because waiting would never end.
        """
        records = layout(list(types.values()))
        index = self._wait(is_busy)
        try:
            whole = self.blocks[index].fresh(records)
        except BaseException:
            self._free.put(index)
            raise
        self._lent[id(whole)] = index, weakref.ref(whole)
        weakref.finalize(whole, self._return, id(whole), index).atexit = False
        return dict(zip(types, views_of(whole, records), strict=True))

    def _wait(self, is_busy: Callable[[], bool]) -> int:
        while True:
            busy = is_busy()  # asked first: a batch that ends between the two questions has freed its buffer
            try:
                return self._free.get(timeout=POLL_S if busy else 0)
            except queue.Empty:
                if not busy:
                    raise ExecutionError(
                        f"all {len(self.blocks)} input buffers are in use, and no batch runs: submit their arrays, or "
                        "let go of them"
                    ) from None

    def _return(self, key: int, index: int) -> None:
        del self._lent[key]
        self._free.put(index)

    def place(self, array: Array) -> tuple[int, Record] | None:
        """Return the number of the buffer that holds an array, and its record. None: it must be copied."""
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        index, owner = self._lent.get(id(whole), (0, None))
        if owner is None or owner() is not whole or not (array.flags.c_contiguous and array.dtype.isnative):
            return None
        (record,) = layout([(array.dtype, array.shape)])
        return index, [*record[:2], array.ctypes.data - whole.ctypes.data]

    def close(self) -> None:
        """Release the blocks. Arrays over them stay valid."""
        for block in self.blocks:
            block.close()
