"""Test kernels that cast and move floats of 8 bits and fewer, and integers below 8 bits, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gpu.kernels.cases import Case, build, check, rows
from gpu.kernels.emulator import needs_compiler

from fusec.gpu.kernels.codegen.kernel import computed_in
from fusec.ir import DType, Graph, TensorType, Value
from fusec.lowering import packing
from fusec.lowering.packing import code_bytes, from_codes, to_codes
from fusec.ops import Cast, Concat, Expand, Gather, Pad, Reshape, Slice, Split, Transpose
from fusec.system import threaded_parts

NARROW = [dtype for dtype in DType if dtype.is_narrow]
WIDE = (DType.F64, DType.F32, DType.F16, DType.BF16, DType.I64, DType.I32, DType.I8, DType.U8, DType.BOOL)
ODD = np.array(
    [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3e38, -1.0, 448.0, 464.0, 465.0, 480.0, 57344.0, 61440.0, 6.5]
)


def every_code(dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """All codes of a narrow type, again and again; without 2^-127, which is denormal in f32."""
    size, least = int(np.prod(shape)), int(dtype is DType.F8E8M0)
    codes = (np.arange(size) % ((1 << dtype.bits) - least) + least).astype(np.uint8)
    return from_codes(to_codes_of(codes, dtype), size, dtype).reshape(shape)


def to_codes_of(codes: np.ndarray, dtype: DType) -> np.ndarray:
    """Bytes that hold these codes."""
    return to_codes(codes.view(dtype.numpy), dtype) if dtype.bits == 8 else to_codes(codes.view(DType.U8.numpy), dtype)


def drawn(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Every code of a narrow type; numbers of all sizes, half-way ones and odd ones of a float; small integers."""
    dtype = type.dtype
    if dtype.is_narrow:
        return every_code(dtype, type.shape)
    if not dtype.is_float:
        return rng.integers(0 if dtype.value[0] in "ub" else -100, 100, type.shape).astype(dtype.numpy)
    numbers = rng.standard_normal(type.size) * 2.0 ** rng.integers(-20, 20, type.size)
    some = numbers[: type.size // 2]
    numbers[: type.size // 2] = np.ldexp(np.rint(np.ldexp(some, 4)), -4)  # many are half-way between two
    numbers[-len(ODD) :] = ODD
    with np.errstate(all="ignore"):
        return numbers.reshape(type.shape).astype(dtype.numpy)


def small(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """As `drawn`, but floats that an integer of 8 bits holds: casts of others are not defined."""
    if type.dtype.is_float:
        return rng.uniform(-8, 8, type.shape).astype(type.dtype.numpy)
    return drawn(rng, type)


TO = tuple(
    d for d in NARROW if d is not DType.F8E8M0
)  # whose least number is a denormal of fp32: no kernel casts to it


def narrow_casts() -> list[Case]:
    """From and to each type, of as many elements as vectors have, and of other numbers."""

    def case(a: DType, b: DType, *shape: int) -> Case:
        draw = small if b.is_narrow_int or not b.is_float else drawn
        if not computed_in(b).is_float and a.is_narrow and not a.is_narrow_int:
            draw = _numbers_only
        name = f"{a.value} to {b.value} {list(shape)}"
        return build(name, [rows(a, *shape)], lambda g, x: g.add(Cast(b), x), draw, exact=True)

    pairs = [(a, b) for a in (*WIDE, *NARROW) for b in (*WIDE, *TO) if a is not b and (a.is_narrow or b.is_narrow)]
    return [case(a, b, *shape) for a, b in pairs for shape in ((4, 128), (3, 171))]


def _numbers_only(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Codes of small numbers: casts of NaN and of large numbers to integers are not defined."""
    with np.errstate(all="ignore"):
        near = rng.integers(0, 3, type.shape).astype(np.float32)
        return np.where(near == 0, np.float32(4 if type.dtype is DType.F8E8M0 else 0), near).astype(type.dtype.numpy)


def narrow_moves() -> list[Case]:
    """Moves of each type, to odd places, so that threads write parts of one byte."""

    def turned(g: Graph, x: Value) -> Value:
        return g.add(Transpose((1, 0)), x)

    def backwards(g: Graph, x: Value) -> Value:
        return g.add(Slice((2, 36), (3, 18), (-1, -2)), x)

    def halves(g: Graph, x: Value) -> list[Value]:
        return list(g.insert(Split(1, (5, 32)), [x]).results)

    def repeated(g: Graph, x: Value) -> Value:
        return g.add(Expand((3, 3, 37)), g.add(Reshape((3, 1, 37)), x))

    def dequantised(g: Graph, x: Value) -> Value:
        return g.add(Cast(DType.F16), g.add(Transpose((1, 0)), x))

    cases: list[Case] = []
    for dtype in NARROW:
        cases += [
            build(f"{make.__name__} {dtype.value}", [rows(dtype, 3, 37)], make, drawn, exact=True)
            for make in (turned, backwards, halves, repeated, dequantised)
        ]
        pair = [rows(dtype, 3, 7), rows(dtype, 3, 6)]
        cases.append(build(f"joined {dtype.value}", pair, lambda g, a, b: g.add(Concat(1), a, b), drawn, exact=True))
        table = [rows(dtype, 9, 33), rows(DType.I64, 5)]
        cases.append(build(f"rows of {dtype.value}", table, lambda g, x, i: g.add(Gather(0), x, i), _rows, exact=True))
        cases.append(
            build(f"embedding {dtype.value}", [rows(dtype, 9, 32), rows(DType.I64, 5)], _embedding, _rows, exact=True)
        )
        if dtype is not DType.F8E8M0:  # which has no zero
            pads = Pad((1, 2, 0, 3))
            cases.append(
                build(
                    f"padded {dtype.value}", [rows(dtype, 3, 37)], lambda g, x, p=pads: g.add(p, x), drawn, exact=True
                )
            )
    return cases


def _embedding(g: Graph, x: Value, i: Value) -> Value:
    return g.add(Cast(DType.F32), g.add(Gather(0), x, i))


def _rows(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    return rng.integers(-9, 9, type.shape) if type.dtype is DType.I64 else drawn(rng, type)


def requantised() -> list[Case]:
    """A round trip through a narrow type within one kernel rounds as two kernels do."""

    def make(g: Graph, x: Value, to: DType) -> Value:
        return g.add(Cast(DType.F32), g.add(Cast(to), x))

    floats = [d for d in TO if not d.is_narrow_int]
    return [
        build(f"round trip {d.value}", [rows(DType.F32, 5, 64)], lambda g, x, d=d: make(g, x, d), drawn, exact=True)
        for d in floats
    ]


def cases() -> list[Case]:
    return [*narrow_casts(), *narrow_moves(), *requantised()]


@needs_compiler
@pytest.mark.parametrize("of", [narrow_casts, narrow_moves, requantised])
def test_kernels_of_narrow_types(of: Callable[[], list[Case]], rng: np.random.Generator) -> None:
    with np.errstate(all="ignore"):
        check(of(), rng)


@pytest.mark.parametrize("dtype", NARROW, ids=lambda d: d.value)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 256])
def test_codes_of_a_gpu_stand_for_the_same_numbers(dtype: DType, count: int) -> None:
    flat = every_code(dtype, (count,))
    raw = to_codes(flat, dtype)
    assert raw.dtype == np.uint8
    assert raw.size == code_bytes(count, dtype) == -(-count * dtype.bits // 8)
    back = from_codes(raw, count, dtype)
    np.testing.assert_array_equal(back.view(np.uint8), flat.view(np.uint8))


@pytest.mark.parametrize("dtype", [d for d in NARROW if d.bits < 8], ids=lambda d: d.value)
def test_many_codes_are_converted_in_parts(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    want = every_code(dtype, (1001,))
    whole = to_codes(want, dtype)
    monkeypatch.setattr(packing, "_RUN", 32)
    monkeypatch.setattr(threaded_parts, "PARALLEL_BYTES", 1)
    np.testing.assert_array_equal(to_codes(want, dtype), whole)
    np.testing.assert_array_equal(from_codes(whole, want.size, dtype).view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("dtype", [DType.I4, DType.I2])
def test_bytes_of_negative_numbers_are_those_of_numpy(dtype: DType) -> None:
    """`from_codes` leaves the high bits zero, as casts do, so that equal numbers have equal bytes."""
    low = 1 << (dtype.bits - 1)
    cast = np.arange(-low, low, dtype=np.int8).astype(dtype.numpy)
    codes = np.concatenate([np.arange(low, 2 * low), np.arange(low)]).astype(np.uint8)
    np.testing.assert_array_equal(cast.view(np.uint8), codes)
    np.testing.assert_array_equal(codes.view(dtype.numpy).astype(np.int8), cast.astype(np.int8))


def test_the_first_of_two_numbers_is_in_the_low_bits() -> None:
    four = np.array([1, -2, 7], np.int8).astype(DType.I4.numpy)
    assert to_codes(four, DType.I4).tolist() == [0xE1, 0x07]


def test_no_kernel_casts_to_powers_of_two() -> None:
    """The least one is a denormal number of fp32, which kernels flush to zero."""
    case = build("to e8m0", [rows(DType.F16, 8)], lambda g, x: g.add(Cast(DType.F8E8M0), x))
    assert case.kernel is None
