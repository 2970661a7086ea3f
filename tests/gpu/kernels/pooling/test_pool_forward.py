"""Test kernels of pooling against the reference, through the emulator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import Case, awkward, build, check, last, normal, rows
from gpu.kernels.emulator import needs_compiler

from fusec.errors import VerifyError
from fusec.gpu.kernels import GpuFigures
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import AvgPool, MaxPool, MaxPoolBackward, MaxPoolTrain, pw
from fusec.targets.target import load

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16


Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]


def random_window(rng: np.random.Generator) -> tuple[tuple[int, ...], Window]:
    """Draw the shape of an image, and window, strides, pads, dilations and `ceil_mode` of a pool."""
    n = int(rng.integers(1, 4))
    window, strides, dilations = (tuple(map(int, rng.integers(1, high, n))) for high in (4, 4, 3))
    pads = tuple(int(rng.integers(0, math.ceil(k * d / 2) + 1)) for k, d in zip(window * 2, dilations * 2, strict=True))
    shape = (int(rng.integers(0, 3)), int(rng.choice([1, 3, 8, 16, 20])), *map(int, rng.integers(1, 8, n)))
    return shape, (window, strides, pads, dilations, bool(rng.integers(2)))


def random_case(rng: np.random.Generator, number: int) -> Case:
    """A pool of random attributes over a random shape; drawn again until the op takes it."""
    while True:
        shape, attributes = random_window(rng)
        dtype = rng.choice(np.array([F32, F16, BF16, DType.I32, DType.I8], dtype=object))
        op = (
            MaxPool(*attributes)
            if rng.integers(2) or dtype.is_int
            else AvgPool(*attributes, count_include_pad=bool(rng.integers(2)))
        )
        kind = last if rng.integers(3) else rows
        extra = bool(rng.integers(2)) and not dtype.is_int

        def make(g: Any, x: Any, op: Any = op, extra: bool = extra) -> Any:
            y = g.add(op, x)
            return g.add(pw("relu"), g.add(pw("add"), y, y)) if extra else y

        try:
            return build(
                f"{number} {op} {dtype.value} {shape} {kind.__name__}",
                [kind(dtype, *shape)],
                make,
                awkward if op.name == "max_pool" else normal,
            )
        except VerifyError:
            continue


def random_backward(rng: np.random.Generator, number: int) -> Case:
    """The gradient of a max pool of random attributes, half of them masked as by a relu before the pool."""
    while True:
        shape, attributes = random_window(rng)
        pool, op = MaxPool(*attributes), MaxPoolBackward(*attributes)
        dtype = rng.choice(np.array([F32, F16, BF16, DType.F64], dtype=object))
        kind, masked = last if rng.integers(3) else rows, bool(rng.integers(2))
        try:
            pooled = pool.infer(kind(dtype, *shape))[0].shape
        except VerifyError:
            continue

        def make(g: Any, dy: Any, x: Any, op: Any = op, masked: bool = masked) -> Any:
            dx = g.add(op, dy, x)
            return g.add(pw("relu_backward"), dx, x) if masked else dx

        types = [kind(dtype, *pooled), kind(dtype, *shape)]
        return build(f"{number} {op} {dtype.value} {shape} {kind.__name__}", types, make, few)


def random_places(rng: np.random.Generator, number: int) -> list[Case]:
    """A max pool with its places, and the gradient at given ones, of random attributes."""
    while True:
        shape, attributes = random_window(rng)
        dtype = rng.choice(np.array([F32, F16, BF16, DType.F64], dtype=object))
        kind, relu = last if rng.integers(3) else rows, bool(rng.integers(2))
        x = kind(dtype, *shape)
        try:
            y, places = MaxPoolTrain(*attributes).infer(x)
        except VerifyError:
            continue
        pool, back = MaxPoolTrain(*attributes), MaxPoolBackward(*attributes, image=shape[2:])

        def make(g: Any, dy: Any, places: Any, op: Any = back, relu: bool = relu) -> Any:
            dx = g.add(op, dy, places)
            return g.add(pw("relu"), dx) if relu else dx

        def taps(rng: np.random.Generator, type: TensorType, most: int = math.prod(back.window)) -> np.ndarray:
            return rng.integers(0, most, type.shape).astype(np.uint8) if type.dtype is DType.U8 else few(rng, type)

        name = f"{dtype.value} {shape} {kind.__name__}"
        return [
            build(f"{number} {pool} {name}", [x], lambda g, x, op=pool: g.insert(op, [x]).results, few, exact=True),
            build(f"{number} {back} {name}", [y, places], make, taps),
        ]


def few(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Small whole numbers, many of them equal, with NaN and infinities among them."""
    array = rng.integers(-2, 3, type.shape).astype(type.dtype.numpy)
    odd = np.array([np.nan, -np.inf, np.inf]).astype(type.dtype.numpy)
    return np.where(rng.random(type.shape) < 0.1, rng.choice(odd, type.shape), array).astype(type.dtype.numpy)


def random_backward_cases() -> list[Case]:
    fixed = np.random.default_rng(8)
    return [random_backward(fixed, i) for i in range(40)]


def random_cases_of_places() -> list[Case]:
    fixed = np.random.default_rng(9)
    return [case for i in range(30) for case in random_places(fixed, i)]


def random_cases() -> list[Case]:
    fixed = np.random.default_rng(7)  # the same sources each time: they are compiled once
    return [random_case(fixed, i) for i in range(60)]


@needs_compiler
def test_random_pools(rng: np.random.Generator) -> None:
    check(random_cases(), rng)


@needs_compiler
def test_gradients_of_random_pools(rng: np.random.Generator) -> None:
    """Of equal numbers the first of a window gets its gradient, and NaN is larger than any."""
    check(random_backward_cases(), rng)


@needs_compiler
def test_random_pools_with_places(rng: np.random.Generator) -> None:
    """Of equal numbers the first is the maximum of a window, and NaN is larger than any."""
    check(random_cases_of_places(), rng)


@needs_compiler
@pytest.mark.parametrize(("gradient", "given"), [(rows, last), (last, rows), (last, last)])
def test_places_have_a_memory_order_of_their_own(gradient: Any, given: Any, rng: np.random.Generator) -> None:
    op = MaxPoolBackward((3, 3), (2, 2), (1, 1, 1, 1), (1, 1), image=(7, 9))

    def drawn(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        return rng.integers(0, 9, type.shape).astype(np.uint8) if type.dtype is DType.U8 else few(rng, type)

    types = [gradient(F16, 2, 16, 4, 5), given(DType.U8, 2, 16, 4, 5)]
    check([build("places", types, lambda g, dy, places: g.add(op, dy, places), drawn)], rng)


@needs_compiler
def test_one_window_of_rows(rng: np.random.Generator) -> None:
    """The result's channels lie side by side, the operand's do not."""
    pool = MaxPool((4, 4), (1, 1), (0, 0, 0, 0), (1, 1))
    check([build("rows", [rows(F16, 2, 8, 4, 4)], lambda g, x: g.add(pool, x), exact=True)], rng)


@needs_compiler
def test_pools_over_everything(rng: np.random.Generator) -> None:
    cases: list[Case] = []
    for kind in (last, rows):
        for pool in (AvgPool((7, 5), (1, 1), (0, 0, 0, 0), (1, 1)), MaxPool((7, 5), (3, 3), (0, 0, 0, 0), (1, 1))):
            x = kind(F16, 2, 24, 7, 5)
            cases.append(build(f"{pool} {x}", [x], lambda g, x, p=pool: g.add(pw("relu"), g.add(p, x)), awkward))
    check(cases, rng)
    assert all("reduce_threads" in case.kernel.launches[0].source for case in cases if case.kernel is not None)


@needs_compiler
def test_the_stem_of_a_resnet(rng: np.random.Generator) -> None:
    pool = MaxPool((3, 3), (2, 2), (1, 1, 1, 1), (1, 1))
    case = build("stem", [last(F16, 2, 64, 17, 17)], lambda g, x: g.add(pool, x), exact=True)
    assert case.kernel is not None
    assert "Pack<f16, 8>" in case.kernel.launches[0].source, "16 bytes in one load"
    check([case], rng)


def any_byte(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Bytes of the whole range, a few of them far more often than others."""
    often = rng.choice(np.array([-128, -1, 0, 127]), type.shape)
    return np.where(rng.random(type.shape) < 0.3, often, rng.integers(-128, 128, type.shape)).astype(np.int8)


def byte_case(channels: int, window: int, stride: int, extra: bool = False) -> Case:
    pool = MaxPool((window, window), (stride, stride), (1,) * 4, (1, 1))

    def make(g: Graph, x: Value) -> Value:
        y = g.add(pool, x)
        return g.add(pw("relu"), y) if extra else y

    return build(f"{channels} {window}", [last(DType.I8, 2, channels, 9, 10)], make, any_byte, exact=True)


@needs_compiler
def test_the_largest_bytes_are_found_in_words(rng: np.random.Generator) -> None:
    cases = [byte_case(64, 3, 2), byte_case(20, 2, 1), byte_case(8, 3, 3)]
    check(cases, rng)
    assert all("larger_halves" in case.kernel.launches[0].source for case in cases if case.kernel is not None)


@needs_compiler
def test_bytes_that_fill_no_words_or_are_computed_with_are_found_one_by_one(rng: np.random.Generator) -> None:
    old = replace(byte_case(64, 3, 2), figures=GpuFigures.of(load("a100")))
    cases = [byte_case(6, 3, 2), byte_case(64, 3, 2, extra=True), old]
    check(cases, rng)
    assert not any("larger_halves" in case.kernel.launches[0].source for case in cases if case.kernel is not None)
