"""Where output goes: JSON to stdout, notes to stderr, files whole or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fusec.errors import FusecError


def json_text(data: Any) -> str:
    """Indented JSON; numbers that are not finite, which JSON has not, become null."""
    return json.dumps(_finite(data), indent=2, allow_nan=False, ensure_ascii=False)


def _finite(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, Mapping):
        return {str(k): _finite(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(v) for v in data]
    return data


def note(text: str) -> None:
    """A line for people, never in the way of --json."""
    print(f"fusec: {text}", file=sys.stderr)


def check_writable(path: Path) -> None:
    """FusecError unless a file can be made at `path`; asked before the work, not after it."""
    folder = path.parent
    if path.is_dir():
        raise FusecError(f"{path}: is a directory")
    if not folder.is_dir():
        raise FusecError(f"{path}: folder {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FusecError(f"{path}: folder {folder} cannot be written")


@contextlib.contextmanager
def whole_files(paths: Sequence[Path]) -> Generator[list[IO[bytes]]]:
    """Files to write, in binary; only if all goes well do they take the place of what is at `paths`."""
    staged: list[tuple[Path, Path]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [temporary.unlink(missing_ok=True) for temporary, _ in staged])
        try:
            files: list[IO[bytes]] = []
            for path in paths:
                file = stack.enter_context(
                    tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False)
                )
                staged.append((Path(file.name), path))
                files.append(file)
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
            for temporary, path in staged:
                temporary.chmod(0o666 & ~_umask())
                temporary.replace(path)
        except OSError as error:
            where = ", ".join(map(str, paths[:1]))
            raise FusecError(f"{where}: cannot be written: {error.strerror or error}") from error


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """One such file."""
    with whole_files([path]) as (file,):
        write(file)
