"""Split an ONNX model into a small message and its large weights, which are read when they are used.

protobuf copies each field into its message, and again for each reader, so weights would be in memory twice. Instead,
initializers with much raw data are found in the wire format, and protobuf decodes the model without these bytes. In the
message they are external data at the location OWN.
The wire format: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fusec.system.byte_ranges import BlockRanges, ByteRanges, FileRanges, Place
from fusec.system.dataclass import dataclass

if TYPE_CHECKING:
    from onnx import TensorProto

OWN = "\0"  # a location that is no path
LARGE_BYTES = 1 << 16  # decoding smaller data costs less than reading it later
# Numbers of fields, and of places of data, in onnx.proto. They never change, and onnx takes long to import.
GRAPH, INITIALIZER = 7, 5  # of ModelProto, of GraphProto
RAW_DATA, EXTERNAL_DATA, DATA_LOCATION = 9, 13, 14  # of TensorProto
OTHER_DATA = frozenset({3, 4, 5, 6, 7, 10, 11})  # of TensorProto: a segment, and data by type
KEY, VALUE = 1, 2  # of StringStringEntryProto
DEFAULT, EXTERNAL = 0, 1  # of TensorProto.DataLocation
_MAX_FIELDS = 64  # of a tensor that is split; elements that are not packed are a field each
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True)
class TensorFiles:
    """Files with the data that the messages of tensors lack.

    folder: folder of external data, or None.
    own: the bytes of the model itself.
    places: the ranges of `own` that were split off.
    external: the files with external data that were opened so far, by location.
    """

    folder: Path | None = None
    own: ByteRanges | None = None
    places: frozenset[Place] = field(default_factory=frozenset[Place])
    external: dict[str, FileRanges] = field(default_factory=dict[str, FileRanges])


class _WireError(Exception):
    """The bytes are no message, or have groups, which protobuf reads and ONNX does not have."""


class _Field(NamedTuple):
    """A field of a message: from `start` to `end`, its content from `content` on.

    value: number of a varint field; 0 for other fields.
    """

    number: int
    wire_type: int
    start: int
    content: int
    end: int
    value: int

    @property
    def place(self) -> Place:
        """Return the place of the content."""
        return Place(self.content, self.end - self.content)


def split(data: ByteRanges) -> tuple[bytes, frozenset[Place]]:
    """Return a model's message without its large raw data, and the places of that data.

    The message is unchanged where the bytes are malformed, so that protobuf says what is wrong.
    """
    data = BlockRanges(data)
    try:
        graphs = [
            (each, _large_tensors(data, each))
            for each in (_fields(data, 0, data.size) if data.size > LARGE_BYTES else ())
            if each.number == GRAPH and each.wire_type == _BYTES
        ]
    except _WireError:
        graphs = []
    places = frozenset(raw.place for _, tensors in graphs for _, raw in tensors)
    if not places:
        return data.read(0, data.size), places
    message, at = list[bytes](), 0
    for graph, tensors in graphs:
        parts = _without_data(data, graph, tensors)
        message += [data.read(at, graph.start), _head(graph, sum(map(len, parts))), *parts]
        at = graph.end
    return b"".join([*message, data.read(at, data.size)]), places


def place_of(tensor: TensorProto, files: TensorFiles) -> Place | None:
    """Return where the data of a tensor is in the model itself; None if it is elsewhere.

    A model's own text may have the location OWN, too, but not with a place that was split off.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data} if files.places else {}
    if tensor.data_location != EXTERNAL or entries.get("location") != OWN:
        return None
    try:
        place = Place(int(entries["offset"]), int(entries["length"]))
    except (KeyError, ValueError):
        return None
    return place if place in files.places else None


def _large_tensors(data: ByteRanges, graph: _Field) -> list[tuple[_Field, _Field]]:
    """List the initializers with large raw data, each with the field of that data."""
    return [
        (each, raw)
        for each in _fields(data, graph.content, graph.end)
        if each.number == INITIALIZER and each.place.length > LARGE_BYTES
        if (raw := _raw_data(data, each)) is not None
    ]


def _without_data(data: ByteRanges, graph: _Field, tensors: Sequence[tuple[_Field, _Field]]) -> list[bytes]:
    """Return the content of a graph whose tensors say where their data is."""
    parts, at = list[bytes](), graph.content
    for tensor, raw in tensors:
        content = data.read(tensor.content, raw.start) + data.read(raw.end, tensor.end)
        content += _reference(raw.place)  # last, because the last one of two values counts
        parts += [data.read(at, tensor.start), _head(tensor, len(content)), content]
        at = tensor.end
    return [*parts, data.read(at, graph.end)]


def _raw_data(data: ByteRanges, tensor: _Field) -> _Field | None:
    """Return the raw data of a tensor; None if it is small, or not the only data of the tensor."""
    found: _Field | None = None
    for count, each in enumerate(_fields(data, tensor.content, tensor.end)):
        if each.number in OTHER_DATA or each.number == EXTERNAL_DATA or count == _MAX_FIELDS:
            return None
        if each.number == DATA_LOCATION and each.value != DEFAULT:
            return None
        if each.number == RAW_DATA:
            if found is not None or each.wire_type != _BYTES:
                return None
            found = each
    return found if found is not None and found.place.length > LARGE_BYTES else None


def _reference(place: Place) -> bytes:
    """Return the fields of a tensor that say where its data is."""
    entries = {"location": OWN, "offset": str(place.offset), "length": str(place.length)}
    parts = [_bytes(KEY, key.encode()) + _bytes(VALUE, value.encode()) for key, value in entries.items()]
    location = _varint(DATA_LOCATION << 3 | _VARINT) + _varint(EXTERNAL)
    return b"".join(_bytes(EXTERNAL_DATA, part) for part in parts) + location


def _bytes(number: int, content: bytes) -> bytes:
    """Return a field of bytes."""
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _fields(data: ByteRanges, start: int, end: int) -> Iterator[_Field]:
    """Iterate over the fields of a message that begins at `start`. Raises _WireError if it is malformed."""
    at = start
    while at < end:
        head = data.read(at, min(at + 2 * _MAX_VARINT_BYTES, end))
        tag, content = _read_varint(head, 0)
        number, wire_type, value = tag >> 3, tag & 7, 0
        if wire_type == _VARINT:
            value, content = _read_varint(head, content)
            length = 0
        elif wire_type == _BYTES:
            length, content = _read_varint(head, content)
        elif wire_type in (_FIXED64, _FIXED32):
            length = 8 if wire_type == _FIXED64 else 4
        else:
            raise _WireError
        last = at + content + length
        if not number or last > end:
            raise _WireError
        yield _Field(number, wire_type, at, at + content, last, value)
        at = last


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    """Return a number and the place after it. Raises _WireError if it does not end."""
    value = 0
    for place, byte in enumerate(data[start : start + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, start + place + 1
    raise _WireError


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _head(field: _Field, length: int) -> bytes:
    """Return what precedes the content of a field: its number and type, and the new length of the content."""
    return _varint(field.number << 3 | field.wire_type) + _varint(length)
