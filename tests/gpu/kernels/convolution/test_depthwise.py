"""Test kernels of depthwise convolution against the reference, through the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu.kernels.cases import FIGURES, Case, assert_same, build, check, last, normal, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.errors import VerifyError
from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.gpu.kernels.convolution.depthwise import rolling_sums
from fusec.ir import DType, TensorType, channels_last
from fusec.ops import Cast, Conv, pw

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16


def random_case(rng: np.random.Generator, number: int) -> Case:
    while True:
        n = int(rng.integers(1, 4))
        window, strides, dilations = (tuple(map(int, rng.integers(1, high, n))) for high in (5, 4, 3))
        pads = tuple(map(int, rng.integers(0, 4, 2 * n)))
        channels = int(rng.choice([2, 3, 8, 16, 20]))
        shape = (int(rng.integers(1, 3)), channels, *map(int, rng.integers(1, 12, n)))
        dtype, kind, constant = rng.choice(np.array([F32, F16, BF16], dtype=object)), last, bool(rng.integers(4))
        kind = last if rng.integers(4) else rows
        op = Conv(strides, pads, dilations, channels)
        taps = (channels, 1, *window)
        # results are smaller than what is added to them: else that may cancel all but what two roundings differ by
        less = 4 * np.prod(window) ** 0.5
        array = (rng.standard_normal(taps) / less).astype(dtype.numpy)

        def draw(rng: np.random.Generator, type: TensorType, taps: Any = taps, less: float = less) -> np.ndarray:
            return (normal(rng, type) / (less if type.shape == taps else 1.0)).astype(type.dtype.numpy)

        def make(g: Any, x: Any, z: Any, *w: Any, op: Any = op, array: Any = array, n: int = n) -> Any:
            filters = w[0] if w else g.constant(array)
            if not w:
                g.set_type(filters, filters.type.with_order(channels_last(filters.type.rank)))
            y = g.add(op, x, filters)
            bias = g.constant(np.linspace(-1, 1, op.groups).astype(x.type.dtype.numpy).reshape(1, -1, *(1,) * n))
            return g.add(pw("clip", min=0.0, max=6.0), g.add(pw("add"), g.add(pw("add"), y, bias), z))

        x = kind(dtype, *shape)
        weights: list[TensorType] = [] if constant else [last(dtype, *taps)]
        try:
            (y,) = op.infer(x, rows(dtype, *taps))
            name = f"{number} {op} {window} {dtype.value} {shape} {kind.__name__} {constant}"
            return build(name, [x, y, *weights], make, draw)
        except VerifyError:
            continue


def random_cases() -> list[Case]:
    fixed = np.random.default_rng(11)
    return [random_case(fixed, i) for i in range(40)]


@needs_compiler
def test_random_convolutions(rng: np.random.Generator) -> None:
    check(random_cases(), rng)


@needs_compiler
def test_work_shared_out_otherwise_is_the_same_work(rng: np.random.Generator) -> None:
    """Shorter strips, and fewer channels a thread."""
    cases = [case for case in random_cases() if case.kernel is not None and case.kernel.others]
    emulator = Emulator([other for case in cases for other in getattr(case.kernel, "others", ())])
    assert len(cases) > 20
    for case in cases:
        arrays = case.arrays(rng)
        assert case.kernel is not None
        for other in case.kernel.others:
            assert_same(case, emulator.run(other, arrays, case.outputs), case.reference(arrays))


def rolling_case(
    dtype: DType, shape: tuple[int, int, int, int], window: tuple[int, int], strides: tuple[int, int]
) -> Case:
    """A convolution that may have rolling sums, with more padding at the end than at the beginning."""
    (down, right), channels = window, shape[1]
    op = Conv(strides, (down // 2, right // 2, (down + 1) // 2, right // 2), (1, 1), channels)

    def make(g: Any, x: Any, w: Any, bias: Any) -> Any:
        return g.add(pw("relu"), g.add(pw("add"), g.add(op, x, w), bias))

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        less = np.prod(window) ** 0.5 if type.shape[2:] == window else 1.0
        return (normal(rng, type) / less).astype(type.dtype.numpy)

    types = [last(dtype, *shape), last(dtype, channels, 1, *window), rows(dtype, 1, channels, 1, 1)]
    return build(f"rolling {dtype.value} {shape} {window} {strides}", types, make, draw)


def rolling_cases() -> list[Case]:
    return [
        rolling_case(F16, (2, 8, 14, 15), (7, 7), (1, 1)),
        rolling_case(F16, (1, 3, 9, 8), (7, 7), (2, 2)),
        rolling_case(BF16, (1, 4, 40, 9), (5, 5), (1, 1)),
        rolling_case(F16, (2, 6, 17, 16), (5, 5), (2, 1)),
        rolling_case(F32, (1, 8, 12, 7), (6, 5), (1, 2)),
        rolling_case(F16, (1, 8, 5, 30), (3, 9), (2, 2)),
        rolling_case(F16, (1, 2, 3, 8), (9, 3), (1, 1)),
    ]


@needs_compiler
def test_rows_are_loaded_once_for_rolling_sums(rng: np.random.Generator) -> None:
    """Paddings differ, and the last strips and bands are shorter."""
    cases = rolling_cases()
    for case in cases:
        assert case.kernel is not None
        rolling = [way for way in variants_of(case.kernel) if "ahead[" in way.launches[0].source]
        assert rolling, case.name
    check(cases, rng, every=True)


def test_few_images_are_split_into_bands() -> None:
    """All threads together fill the GPU; a band is no shorter than the rows that share a row of the image."""
    wide, small = rolling_case(F16, (32, 96, 56, 56), (7, 7), (1, 1)), rolling_case(F16, (1, 8, 56, 56), (7, 7), (1, 1))
    bands = {sums.strip: sums.band for sums in rolling_sums(wide.nodes[0], FIGURES)}
    assert bands[7] == 29  # of 57 rows
    assert {sums.band for sums in rolling_sums(small.nodes[0], FIGURES)} == {7}


def integer_case(rng: np.random.Generator, number: int) -> Case:
    """A depthwise convolution of 8-bit integers, with the scale, bias and rounding of a quantised model."""
    channels, size, side, stride = (int(rng.choice(each)) for each in ([3, 16, 32], [7, 14, 15], [1, 3, 5], [1, 2]))
    op = Conv((stride, stride), (side // 2,) * 4, (1, 1), channels)

    def make(g: Any, x: Any, w: Any, scale: Any, bias: Any) -> Any:
        y = g.add(Cast(F32), g.add(op, x, w))
        y = g.add(pw("relu"), g.add(pw("add"), g.add(pw("mul"), y, scale), bias))
        return g.add(Cast(DType.I8), g.add(pw("clip", min=-128.0, max=127.0), g.add(pw("round"), y)))

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        if type.dtype is DType.I8:
            return rng.integers(-128, 128, type.shape, np.int8)
        return np.rint(16 * rng.standard_normal(type.shape)).astype(np.float32) / 2048  # so that sums are exact

    kind, vector = last if rng.integers(2) else rows, rows(F32, 1, channels, 1, 1)
    types = [kind(DType.I8, 2, channels, size, size), rows(DType.I8, channels, 1, side, side), vector, vector]
    return build(f"{number} {op} {kind.__name__}", types, make, draw, exact=True)


def constant_bytes_case(
    channels: int, size: tuple[int, int], window: tuple[int, int], strides: tuple[int, int]
) -> Case:
    """The same with constant filters: four bytes are multiplied at a time."""
    down, right = window
    op = Conv(strides, (down // 2, right // 2, down // 2, right // 2), (1 + (down == 2), 1), channels)
    drawn = np.random.default_rng(channels)
    taps = drawn.integers(-128, 128, (channels, 1, *window), np.int8)
    bias = (drawn.integers(-64, 64, (channels, 1, 1)) / 32).astype(np.float32)

    def make(g: Any, x: Any) -> Any:
        y = g.add(pw("mul"), g.add(Cast(F32), g.add(op, x, g.constant(taps))), g.constant(np.float32(2**-9)))
        y = g.add(pw("clip", min=-90.0, max=100.5), g.add(pw("add"), y, g.constant(bias)))
        return g.add(Cast(DType.I8), g.add(pw("clip", min=-128.0, max=127.0), g.add(pw("round"), y)))

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        return rng.integers(-128, 128, type.shape, np.int8)

    types = [last(DType.I8, 2, channels, *size)]
    return build(f"bytes {channels} {size} {window} {strides}", types, make, draw, exact=True)


def constant_bytes_cases() -> list[Case]:
    shapes = [(8, (7, 9), (3, 3), (1, 1)), (4, (8, 7), (3, 3), (2, 2)), (16, (9, 11), (5, 5), (1, 1))]
    more = [(12, (9, 9), (5, 3), (2, 3)), (8, (6, 13), (2, 7), (1, 2)), (4, (5, 6), (1, 4), (1, 1))]
    return [constant_bytes_case(*shape) for shape in shapes + more]


@needs_compiler
def test_constant_bytes_are_multiplied_by_fours(rng: np.random.Generator) -> None:
    cases = constant_bytes_cases()
    assert all(case.kernel is not None and "dot_bytes" in case.kernel.launches[0].source for case in cases)
    check(cases, rng, every=True)


@needs_compiler
def test_integers_are_summed_exactly(rng: np.random.Generator) -> None:
    fixed = np.random.default_rng(12)
    cases = [integer_case(fixed, i) for i in range(12)]
    assert all(case.kernel is not None for case in cases)
    check(cases, rng)


def test_others_are_left_alone() -> None:
    grouped = Conv((1, 1), (1, 1, 1, 1), (1, 1), 2)
    case = build("grouped", [last(F32, 1, 4, 5, 5), last(F32, 4, 2, 3, 3)], lambda g, x, w: g.add(grouped, x, w))
    assert case.kernel is None
