"""Read a member of a `.fusec` file that holds weights: when they are first used, or in a thread."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from fusec.artifacts.container import Reader
from fusec.artifacts.safetensors import header_bytes, read
from fusec.errors import ModelError
from fusec.ir import Literal


class WeightsMember:
    """A member with weights, of which only the header is read at first."""

    def __init__(self, file: Reader, member: str):
        self._file: Reader | None = file  # until the weights are read, because it holds an open file
        self._where, self._member, self._room = f"{file.path}: {member}", member, file.room(member)
        self._lock = threading.Lock()
        file.fill(member, self._room[:8])
        file.fill(member, self._room[: header_bytes(self._room)])
        self._header = bytes(self._room[: header_bytes(self._room)])

    def literals(self) -> dict[str, Literal]:
        """Return the weights by digest. The first use of one reads and checks all."""
        try:
            return read(self._room.toreadonly(), self._check)
        except ModelError as error:
            raise ModelError(f"{self._where}: {error}") from error

    @contextmanager
    def read_in_thread(self) -> Generator[None]:
        """Read and check the weights during this block, which waits for them at its end.

        If they are damaged, that is the error, in place of one that follows from it.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="fusec-weights") as pool:
            checked = pool.submit(self._check)
            try:
                yield
            finally:
                checked.result()

    def _check(self) -> None:
        """Read and check the whole member, unless that is done. Raises ModelError if it is damaged."""
        with self._lock:
            if self._file is None:
                return
            self._file.check(self._member, self._room)
            if bytes(self._room[: len(self._header)]) != self._header:
                raise ModelError(f"{self._where}: was changed while it was read")
            self._file = None
