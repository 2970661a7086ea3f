"""Send messages between the processes of a server: a JSON header and bytes, each with its length."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusec.system.dataclass import dataclass

LENGTHS = struct.Struct("<IQ")  # bytes of the header, bytes of what follows


def frame(header: Mapping[str, Any], parts: Sequence[bytes | memoryview] = ()) -> bytes:
    """Return a message as bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([LENGTHS.pack(len(text), sum(map(len, parts))), text, *parts])


async def read_frame(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """Read a message. Raises EOFError or OSError: when the other process is gone."""
    header, payload = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
    text = await reader.readexactly(header)
    return json.loads(text), await reader.readexactly(payload) if payload else b""


@dataclass(frozen=True)
class AnswerTensor:
    """An output: its bytes in row-major order."""

    datatype: str
    shape: Sequence[int]
    data: memoryview


def split_answers(header: Mapping[str, Any], data: bytes) -> Iterator[tuple[int, dict[str, AnswerTensor]]]:
    """Yield the number and the outputs of each request in a message about several.

    A worker answers all requests of a batch that one front end sent together, because it answers for all front ends.
    ids, rows: id and number of rows of each request; rows is None for one request whose results have no batch.
    outputs: name, datatype, shape without the batch, and bytes of all rows, one output after the other.
    """
    ids, rows = header["ids"], header["rows"]
    view, place, starts = memoryview(data), 0, list[int]()  # starts: of the next request's rows, by output
    for *_, nbytes in header["outputs"]:
        starts.append(place)
        place += nbytes
    total = 1 if rows is None else sum(rows)
    for index, number in enumerate(ids):
        count = 1 if rows is None else rows[index]
        found: dict[str, AnswerTensor] = {}
        for output, (name, datatype, shape, nbytes) in enumerate(header["outputs"]):
            start, size = starts[output], nbytes // total * count
            starts[output] += size
            found[name] = AnswerTensor(datatype, shape if rows is None else [count, *shape], view[start : start + size])
        yield number, found
