"""Write a file or a folder so that readers see it whole or not at all.

The data goes into a temporary file of the target's folder, which then replaces the target in one step. The temporary
name is random and made exclusively: no two writers share it, and a symlink planted under it is not followed.

A writer holds a lock (`flock`) on its temporary file or folder. The kernel drops the lock when the writer dies, however
it dies. So what bears such a name and is not locked has lost its writer, and the next writer in that folder removes it.
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
_ANY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: a pipe of such a name is not waited for


@contextlib.contextmanager
def written(goal: Path, *, durable: bool, collects: bool = True) -> Generator[IO[bytes]]:
    """Open a temporary file for writing; it replaces `goal` at the end, unless an error left the block.

    goal: replaced itself, also if it is a symlink. Resolve a path of the user's first.
    durable: the data is on the disk before it replaces `goal`, so a power failure leaves the old file or the new one.
    Without it, a power failure may leave a file of zeros: enough where each reader checks a checksum.
    collects: what dead writers left in the folder is removed first. One that writes many files calls `collect` itself.
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
    """Make a temporary folder in `parent`; what is left of it at the end is removed. To keep it, rename it."""
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
    except OSError:  # whoever writes there next is told
        return
    for path in found:
        with contextlib.suppress(OSError):  # its writer lives (BlockingIOError), or another process was first
            handle = os.open(path, _ANY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path, handle)
            finally:
                os.close(handle)


@contextlib.contextmanager
def _own(parent: Path, make: Callable[[Path], int]) -> Generator[tuple[Path, int]]:
    """A new name that `make` has opened and this process has locked; removed at the end, if it is still there."""
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
            if parent.is_dir():  # a new folder, collected before it was opened
                continue
            raise
        if _lock(handle) and _is(path, handle):  # else it was collected before it was locked
            return path, handle
        os.close(handle)


def _lock(handle: int) -> bool:
    """Lock what was opened; True, too, on a file system without locks, where nothing is collected."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # a process that collects has it
        return False
    except OSError:
        return True
    return True


def _is(path: Path, handle: int) -> bool:
    """Tell if the name still means the file that was opened."""
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
