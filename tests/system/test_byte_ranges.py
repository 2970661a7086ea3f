"""Test ranges of files and of bytes: what is read, what is refused, and when the file is closed."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
from helpers import CountedRanges

from fusec.system.byte_ranges import BlockRanges, ByteRanges, FileRanges, MemoryRanges

DATA = bytes(range(256)) * 40


@pytest.fixture(params=["file", "memory"])
def ranges(request: pytest.FixtureRequest, tmp_path: Path) -> ByteRanges:
    (tmp_path / "data").write_bytes(DATA)
    return FileRanges(tmp_path / "data") if request.param == "file" else MemoryRanges(DATA)


def test_ranges_are_read_as_slices(ranges: ByteRanges) -> None:
    assert ranges.size == len(DATA)
    for start, end in ((0, 0), (0, 10), (255, 513), (0, len(DATA)), (len(DATA), len(DATA))):
        assert ranges.read(start, end) == DATA[start:end]
        room = bytearray(end - start)
        ranges.read_into(memoryview(room), start)
        assert bytes(room) == DATA[start:end]


def test_small_ranges_come_from_blocks() -> None:
    data = CountedRanges(DATA * 10)
    blocks, size = BlockRanges(data), len(DATA) * 10
    for start in range(0, size, 16):
        assert blocks.read(start, start + 16) == data._data[start : start + 16]
    assert data.reads == -(-size // BlockRanges.BLOCK_BYTES)
    for start, end in ((0, 16), (size - 5, size), (8, 8), (3, BlockRanges.BLOCK_BYTES + 4), (0, size), (40, 50)):
        assert blocks.read(start, end) == data._data[start:end], "in any order, of any size"
    room = bytearray(20)
    blocks.read_into(memoryview(room), 7)
    assert (bytes(room), blocks.size) == (data._data[7:27], size)


def test_several_threads_read_at_the_same_time(ranges: ByteRanges) -> None:
    wrong: list[int] = []

    def read(offset: int) -> None:
        starts = range(offset, len(DATA) - 64, 97)
        wrong.extend(start for start in starts if ranges.read(start, start + 64) != DATA[start : start + 64])

    threads = [threading.Thread(target=read, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("change", ["write", "truncate", "append"])
def test_a_file_that_was_changed_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    ranges = FileRanges(path)
    if change == "write":
        path.write_bytes(DATA[::-1])
        os.utime(path, ns=(0, 0))
    else:
        with path.open("r+b") as file:
            file.truncate(100 if change == "truncate" else 2 * len(DATA))
    for read in (lambda: ranges.read(0, 64), lambda: ranges.read_into(memoryview(bytearray(64)), 0)):
        with pytest.raises(OSError, match="was changed after it was opened") as raised:
            read()
        assert raised.value.filename == str(path)


def test_bytes_after_the_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA)
    with pytest.raises(OSError, match="ended before"):
        FileRanges(tmp_path / "data").read_into(memoryview(bytearray(64)), len(DATA) - 10)


def test_the_file_is_closed_with_its_last_user(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA)

    def handles() -> int:
        return sum(each.resolve() == path for each in Path("/proc/self/fd").iterdir())

    ranges = FileRanges(path)
    assert handles() == 1
    del ranges
    gc.collect()
    assert handles() == 0
