"""Read and write files for commands: .npy and .npz files, and whole files."""

from __future__ import annotations

import os
import stat
import tokenize
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fusec.cli.common.options import number_of, pairs_of
from fusec.errors import FusecError, writing
from fusec.system import atomic_write
from fusec.system.printable import printable


def arrays_of(texts: Sequence[str]) -> dict[str, tuple[Path, Any]]:
    """Read `x=file.npy` as name, file and array; the array is mapped, so nothing large is read yet."""
    return {name: (Path(text), _array(Path(text))) for name, text in pairs_of("--input", "NAME=file.npy", texts)}


def constants_of(texts: Sequence[str]) -> dict[str, Any]:
    """Read `axis=1`, `k=1,2,3` or `x=file.npy` as name and number, list of numbers or array; `k=` is an empty list."""
    values: dict[str, Any] = {}
    for name, text in pairs_of("--constant", "NAME=VALUE or NAME=file.npy", texts):
        if text.endswith(".npy"):
            values[name] = _array(Path(text))
            continue
        try:
            numbers = [number_of(part) for part in text.split(",")] if text else []
        except ValueError:
            raise FusecError(
                f"--constant {name}={text}: is no number, no numbers joined by commas and no .npy file"
            ) from None
        values[name] = numbers if "," in text or not text else numbers[0]
    return values


def absolute_constant(text: str) -> str:
    """Make the file in `x=file.npy` absolute; other constants stay as they are."""
    name, sign, value = text.partition("=")
    return f"{name}{sign}{Path(value).absolute()}" if value.endswith(".npy") else text


def functions_of(texts: Sequence[str]) -> dict[str, Any]:
    """Read `my.domain::Op=ops.py:function` as name and function; the file is run."""
    if not texts:
        return {}
    from fusec.frontends.user_file import user_object  # here, because most commands need none

    return {name: user_object(text) for name, text in pairs_of("--custom-op", "my.domain::Op=FILE.py:FUNCTION", texts)}


def _array(path: Path) -> Any:
    """Map the array of a .npy file. numpy checks its header against the size of the file, and unpickles nothing."""
    from numpy.lib.format import open_memmap  # here, because numpy would double the time of `fusec --help`

    try:
        if not path.is_file():
            raise FusecError(
                f"{path}: is not a regular file" if path.exists() else f"{path}: No such file or directory"
            )
        return open_memmap(path, mode="r")
    except OSError as error:
        raise FusecError(f"{path}: {error.strerror or error}") from error
    except (ValueError, EOFError, SyntaxError, OverflowError, tokenize.TokenError) as error:
        reason = "holds Python objects, which are never read" if "Python objects" in str(error) else str(error)
        raise FusecError(f"{path}: not a readable .npy file: {reason}") from error


def check_writable(path: Path | None) -> None:
    """Check that a file can be written, before the work that makes its contents. Raises FusecError if not."""
    if path is None:
        return
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise FusecError(f"{path}: exists and is not a regular file")
        if not path.resolve().parent.is_dir():
            raise FusecError(f"{path}: there is no folder {printable(str(path.parent))}")
        if not os.access(path.resolve().parent, os.W_OK):
            raise FusecError(f"{path}: the folder {path.parent} cannot be written")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise FusecError(f"{path}: {error}") from error


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a temporary file that then replaces the file, so that readers never see half of it."""
    check_writable(path)
    # resolved, so that the target of a link is replaced and not the link
    with writing(path), atomic_write.written(path.resolve(), durable=True) as file:
        write(file)


def write_text(path: Path, text: str) -> None:
    """Write a text and a newline as a whole file."""
    write_whole(path, lambda file: file.write(f"{text}\n".encode()))


def write_npz(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name, as numpy.savez does; any name is allowed, also `file`.

    Strings are written as NumPy's text of a fixed length, which needs no pickle.
    """
    import numpy as np  # here, as above
    from numpy.lib.format import write_array  # here, as above

    def write(file: IO[bytes]) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    plain = array.astype(np.str_) if array.dtype == object else array
                    write_array(member, plain, allow_pickle=False)

    write_whole(path, write)
