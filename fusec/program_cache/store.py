"""Store the programs of model files on disk, a file for each, which many processes can share.

An entry that is damaged counts as absent, and is deleted. The entries that were unused for longest are deleted first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Collection
from pathlib import Path

from fusec.errors import FusecError
from fusec.execution.compilation import Compiled
from fusec.ir import Literal
from fusec.passes.rewriting.computations import UnrecordedError
from fusec.plans.cache_file import files_in
from fusec.plans.cache_folder import cache_folder
from fusec.program_cache.entry import CachedProgram, read_entry, write_entry
from fusec.program_cache.model_files import ModelFiles

MAX_BYTES = 256 << 20  # of all entries; one of a model with hundreds of nodes takes some 100 KB, without its weights
_log = logging.getLogger(__name__)


class ProgramStore:
    """A mapping from key to program in a folder. folder: default: `programs` in the cache folder."""

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_BYTES):
        self.folder = folder or cache_folder() / "programs"
        self.max_bytes = max_bytes

    def get(self, key: str, model: ModelFiles) -> CachedProgram | None:
        """Return the program of a key, or None. model: the files of its model."""
        path = self.folder / key
        try:
            if not path.exists():
                return None
            found = read_entry(path, key, model)
        except (FusecError, OSError) as error:
            with contextlib.suppress(OSError):  # a read-only folder serves its undamaged entries
                path.unlink(missing_ok=True)
            warnings.warn(f"dropped the cached program {path} ({error}); it is built anew", stacklevel=4)
            return None
        with contextlib.suppress(OSError):  # a read-only folder does not record the time of use
            os.utime(path)
        return found

    def put(self, key: str, environment: str, compiled: Compiled, model: ModelFiles, read: Collection[Literal]) -> None:
        """Write a program, in place of any other of its key. A program that has no form as a file is left out.

        environment: see `CachedProgram`.
        model, read: see `write_entry`.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_entry(self.folder / key, {"key": key, "environment": environment}, compiled, model, read)
            self._bound()
        except (UnrecordedError, FusecError, OSError) as error:  # the next process builds the program again
            _log.info("the program is not cached: %s", error)

    def info(self) -> tuple[int, int]:
        """Return the number of entries, and their bytes."""
        sizes = [size for _, size, _ in self._entries()]
        return len(sizes), sum(sizes)

    def clear(self) -> int:
        """Delete all entries, and return their number."""
        entries = self._entries()
        for _, _, path in entries:
            path.unlink(missing_ok=True)
        return len(entries)

    def _bound(self) -> None:
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _entries(self) -> list[tuple[float, int, Path]]:
        """Return time of last use, bytes and path of each entry."""
        found: list[tuple[float, int, Path]] = []
        for path in files_in(self.folder):
            with contextlib.suppress(FileNotFoundError):  # another process deleted it
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
        return found
