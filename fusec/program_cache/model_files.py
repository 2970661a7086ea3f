"""Read of a model's files what its program depends on: all but the large weights, and those that a pass looked at."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fusec.errors import VerifyError
from fusec.frontends.onnx.model_file.external_files import opened
from fusec.frontends.onnx.model_file.split_model import TensorFiles, split
from fusec.frontends.onnx.model_file.stored_data import StoredData
from fusec.ir import Literal
from fusec.system.byte_ranges import ByteRanges, FileRanges


class ModelFiles:
    """The file of a model, and files with external data in its folder.

    digest: SHA-256 of the model without the numbers of its large weights, in hexadecimal. Their places are part of it.
    places: the places of the large weights that the file itself holds.
    Raises OSError if the file cannot be read.
    """

    def __init__(self, data: FileRanges, folder: Path):
        message, self.places = split(data)
        self.data = data
        self.digest = hashlib.sha256(message).hexdigest()
        self._files = TensorFiles(folder, data, self.places)

    def file(self, location: str) -> ByteRanges:
        """Return the bytes of a file of the folder; of the model's own file if `location` is empty.

        Raises VerifyError if there is no such file in the folder.
        """
        return opened(self._files, location) if location else self.data

    @property
    def versions(self) -> Mapping[str, tuple[int, ...]]:
        """Return what changes when a file is changed, for the model's own file and those that were opened."""
        return {"": self.data.version, **{name: data.version for name, data in self._files.external.items()}}

    def weights_read(self, literals: Iterable[Literal]) -> list[tuple[str, int, int, str]]:
        """Return file, place and digest of each large weight among literals."""
        stored = (each.load for each in literals if isinstance(each.load, StoredData))
        found = {(each.location, each.place.offset, each.place.length): each.data for each in stored}
        return [
            (location, at, size, _digest(found[location, at, size], at, size)) for location, at, size in sorted(found)
        ]

    def has_weights(self, read: Sequence[Any]) -> bool:
        """Tell if the files have these weights, as `weights_read` returned them. Raises ValueError for other data."""
        try:
            return all(
                _digest(self.file(str(location)), int(offset), int(length)) == digest
                for location, offset, length, digest in read
            )
        except (OSError, VerifyError):  # a file is missing, or has become shorter
            return False

    def has_sizes(self, sizes: Mapping[str, int]) -> bool:
        """Tell if the folder has these files, with as many bytes."""
        try:
            return all(self.file(str(location)).size == size for location, size in sizes.items())
        except VerifyError:
            return False


def _digest(data: ByteRanges, offset: int, length: int) -> str:
    if not 0 <= offset <= offset + length <= data.size:
        return ""
    return hashlib.sha256(data.read(offset, offset + length)).hexdigest()
