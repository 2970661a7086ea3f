"""Read ranges of a file that stays open, or of bytes in memory.

A file is read, and not mapped into memory. If another process truncates a mapped file, this process ends (SIGBUS).
"""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path
from typing import NamedTuple, Protocol


class Place(NamedTuple):
    """A range of bytes."""

    offset: int
    length: int


class ByteRanges(Protocol):
    """Bytes of which ranges can be read at any time, from several threads."""

    @property
    def size(self) -> int: ...

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end`. Raises OSError if they cannot be read."""
        ...

    def read_into(self, room: memoryview, start: int) -> None:
        """Fill `room` with the bytes from `start` on. Raises OSError if they cannot be read."""
        ...


class FileRanges:
    """Ranges of a file, which stays open. Reading raises OSError when the file was changed since it was opened."""

    def __init__(self, path: Path):
        self.path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._handle)
        self._version = self._current_version()

    @property
    def size(self) -> int:
        return self._version[0]

    @property
    def version(self) -> tuple[int, ...]:
        """Return what changes when the file is changed or replaced: size, times, device and inode."""
        return self._version

    def read(self, start: int, end: int) -> bytes:
        data = os.pread(self._handle, end - start, start)
        if len(data) == end - start:
            self._require_unchanged()
            return data
        room = bytearray(end - start)  # a call returns less than 2 GiB, and less if a signal interrupts it
        self.read_into(memoryview(room), start)
        return bytes(room)

    def read_into(self, room: memoryview, start: int) -> None:
        done = 0
        while done < len(room) and (count := os.preadv(self._handle, [room[done:]], start + done)):
            done += count
        self._require_unchanged()
        if done < len(room):
            raise OSError(errno.EIO, "ended before the bytes that were asked for", str(self.path))

    def _require_unchanged(self) -> None:
        """Check the file after a read, so that a change during the read is noticed, too."""
        if self._current_version() != self._version:
            raise OSError(errno.ESTALE, "was changed after it was opened", str(self.path))

    def _current_version(self) -> tuple[int, ...]:
        status = os.fstat(self._handle)
        return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino


class MemoryRanges:
    """Ranges of bytes in memory."""

    def __init__(self, data: bytes):
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, start: int, end: int) -> bytes:
        return self._data[start:end]

    def read_into(self, room: memoryview, start: int) -> None:
        room[:] = memoryview(self._data)[start : start + len(room)]


class BlockRanges:
    """Ranges that one thread reads, small ones from the block that was read last.

    So the heads of many small fields take few calls to the file system.
    """

    BLOCK_BYTES = 1 << 13

    def __init__(self, data: ByteRanges):
        self._data = data
        self._start, self._block = 0, b""

    @property
    def size(self) -> int:
        return self._data.size

    def read(self, start: int, end: int) -> bytes:
        if end - start > self.BLOCK_BYTES:
            return self._data.read(start, end)
        if not self._start <= start <= end <= self._start + len(self._block):
            self._start, self._block = start, self._data.read(start, min(start + self.BLOCK_BYTES, self.size))
        return self._block[start - self._start : end - self._start]

    def read_into(self, room: memoryview, start: int) -> None:
        self._data.read_into(room, start)
