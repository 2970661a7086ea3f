"""Read of a model's file what its program depends on: all but the large weights, and those that a pass looked at."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from fusec.frontends.onnx.model_file.own_data import OwnData
from fusec.frontends.onnx.model_file.split_model import split
from fusec.ir import Literal
from fusec.system.byte_ranges import ByteRanges, Place


class ModelBytes:
    """The bytes of a model's file.

    digest: SHA-256 of the model without the numbers of its large weights, in hexadecimal. Their places are part of it.
    places: the places of its large weights.
    Raises OSError if the file cannot be read.
    """

    def __init__(self, data: ByteRanges):
        message, self.places = split(data)
        self.data = data
        self.digest = hashlib.sha256(message).hexdigest()

    def weights_read(self, literals: Iterable[Literal]) -> list[tuple[int, int, str]]:
        """Return place and digest of each large weight among literals."""
        places = {each.load.place for each in literals if isinstance(each.load, OwnData)}
        return [(place.offset, place.length, self._digest(place)) for place in sorted(places)]

    def has_weights(self, read: Sequence[Any]) -> bool:
        """Tell if the file has these weights, as `weights_read` returned them. Raises ValueError for other data."""
        places = [(Place(int(offset), int(length)), digest) for offset, length, digest in read]
        return all(place in self.places and self._digest(place) == digest for place, digest in places)

    def _digest(self, place: Place) -> str:
        return hashlib.sha256(self.data.read(place.offset, place.offset + place.length)).hexdigest()
