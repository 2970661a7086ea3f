"""Weights in the safetensors format inside a larger file: written in one go, read as views of its memory.

The format: eight bytes, the length of a JSON header; the header with dtype, shape and place of each tensor;
their bytes, row-major, without gaps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import IO, Any

import numpy as np

from fusec.errors import ModelError, VerifyError
from fusec.ir import DType, Literal, TensorType
from fusec.system.untrusted import read_json

# The format's names. Narrow types it has no name for, or packs, are bytes; the metadata says of what type.
_NAMES = {dtype: dtype.value.upper() for dtype in DType if not dtype.is_narrow} | {
    DType.F8E4M3: "F8_E4M3",
    DType.F8E5M2: "F8_E5M2",
    DType.F8E8M0: "F8_E8M0",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_BYTES = "U8"
MAX_HEADER_BYTES = 100 << 20  # as the format's own library
_ALIGNMENT = 64  # of the first tensor; the wider types come first, so that every element is aligned


def write(file: IO[bytes], literals: Iterable[Literal]) -> str:
    """Write literals, named by their digests, labels in the metadata; returns the SHA-256 of what was written."""
    wide_first = sorted({x.digest: x for x in literals}.values(), key=lambda x: (-x.type.dtype.itemsize, x.digest))
    labels = {x.digest: x.label for x in wide_first}
    unnamed = {f"dtype:{x.digest}": x.type.dtype.value for x in wide_first if x.type.dtype not in _NAMES}
    header: dict[str, Any] = {"__metadata__": {**labels, **unnamed}}
    start = 0
    for literal in wide_first:
        offsets = [start, start + literal.type.nbytes]
        dtype = _NAMES.get(literal.type.dtype, _BYTES)
        header[literal.digest] = {"dtype": dtype, "shape": list(literal.type.shape), "data_offsets": offsets}
        start = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    sha = hashlib.sha256()

    def put(data: bytes | memoryview) -> None:
        sha.update(data)
        file.write(data)

    put(len(text).to_bytes(8, "little") + text)
    for literal in wide_first:
        put(np.ascontiguousarray(literal.array).reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def read(data: memoryview) -> dict[str, Literal]:
    """The literals by name; they share the memory of `data`. ModelError with the reason for anything else."""
    try:
        start = header_bytes(data)
        if start < 8:
            raise ModelError("cut short, or no safetensors")
        header: dict[str, Any] = read_json(bytes(data[8:start]))
        said: dict[str, str] = header.pop("__metadata__", {})
        body = data[start:]
        return {
            name: _literal(body, entry, str(said.get(name, name)), said.get(f"dtype:{name}"))
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, VerifyError) as error:
        raise ModelError(f"no safetensors: {error}") from error


def header_bytes(data: memoryview) -> int:
    """Return how many bytes come before the tensors, from the first eight; 0 for another kind of file."""
    length = int.from_bytes(data[:8], "little")
    return 0 if len(data) < 8 or length > min(len(data) - 8, MAX_HEADER_BYTES) else 8 + length


def _literal(body: memoryview, entry: Any, label: str, unnamed: str | None) -> Literal:
    dtype = _DTYPES[entry["dtype"]] if unnamed is None else DType(unnamed)
    if unnamed is not None and (dtype in _NAMES or entry["dtype"] != _BYTES):
        raise ModelError(f"{label!r}: is {entry['dtype']} and {unnamed}")
    type = TensorType(tuple(map(int, entry["shape"])), dtype)
    start, end = map(int, entry["data_offsets"])
    if not 0 <= start <= end <= len(body) or end - start != type.nbytes:
        raise ModelError(f"{label!r}: {type} does not lie at bytes {start} to {end}")

    def view() -> np.ndarray[Any, Any]:
        return np.frombuffer(body[start:end], type.dtype.numpy).reshape(type.shape)

    return Literal(type, view, label)
