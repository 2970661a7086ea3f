"""Share work among the processes of this machine, by locks on files in the cache folder.

The kernel drops a lock (`flock`) when its process ends, for any reason, so nothing has to be cleaned up after
`kill -9`. In a folder that cannot be written, each process works for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

FOLDER = "locks"
FILES = 256  # of claims; two keys that share a file wait for each other, which is rare
POLL_S = (0.002, 0.05)  # first and longest time between two tries


class MachineLocks:
    """Locks that all processes share which have the same cache folder.

    slots: how many of these processes may work at the same time
    """

    def __init__(self, cache: Path, slots: int):
        self._folder, self._slots = cache / FOLDER, slots

    @contextlib.contextmanager
    def slot(self, check: Callable[[], None]) -> Generator[bool]:
        """Hold one of the slots; yields True. check: called while waiting; it raises an error to give up."""
        with self._held([f"slot-{number}" for number in range(self._slots)], check):
            yield True

    @contextlib.contextmanager
    def free_slot(self) -> Generator[bool]:
        """Hold a slot if one is free; yields False otherwise."""
        handle = self._first([f"slot-{number}" for number in range(self._slots)])
        try:
            yield handle is not None
        finally:
            _close(handle)

    @contextlib.contextmanager
    def claim(self, key: str, check: Callable[[], None], kind: str = "claim") -> Generator[None]:
        """Hold the claim on a piece of work, so that other processes wait for its result instead of doing it, too.

        key: hexadecimal digits that name the work.
        check: called while waiting; it raises an error to give up.
        kind: the kind of work. Work that needs the result of other work while it is claimed must be of another kind,
            because two keys of one kind can share a file.
        """
        with self._held([f"{kind}-{int(key[:8], 16) % FILES}"], check):
            yield

    @contextlib.contextmanager
    def _held(self, names: Sequence[str], check: Callable[[], None]) -> Generator[None]:
        pause, longest = POLL_S
        while (handle := self._first(names)) is None:
            check()
            time.sleep(pause)
            pause = min(2 * pause, longest)
        try:
            yield
        finally:
            _close(handle)

    def _first(self, names: Sequence[str]) -> int | None:
        """Lock the first of these files that nobody holds; -1 if there are no locks here, None if all are held."""
        for name in names:
            try:
                handle = self._open(name)
            except OSError:  # a read-only folder
                return -1
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
            except OSError:  # a file system without locks
                os.close(handle)
                return -1
            else:
                return handle
        return None

    def _open(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self._folder / name, flags, 0o666)
        except FileNotFoundError:
            self._folder.mkdir(parents=True, exist_ok=True)
            return os.open(self._folder / name, flags, 0o666)


def _close(handle: int | None) -> None:
    if handle is not None and handle >= 0:
        os.close(handle)
