"""Share work among the processes of this machine, by locks on files in the cache folder.

The kernel drops a lock (`flock`) when its process ends, for any reason, so nothing has to be cleaned up after
`kill -9`. In a folder that cannot be written, each process works for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Self

FOLDER = "locks"
FILES = 256  # of claims; two keys that share a file wait for each other, which is rare
POLL_S = (0.002, 0.05)  # first and longest time between two tries


class MachineLocks:
    """Locks that all processes share which have the same cache folder.

    slots: how many of these processes may work at the same time
    work: the kind of work that shares these slots
    """

    def __init__(self, cache: Path, slots: int, work: str = "slot"):
        self._folder = cache / FOLDER
        self._slots = [f"{work}-{number}" for number in range(slots)]
        self._turn = threading.Lock()  # of the one thread that tries the slots until one is free

    @contextlib.contextmanager
    def slot(self, check: Callable[[], None]) -> Generator[bool]:
        """Hold one of the slots; yields True. check: called while waiting; it raises an error to give up."""
        while not self._turn.acquire(timeout=POLL_S[1]):
            check()
        try:
            handle = self._waited(self._slots, check)
        finally:
            self._turn.release()
        with _closing(handle):
            yield True

    @contextlib.contextmanager
    def free_slot(self) -> Generator[bool]:
        """Hold a slot if one is free; yields False otherwise."""
        with _OpenFiles(self._folder) as files:
            handle = files.lock_first(self._slots)
        with _closing(handle):
            yield handle is not None

    @contextlib.contextmanager
    def claim(self, key: str, check: Callable[[], None], kind: str = "claim") -> Generator[None]:
        """Hold the claim on a piece of work, so that other processes wait for its result instead of doing it, too.

        key: hexadecimal digits that name the work.
        check: called while waiting; it raises an error to give up.
        kind: the kind of work. Work that needs the result of other work while it is claimed must be of another kind,
            because two keys of one kind can share a file.
        """
        with _closing(self._waited([_claim_file(key, kind)], check)):
            yield

    def is_claimed(self, key: str, kind: str = "claim") -> bool:
        """Tell if somebody holds a claim now."""
        with _OpenFiles(self._folder) as files:
            handle = files.lock_first([_claim_file(key, kind)])
        with _closing(handle):
            return handle is None

    def _waited(self, names: Sequence[str], check: Callable[[], None]) -> int:
        """Lock one of these files, waiting while all are held; -1 if there are no locks here."""
        pause, longest = POLL_S
        with _OpenFiles(self._folder) as files:
            handle = files.lock_first(names)
            while handle is None:
                check()
                time.sleep(pause)
                pause = min(2 * pause, longest)
                handle = files.lock_again()
        return handle


def _claim_file(key: str, kind: str) -> str:
    return f"{kind}-{int(key[:8], 16) % FILES}"


class _OpenFiles:
    """Files to lock, which are opened once, because a process that waits tries them often.

    When it ends it closes all but the one that it locked.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._handles: list[int] = []

    def lock_first(self, names: Sequence[str]) -> int | None:
        """Lock the first of these files that nobody holds; -1 if there are no locks here, None if all are held."""
        for name in names:
            try:
                self._handles.append(self._open(name))
            except OSError:  # a read-only folder
                return -1
            if (found := self._locked(self._handles[-1])) is not None:
                return found
        return None

    def lock_again(self) -> int | None:
        """Try the opened files once more; returns what `lock_first` does."""
        return next((found for each in self._handles if (found := self._locked(each)) is not None), None)

    def _locked(self, handle: int) -> int | None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:  # a file system without locks
            return -1
        self._handles.remove(handle)
        return handle

    def _open(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self._folder / name, flags, 0o666)
        except FileNotFoundError:
            self._folder.mkdir(parents=True, exist_ok=True)
            return os.open(self._folder / name, flags, 0o666)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            os.close(handle)


@contextlib.contextmanager
def _closing(handle: int | None) -> Generator[None]:
    """Close the file of a lock at the end, which drops the lock."""
    try:
        yield
    finally:
        if handle is not None and handle >= 0:
            os.close(handle)
