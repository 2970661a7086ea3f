"""Store a library that fusec compiled in a private folder, and check it before it is loaded.

A loaded library runs with the rights of its user. So the library and its folder must belong to that user or root, and
nobody else may write them. The file's name contains its SHA-256, which finds damage.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import stat
from collections.abc import Generator
from pathlib import Path

from fusec.errors import TargetError

_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_folder(path: Path) -> None:
    """Make the folder for its user alone.

    Raises TargetError if it belongs to another user, is a symbolic link, or cannot be made.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        with _opened_folder(path):
            pass
    except OSError as error:
        raise TargetError(f"cannot make the folder {path} ({error}); set FUSEC_CACHE to another folder") from error


def library_name(stem: str, data: bytes) -> str:
    """Return the file name of a library."""
    return f"{stem}-{hashlib.sha256(data).hexdigest()}.so"


def find(folder: Path, stem: str) -> Path | None:
    """Find an undamaged library of that stem; None if there is none. Damaged ones are removed where possible.

    Raises TargetError if the folder or the library belongs to another user, or others can write it.
    """
    if not os.path.lexists(folder):
        return None
    with _opened_folder(folder) as place:
        for name in sorted(path.name for path in folder.glob(f"{stem}-*.so")):
            with _opened(folder / name, os.O_RDONLY, place) as file:
                if _is_undamaged(file, name):
                    return folder / name
            with contextlib.suppress(OSError):  # in a read-only folder it stays, and is never loaded
                os.unlink(name, dir_fd=place)
    return None


def load(path: Path) -> ctypes.CDLL:
    """Load a library that `find` found, so that libraries loaded later find it, too.

    The file is loaded by the descriptor through which it was checked, so nobody can replace it in between.

    Raises TargetError if it was changed since.
    """
    with _opened_folder(path.parent) as place, _opened(path, os.O_RDONLY, place) as file:
        if not _is_undamaged(file, path.name):
            raise TargetError(f"{path}: its SHA-256 is not what its name says; remove it, it is built anew")
        return ctypes.CDLL(f"/proc/self/fd/{file}", mode=ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def _opened_folder(path: Path) -> Generator[int]:
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as place:
        yield place


@contextlib.contextmanager
def _opened(path: Path, flags: int, folder: int | None = None) -> Generator[int]:
    """Open a file or folder that belongs to this user or root, and that nobody else can write.

    Raises TargetError for others.
    """
    try:
        name = path if folder is None else path.name
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        reason = "is a symbolic link" if path.is_symlink() else error.strerror or str(error)
        raise TargetError(f"{path}: {reason}; fusec loads code from it: remove it, or set FUSEC_CACHE") from error
    try:
        state = os.fstat(descriptor)
        if state.st_uid not in (os.geteuid(), _ROOT):
            raise TargetError(
                f"{path}: belongs to user {state.st_uid}, and fusec loads code from it: remove it, or set FUSEC_CACHE"
            )
        if state.st_mode & _OTHERS_WRITE:
            raise TargetError(
                f"{path}: others can write it, and fusec loads code from it: remove it, or set FUSEC_CACHE"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _is_undamaged(file: int, name: str) -> bool:
    """Tell if the file has the digest that its name gives."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return False
    with open(file, "rb", closefd=False) as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return name.endswith(f"-{digest}.so")
