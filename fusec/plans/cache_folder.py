"""Use the folder of the plan cache, which processes share: lock it, and raise errors that name it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

from filelock import FileLock, Timeout

from fusec.errors import FusecError
from fusec.plans.sqlite_cache import UNWRITABLE, UnwritableError

LOCK_S = 60.0  # how long to wait for another process


def lock(folder: Path, name: str) -> FileLock:
    """Return a lock that one process at a time can hold."""
    return FileLock(folder / f".{name}.lock", timeout=LOCK_S)


@contextlib.contextmanager
def errors(folder: Path) -> Generator[None]:
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
