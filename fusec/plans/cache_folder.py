"""Find fusec's cache folder, which processes share, lock folders in it, and raise errors that name them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator, Iterable
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from fusec.errors import FusecError

LOCK_S = 60.0  # how long to wait for another process
# why a folder cannot be written, by the number of the error
UNWRITABLE = {
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "is read-only"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "is on a full disk"),
}


class UnwritableError(FusecError):
    """A cache could not be written, because it is read-only for this process, or its disk is full. `why`: which."""

    def __init__(self, message: str, why: str):
        super().__init__(message)
        self.why = why


def cache_folder() -> Path:
    """Return the cache folder, and make it if it is missing: FUSEC_CACHE, else the platform's folder for fusec."""
    path = Path(os.environ.get("FUSEC_CACHE") or platformdirs.user_cache_dir("fusec"))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FusecError(f"cannot make the cache folder {path} ({error}); set FUSEC_CACHE to another") from error
    return path


def lock_folder(folder: Path, name: str) -> FileLock:
    """Return a lock that one process at a time can hold."""
    return FileLock(folder / f".{name}.lock", timeout=LOCK_S)


def keep_newest(files: Iterable[Path], max_bytes: int) -> int:
    """Delete the files that were unused for longest until the rest fits, and return the bytes of the rest."""
    found: list[tuple[float, int, Path]] = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # another process replaced or dropped it
            state = file.stat()
            found.append((state.st_mtime, state.st_size, file))
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= max_bytes:
            break
        file.unlink(missing_ok=True)
        total -= size
    return total


@contextlib.contextmanager
def folder_errors(folder: Path) -> Generator[None]:
    """Make the folder if it is missing, and raise FusecError for what fails in it.

    It is an UnwritableError if the folder is read-only, or its disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except FileNotFoundError:
        raise
    except (OSError, Timeout) as error:
        text = f"cannot use the plan cache {folder} ({error}); set FUSEC_CACHE"
        why = UNWRITABLE.get(error.errno or 0)
        raise (UnwritableError(text, why) if why else FusecError(text)) from error
