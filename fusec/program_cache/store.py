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
from fusec.plans.cache_folder import cache_folder, folder_errors, keep_newest
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
            keep_newest(files_in(self.folder), self.max_bytes)
        except (UnrecordedError, FusecError, OSError) as error:  # the next process builds the program again
            _log.info("the program is not cached: %s", error)

    def info(self) -> tuple[int, int]:
        """Return the number of entries, and their bytes."""
        sizes = [path.stat().st_size for path in files_in(self.folder)]
        return len(sizes), sum(sizes)

    def clear(self) -> int:
        """Delete all entries, and return their number. Raises FusecError if the folder cannot be written."""
        entries = files_in(self.folder)
        with folder_errors(self.folder):
            for path in entries:
                path.unlink(missing_ok=True)
        return len(entries)
