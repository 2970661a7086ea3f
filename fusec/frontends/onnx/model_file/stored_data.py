"""Load weights from a model's file, or a file in its folder, when they are used. Nothing of onnx is imported for it."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fusec.errors import ModelError
from fusec.ir import TensorType
from fusec.lowering.packing import from_codes
from fusec.system.byte_ranges import ByteRanges, Place
from fusec.system.rounded_read import PART_BYTES, read_rounded


class StoredData:
    """Load data that is stored at a place in a file.

    location: path of the file in the model's folder; empty: the bytes of the model itself

    Calls return the same memory as long as an array of it is in use.
    """

    def __init__(self, data: ByteRanges, place: Place, type: TensorType, location: str = ""):
        self.data, self.place, self.location, self._type = data, place, location, type
        self._last: weakref.ref[np.ndarray[Any, Any]] | None = None

    def __call__(self) -> np.ndarray[Any, Any]:
        owner = None if self._last is None else self._last()
        if owner is None:
            owner = self._read()
            self._last = weakref.ref(owner)
        return owner.view(self._type.dtype.numpy).reshape(self._type.shape)

    def read_as(self, dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
        """Return a new array of the data in another type; None for elements that share bytes."""
        type = self._type
        if type.dtype.bits < 8:
            return None
        with _reading():
            made = read_rounded(self.data, self.place.offset, type.size, type.dtype.numpy, dtype)
        return made.reshape(type.shape)

    def parts(self) -> Iterator[memoryview]:
        """Yield the bytes of the elements in order; a part is valid until the next one."""
        if self._type.dtype.bits < 8:
            yield self().reshape(-1).view(np.uint8).data
            return
        room = memoryview(bytearray(min(self.place.length, PART_BYTES)))
        for start in range(0, self.place.length, PART_BYTES):
            part = room[: min(PART_BYTES, self.place.length - start)]
            with _reading():
                self.data.read_into(part, self.place.offset + start)
            yield part

    def _read(self) -> np.ndarray[Any, Any]:
        """Return an array that owns the memory of the elements."""
        raw = np.empty(self.place.length, np.uint8)
        with _reading():
            self.data.read_into(raw.data, self.place.offset)
        if self._type.dtype.bits >= 8:
            return raw
        elements = from_codes(raw, self._type.size, self._type.dtype)
        return elements if elements.base is None else np.array(elements)


@contextmanager
def _reading() -> Generator[None]:
    """Turn an OSError into a ModelError that names the file."""
    try:
        yield
    except OSError as error:
        where = error.filename or "the model"
        raise ModelError(f"{where}: a weight cannot be read: {error.strerror}") from error
