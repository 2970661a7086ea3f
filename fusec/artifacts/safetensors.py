"""Write weights in the safetensors format inside a larger file, and read them as views of its memory.

The format has three parts: the length of a JSON header in eight bytes; the header, with dtype, shape and place of each
tensor; and the row-major bytes of the tensors, without gaps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import numpy as np

from fusec.errors import ModelError, VerifyError
from fusec.ir import NUMBERS, DType, Literal, TensorType
from fusec.lowering.packing import as_stored, code_bytes, from_codes, to_codes
from fusec.system.untrusted import read_json

# Names of the format. Narrow types that it has no name for are bytes, with their type in the metadata. Those below
# 8 bits share bytes, as on a GPU, in one dim.
_NAMES = {dtype: dtype.value.upper() for dtype in NUMBERS if not dtype.is_narrow} | {
    DType.F8E4M3: "F8_E4M3",
    DType.F8E5M2: "F8_E5M2",
    DType.F8E8M0: "F8_E8M0",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_BYTES = "U8"
MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors library
_ALIGNMENT = 64  # of the first tensor; wider types come first, so that every element is aligned


def write(file: IO[bytes], literals: Iterable[Literal]) -> str:
    """Write literals by digest, with their labels in the metadata; return the SHA-256 of the written bytes."""
    wide_first = sorted({x.digest: x for x in literals}.values(), key=lambda x: (-x.type.dtype.itemsize, x.digest))
    labels = {x.digest: x.label for x in wide_first}
    unnamed = {f"dtype:{x.digest}": str(x.type.with_order(())) for x in wide_first if x.type.dtype not in _NAMES}
    header: dict[str, Any] = {"__metadata__": {**labels, **unnamed}}
    start = 0
    for literal in wide_first:
        offsets = [start, start + code_bytes(literal.type.size, literal.type.dtype)]
        dtype = _NAMES.get(literal.type.dtype, _BYTES)
        header[literal.digest] = {"dtype": dtype, "shape": list(as_stored(literal.type)), "data_offsets": offsets}
        start = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    sha = hashlib.sha256()

    with ThreadPoolExecutor(1, thread_name_prefix="fusec-sha256") as hashing:  # because it takes as long as to write

        def put(data: bytes | memoryview) -> None:
            hashed = hashing.submit(sha.update, data)
            file.write(data)
            hashed.result()

        put(len(text).to_bytes(8, "little") + text)
        for literal in wide_first:
            flat = np.ascontiguousarray(literal.array).reshape(-1)
            put((to_codes(flat, literal.type.dtype) if literal.type.dtype.bits < 8 else flat.view(np.uint8)).data)
    return sha.hexdigest()


def read(data: memoryview, wait: Callable[[], object] = lambda: None) -> dict[str, Literal]:
    """Return the literals by name; they share the memory of `data`. Raises ModelError for damaged data.

    wait: called before the bytes of a tensor are used, if only the header of `data` has been read yet.
    """
    try:
        start = header_bytes(data)
        if start < 8:
            raise ModelError("truncated, or no safetensors")
        header: dict[str, Any] = read_json(bytes(data[8:start]))
        metadata: dict[str, str] = header.pop("__metadata__", {})
        body = data[start:]
        return {
            name: _literal(body, entry, str(metadata.get(name, name)), metadata.get(f"dtype:{name}"), wait)
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, VerifyError) as error:
        raise ModelError(f"no safetensors: {error}") from error


def header_bytes(data: memoryview) -> int:
    """Count the bytes before the tensors, from the first eight bytes; 0 for another kind of file."""
    length = int.from_bytes(data[:8], "little")
    return 0 if len(data) < 8 or length > min(len(data) - 8, MAX_HEADER_BYTES) else 8 + length


def _literal(body: memoryview, entry: Any, label: str, unnamed: str | None, wait: Callable[[], object]) -> Literal:
    shape = tuple(map(int, entry["shape"]))
    type = TensorType(shape, _DTYPES[entry["dtype"]]) if unnamed is None else type_of(unnamed)
    if unnamed is not None and (type.dtype in _NAMES or entry["dtype"] != _BYTES or as_stored(type) != shape):
        raise ModelError(f"{label!r}: is {entry['dtype']}{list(shape)} and {unnamed}")
    start, end = map(int, entry["data_offsets"])
    if not 0 <= start <= end <= len(body) or end - start != code_bytes(type.size, type.dtype):
        raise ModelError(f"{label!r}: {type} is not stored at bytes {start} to {end}")

    def view() -> np.ndarray[Any, Any]:
        wait()
        if type.dtype.bits < 8:
            return from_codes(np.frombuffer(body[start:end], np.uint8), type.size, type.dtype).reshape(type.shape)
        return np.frombuffer(body[start:end], type.dtype.numpy).reshape(type.shape)

    return Literal(type, view, label)


def type_of(text: str) -> TensorType:
    """Read a type as `str` writes it: `i4[2,3]`."""
    name, _, dims = text.removesuffix("]").partition("[")
    return TensorType(tuple(map(int, filter(None, dims.split(",")))), DType(name))
