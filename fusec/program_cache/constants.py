"""Write how the constants of a program are computed from a model's files, and read it again.

Small constants are stored with their numbers. A large one is a place in the file, or a computation of other constants.
So an entry of the cache holds no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fusec.artifacts.safetensors import type_of
from fusec.frontends.onnx.model_file.stored_data import StoredData
from fusec.ir import DType, HostArray, Literal
from fusec.passes.layout.precision import Narrow
from fusec.passes.rewriting.computations import UnrecordedError, computation_data, computation_of
from fusec.passes.rewriting.derived_constants import EAGER_BYTES, Derived
from fusec.system.byte_ranges import ByteRanges, Place

STORED_BYTES = 1 << 22  # of a constant that is stored with its numbers if nothing says how it is computed, at most


class ConstantsWriter:
    """Describes constants as plain data, each once, after those that it is computed from.

    values: the constants that are stored with their numbers.
    sizes: bytes of each file with external data, by location.
    """

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []
        self.values: list[Literal] = []
        self.sizes: dict[str, int] = {}
        self._numbers: dict[Literal, int] = {}

    def number(self, literal: Literal) -> int:
        """Describe a constant, and return its number.

        Raises UnrecordedError for a large constant that is neither in a file of the model nor a recorded computation.
        """
        if literal not in self._numbers:
            data = {"label": literal.label, "type": str(literal.type), **self._described(literal)}
            self._numbers[literal] = len(self.data)
            self.data.append(data)
        return self._numbers[literal]

    def _described(self, literal: Literal) -> dict[str, Any]:
        if isinstance(literal, Narrow):  # also a small one, because making it warns of numbers beyond the range
            return {"narrow": self.number(literal.wide), "name": literal.name}
        if literal.type.nbytes <= EAGER_BYTES:
            return self._stored(literal)
        if isinstance(literal.load, StoredData):
            place = literal.load.place
            if literal.load.location:
                self.sizes[literal.load.location] = literal.load.data.size
            return {"file": literal.load.location, "offset": place.offset, "length": place.length}
        if isinstance(literal, Derived) and literal.computation[1]:
            compute, sources = literal.computation
            return {"base": literal.base, **computation_data(compute), "of": [self.number(each) for each in sources]}
        if literal.type.nbytes <= STORED_BYTES:
            return self._stored(literal)
        raise UnrecordedError(f"constant {literal.label!r} of {literal.type} is not in a file of the model")

    def _stored(self, literal: Literal) -> dict[str, Any]:
        if literal.type.dtype is DType.STRING:
            raise UnrecordedError(f"constant {literal.label!r} has strings")
        self.values.append(literal)
        return {"digest": literal.digest}


def read_constants(
    data: Sequence[Mapping[str, Any]], values: Mapping[str, Literal], file: Callable[[str], ByteRanges]
) -> list[Literal]:
    """Return the constants that a `ConstantsWriter` described; none is loaded.

    values: the stored ones, by digest.
    file: returns the bytes of a file of the model, by location.
    Raises ValueError, KeyError, TypeError, IndexError or VerifyError for other data.
    """
    found: list[Literal] = []
    for each in data:
        label, type = str(each["label"]), type_of(each["type"])
        if "digest" in each:
            stored = values[each["digest"]]
            if stored.type != type:
                raise ValueError(f"constant {label!r} is {stored.type}, not {type}")
            literal = Literal(type, partial(_array, stored), label)
        elif "offset" in each:
            place = Place(int(each["offset"]), int(each["length"]))
            location = str(each["file"])
            literal = Literal(type, StoredData(file(location), place, type, location), label, keep=False)
        elif "narrow" in each:
            literal = Narrow(_before(found, each["narrow"]), type.dtype, str(each["name"]))
            literal.label = label
        else:
            sources = [_before(found, number) for number in each["of"]]
            literal = Derived(type, sources, computation_of(each), str(each["base"]), label)
        found.append(literal)
    return found


def _array(literal: Literal) -> HostArray:
    return literal.array


def _before(found: Sequence[Literal], number: Any) -> Literal:
    if type(number) is not int or not 0 <= number < len(found):
        raise ValueError(f"constant {number!r} is not described before its use")
    return found[number]
