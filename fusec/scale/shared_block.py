"""Share arrays between two processes without copies through a pipe.

A block is an anonymous file (`memfd`). It needs no room in `/dev/shm`, which containers limit to 64 MB. The kernel
frees it with the last process that holds it, also after `kill -9`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fusec.errors import ExecutionError, VerifyError
from fusec.ir import DType

ALIGNMENT = 256  # bytes, as for memory on a GPU
GROWTH = 1 << 20  # blocks grow to a multiple of this, so that they rarely grow

Record = list[Any]  # dtype, shape and offset of an array, as JSON
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Copy = Callable[[Any, Any], None]  # copies the second array over the first


class SharedBlock:
    """Memory that two processes share. Either may enlarge it while the other one waits.

    handle: descriptor of the file; the other process gets it at its start.
    """

    def __init__(self, handle: int | None = None):
        self.handle = os.memfd_create("fusec-arrays", os.MFD_CLOEXEC) if handle is None else handle
        self.raw: Bytes = np.empty(0, np.uint8)
        self._map: mmap.mmap

    def fit(self, nbytes: int) -> None:
        """Map at least `nbytes` bytes of the block. Arrays of an earlier, smaller mapping stay valid."""
        if self.raw.size >= nbytes > 0:
            return
        if self.handle < 0:
            raise ExecutionError("this shared memory was released")
        size = os.fstat(self.handle).st_size
        if size < max(nbytes, 1):
            size = -(-max(nbytes, 1) // GROWTH) * GROWTH
            os.ftruncate(self.handle, size)
        self._map = mmap.mmap(self.handle, size)
        self.raw = np.frombuffer(self._map, np.uint8)

    def put(self, arrays: Sequence[np.ndarray[Any, Any]], copy: Copy = np.copyto) -> list[Record]:
        """Copy arrays into the block. Return a record of each, with which the other process reads it."""
        records = layout([(a.dtype, a.shape) for a in arrays])
        for place, array in zip(self.views(records), arrays, strict=True):
            copy(place, array)
        return records

    def views(self, records: Sequence[Record]) -> list[np.ndarray[Any, Any]]:
        """Return the arrays of these records, over the memory of the block."""
        self.fit(end_of(records))
        return views_of(self.raw, records)

    def fresh(self, records: Sequence[Record]) -> Bytes:
        """Return a new array over the block, which is large enough for these records. It lives as long as its views."""
        self.fit(max(end_of(records), 1))
        return np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Release the block. Arrays of it stay valid."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


def views_of(raw: Bytes, records: Sequence[Record]) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of these records, over the memory of a block."""
    views: list[np.ndarray[Any, Any]] = []
    for name, shape, offset in records:
        dtype = DType(name).numpy
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        views.append(raw[offset : offset + nbytes].view(dtype).reshape(shape))
    return views


def layout(types: Sequence[tuple[np.dtype[Any], Sequence[int]]]) -> list[Record]:
    """Return records that place arrays of these dtypes and shapes one after the other.

    Raises ExecutionError for a dtype that no tensor has.
    """
    records: list[Record] = []
    offset = 0
    for dtype, shape in types:
        try:
            name = DType.of(dtype).value
        except VerifyError as error:
            raise ExecutionError(str(error)) from None
        records.append([name, list(shape), offset])
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return records


def end_of(records: Sequence[Record]) -> int:
    """Return the number of bytes up to the end of the last array."""
    return max(
        (offset + int(np.prod(s, dtype=np.int64)) * DType(name).itemsize for name, s, offset in records), default=0
    )
