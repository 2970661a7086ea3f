"""Open files with external data of a model, each once. For security, they must be inside the model's folder."""

from __future__ import annotations

from pathlib import Path

from fusec.errors import VerifyError
from fusec.frontends.onnx.model_file.split_model import TensorFiles
from fusec.ops.spec import require
from fusec.system.byte_ranges import FileRanges


def opened(files: TensorFiles, location: str) -> FileRanges:
    """Return the bytes of a file of the model's folder.

    Raises VerifyError if it is not a regular file there, or cannot be read.
    """
    if location not in files.external:
        assert files.folder is not None, "a model without a folder has no other files"
        path = _inside(files.folder, location)
        try:
            files.external[location] = FileRanges(path)
        except OSError as error:
            raise VerifyError(f"external data {location!r}: {error.strerror or error}") from error
    return files.external[location]


def _inside(folder: Path, location: str) -> Path:
    """Return the path of external data. Raises VerifyError if it is not a regular file inside `folder`."""
    relative = Path(location)
    outside = f"external data {location!r} is outside the model's folder"
    require(bool(location) and "\0" not in location, f"external data at the location {location!r}")
    require(not relative.is_absolute() and ".." not in relative.parts, outside)
    root = folder.resolve()
    try:
        path = (root / relative).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symlinks
        raise VerifyError(f"external data {location!r}: no such file in the model's folder") from error
    require(path.is_relative_to(root), f"{outside} (through a symbolic link)")
    require(path.is_file(), f"external data {location!r} is not a regular file")
    require(
        path.stat().st_nlink == 1,
        f"external data {location!r} has several hard links, so it may be a file of another folder: copy it",
    )
    return path
