"""Test weights in the safetensors format: every type and shape is read back, and the library reads the file."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
from safetensors import deserialize

from fusec.artifacts.safetensors import read, write
from fusec.errors import ModelError
from fusec.ir import NUMBERS, DType, Literal


def literals(rng: np.random.Generator) -> list[Literal]:
    shapes = [(), (0,), (3,), (2, 0, 4), (5, 7)]
    return [
        Literal.of(rng.integers(0, 2, shape).astype(dtype.numpy), f"{dtype.value} ü {shape}")
        for dtype in NUMBERS
        for shape in shapes
    ]


def test_every_type_comes_back(rng: np.random.Generator) -> None:
    held, file = literals(rng), io.BytesIO()
    digest = write(file, [*held, *held])  # each once
    data = file.getvalue()
    assert digest == hashlib.sha256(data).hexdigest()
    found = read(memoryview(data))
    assert found.keys() == {x.digest for x in held}
    for literal in held:
        back = found[literal.digest]
        assert back.type == literal.type
        assert back.array.tobytes() == literal.array.tobytes()
        assert back.digest == literal.digest
        assert back.array.ctypes.data % back.type.dtype.itemsize == 0


def test_the_formats_own_library_reads_the_same(rng: np.random.Generator) -> None:
    held, file = [x for x in literals(rng) if x.type.size], io.BytesIO()
    write(file, held)
    found = dict(deserialize(file.getvalue()))
    for literal in held:
        tensor = found[literal.digest]
        packed = literal.type.dtype.bits < 8
        assert tuple(tensor["shape"]) == (
            ((literal.type.size * literal.type.dtype.bits + 7) // 8,) if packed else literal.type.shape
        )
        assert packed or bytes(tensor["data"]) == literal.array.tobytes()
    wide = [x for x in held if not x.type.dtype.is_narrow]
    assert {found[x.digest]["dtype"] for x in wide} == {x.type.dtype.value.upper() for x in wide}


def test_numbers_below_eight_bits_share_bytes(rng: np.random.Generator) -> None:
    file = io.BytesIO()
    held = Literal.of(rng.integers(-8, 8, (30, 1001)).astype(np.int8).astype(DType.I4.numpy), "w")
    write(file, [held])
    assert 15_015 < len(file.getvalue()) < 15_015 + 512
    np.testing.assert_array_equal(read(memoryview(file.getvalue()))[held.digest].array, held.array)


def test_a_narrow_type_must_be_stored_as_bytes(rng: np.random.Generator) -> None:
    file = io.BytesIO()
    write(file, [Literal.of(rng.integers(0, 2, 8).astype(DType.I4.numpy), "w")])
    for old, new in ((b'"U8"', b'"I8"'), (b'"i4[8]"', b'"u8[8]"'), (b'"i4[8]"', b'"zz[8]"'), (b'"i4[8]"', b'"i4[9]"')):
        assert old in file.getvalue()
        with pytest.raises(ModelError):
            read(memoryview(file.getvalue().replace(old, new)))


@pytest.mark.parametrize("offsets", [(-4, 0), (4, 8), (4, 0), (0, 8)])
def test_no_tensor_begins_or_ends_outside_of_the_file(offsets: tuple[int, int]) -> None:
    file = io.BytesIO()
    write(file, [Literal.of(np.array([7], np.int32), "w")])
    data = file.getvalue().replace(b"[0, 4]", f"[{offsets[0]}, {offsets[1]}]".encode().ljust(6))
    length = len(data) - len(file.getvalue()) + int.from_bytes(file.getvalue()[:8], "little")
    with pytest.raises(ModelError, match="is not stored at bytes"):
        read(memoryview(length.to_bytes(8, "little") + data[8:]))
