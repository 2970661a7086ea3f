"""Write a file or a folder so that readers see it whole or not at all.

The data goes into a temporary file in the target's folder, which then replaces the target in one step. The temporary
name is random and opened with O_EXCL. So no two writers share it, and a symlink of that name is not followed.

A writer holds a lock (`flock`) on its temporary file or folder. The kernel releases the lock when the writer dies,
for any reason. So a temporary file without a lock has no writer, and the next writer in that folder removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO

_TEMPORARY = re.compile(r"\.fusec-[0-9a-f]{32}\.tmp")
_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ANY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: never wait on a pipe


@contextlib.contextmanager
def written(goal: Path, *, durable: bool, collects: bool = True) -> Generator[IO[bytes]]:
    """Open a temporary file for writing. It replaces `goal` at the end of the block, unless the block raises.

    goal: a symlink is replaced itself, so resolve a path that a user gave.
    durable: write the data to the disk before it replaces `goal`, so that a power failure leaves the old or the new
        file. Without it, a power failure may leave a file of zeros, which is enough if readers check a checksum.
    collects: first remove temporary files of dead writers. A caller that writes many files calls `collect` once.
    """
    if collects:
        collect(goal.parent)
    with _own(goal.parent, lambda path: os.open(path, _FILE, 0o666)) as (path, handle):
        with os.fdopen(os.dup(handle), "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(handle)
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(handle, stat.S_IMODE(goal.stat(follow_symlinks=False).st_mode))
        path.replace(goal)


@contextlib.contextmanager
def folder(parent: Path) -> Generator[Path]:
    """Make a temporary folder in `parent`. It is removed at the end of the block, unless the block renames it."""
    collect(parent)

    def make(path: Path) -> int:
        path.mkdir()
        return os.open(path, _ANY | os.O_DIRECTORY)

    with _own(parent, make) as (path, _):
        yield path


def collect(parent: Path) -> None:
    """Remove the temporary files and folders that dead writers left in `parent`."""
    try:
        found = [path for path in parent.iterdir() if _TEMPORARY.fullmatch(path.name)]
    except OSError:  # the write that follows reports it
        return
    for path in found:
        with contextlib.suppress(OSError):  # its writer is alive (BlockingIOError), or another process removed it
            handle = os.open(path, _ANY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path, handle)
            finally:
                os.close(handle)


@contextlib.contextmanager
def _own(parent: Path, make: Callable[[Path], int]) -> Generator[tuple[Path, int]]:
    """Make, open and lock a temporary file or folder, and remove it at the end if it still exists.

    make: creates the given path and returns a descriptor of it.
    """
    path, handle = _locked(parent, make)
    try:
        yield path, handle
    finally:
        try:
            _remove(path, handle)
        finally:
            os.close(handle)


def _locked(parent: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    while True:
        path = parent / f".fusec-{os.urandom(16).hex()}.tmp"
        try:
            handle = make(path)
        except FileNotFoundError:
            if parent.is_dir():  # another process removed the new folder before `make` opened it
                continue
            raise
        if _lock(handle) and _is(path, handle):  # else another process removed it before it was locked
            return path, handle
        os.close(handle)


def _lock(handle: int) -> bool:
    """Lock a descriptor; False if another process holds the lock.

    True also on a file system without locks, because `collect` removes nothing there.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # a process in `collect` holds it
        return False
    except OSError:
        return True
    return True


def _is(path: Path, handle: int) -> bool:
    """Tell if the path still names the file that was opened."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _remove(path: Path, handle: int) -> None:
    if not _is(path, handle):
        return
    if stat.S_ISDIR(os.fstat(handle).st_mode):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
