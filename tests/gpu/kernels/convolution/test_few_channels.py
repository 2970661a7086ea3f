"""Test kernels of convolutions of images with up to four channels against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, each_way, last, normal, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.errors import VerifyError
from fusec.gpu.kernels import GpuFigures
from fusec.gpu.kernels.convolution.few_channels import warp_products
from fusec.ir import DType, TensorType, channels_last
from fusec.ops import Cast, Conv, MaxPool, Pad, Relayout, pw

AMPERE = replace(FIGURES, sm=80)  # without products of warpgroups
F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
POOL = MaxPool((3, 3), (2, 2), (1, 1, 1, 1), (1, 1))
FOURTH = Pad((0, 0, 0, 0, 0, 1, 0, 0))


def convolved(
    name: str,
    x: TensorType,
    op: Conv,
    window: tuple[int, int],
    filters: int,
    dtype: DType = F16,
    constant: bool = True,
    epilogue: str = "relu",
    pool: MaxPool | None = None,
) -> Case:
    """A convolution; before it what makes an image of three channels one of four, after it a bias and relu.

    epilogue: `quantise` also rounds to int8; `negative` is a factor alone.
    pool: what follows.
    """
    taps = (filters, 4, *window)
    rng = np.random.default_rng(3)
    array = (rng.standard_normal(taps) / np.prod(taps[1:]) ** 0.5).astype(dtype.numpy)
    whole = epilogue == "quantise"
    array = (np.rint(array.astype(np.float32) * 64) / 64).astype(dtype.numpy) if whole else array

    def make(g: Any, x: Any, *w: Any) -> Any:
        if x.type.dtype is not dtype:
            x = g.add(Cast(dtype), g.add(pw("neg"), x))
        if x.type.shape[1] != 4:
            x = g.insert(Relayout(channels_last(4)), [g.add(FOURTH, x)]).result
        filter_ = w[0] if w else g.constant(array)
        if constant:
            g.set_type(filter_, filter_.type.with_order(channels_last(4)))
        y = g.add(op, x, filter_)
        bias = np.linspace(-1, 1, filters).astype(dtype.numpy).reshape(1, -1, 1, 1)
        if epilogue == "quantise":
            y = quantised(g, y, g.constant(bias.astype(np.float32)))
        elif epilogue == "negative":
            y = g.add(pw("mul"), y, g.constant(-np.ones((1, filters, 1, 1), dtype.numpy)))
        elif epilogue:
            y = g.add(pw(epilogue), g.add(pw("add"), y, g.constant(bias)))
        y = g.add(pool, y) if pool is not None else y
        return y if number_of(name) % 3 else g.insert(Relayout((0, 1, 2, 3)), [y]).result

    # filters that are no constant lie as they come
    return build(name, [x] if constant else [x, rows(dtype, *taps)], make, quarters if whole else normal)


def quarters(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Draw multiples of a quarter. Their sums are exact in any order, so that all round to the same integers."""
    return (np.rint(rng.standard_normal(type.shape) * 4) / 4).astype(type.dtype.numpy)


def quantised(g: Any, y: Any, bias: Any) -> Any:
    """Bias, relu, a scale, and rounding to int8, in f32 as a quantised model's first convolution has them."""
    wide = g.add(pw("relu"), g.add(pw("add"), g.add(Cast(F32), y), bias))
    steps = g.add(pw("round"), g.add(pw("mul"), wide, g.constant(np.float32(37.5))))
    return g.add(Cast(DType.I8), g.add(pw("clip", min=-128.0, max=127.0), steps))


def number_of(name: str) -> int:
    return int(name.split()[0]) if name[0].isdigit() else 1


def pair(rng: np.random.Generator, high: int) -> tuple[int, int]:
    return int(rng.integers(1, high)), int(rng.integers(1, high))


def random_case(rng: np.random.Generator, number: int) -> Case:
    while True:
        window, strides, dilations = (pair(rng, high) for high in (8, 4, 3))
        pads, filters = tuple(map(int, rng.integers(0, 5, 4))), int(rng.choice([16, 32, 48, 64, 96]))
        channels, high, across = int(rng.integers(3, 5)), int(rng.integers(1, 30)), int(rng.integers(1, 80))
        shape = (int(rng.integers(1, 3)), channels, high, across)
        dtype, constant = rng.choice(np.array([F16, BF16], dtype=object)), bool(rng.integers(4))
        op = Conv(strides, pads, dilations)
        try:
            op.infer(rows(dtype, shape[0], 4, *shape[2:]), rows(dtype, filters, 4, *window))
        except VerifyError:
            continue
        if channels == 4:
            x = last(dtype, *shape) if number % 3 else rows(dtype, *shape)
        else:
            x = rows(F32 if rng.integers(2) else dtype, *shape)
        if channels == 3 and number % 2:
            x = x.with_order(channels_last(4))
        epilogue, name = (
            str(rng.choice(["", "relu", "quantise"])),
            f"{number} {op} {window} {filters} {dtype.value} {shape}",
        )
        return convolved(name, x, op, window, filters, dtype, constant, epilogue)


def random_cases() -> list[Case]:
    fixed = np.random.default_rng(12)
    return [random_case(fixed, i) for i in range(12)]


@needs_compiler
@pytest.mark.parametrize("figures", [FIGURES, AMPERE], ids=["hopper", "ampere"])
def test_random_convolutions(rng: np.random.Generator, figures: GpuFigures) -> None:
    check([replace(case, figures=figures) for case in random_cases()], rng)


@needs_compiler
def test_every_size_of_tile_does_the_same_work(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Case] = []
    for size in warp_products.SIZES:
        monkeypatch.setattr(warp_products, "SIZES", (size,))
        cases += [replace(case, figures=AMPERE) for case in random_cases()[:6]]
    check([case for case in cases if case.kernel is not None], rng)


@needs_compiler
@pytest.mark.parametrize("pool", [None, POOL], ids=["", "pool"])
@pytest.mark.parametrize("figures", [FIGURES, AMPERE], ids=["hopper", "ampere"])
def test_a_block_computes_several_tiles(rng: np.random.Generator, figures: GpuFigures, pool: MaxPool | None) -> None:
    """On a GPU with one multiprocessor there are fewer blocks than tiles."""
    image, op = rows(F32, 2, 3, 37, 41), Conv((2, 2), (3,) * 4, (1, 1))
    case = convolved("stem", image, op, (7, 7), 64, epilogue="quantise", pool=pool)
    case = replace(case, figures=replace(figures, processors=1))
    if pool is not None and figures is AMPERE:
        assert case.kernel is None  # only products of warpgroups find the largest results
        return
    assert case.kernel is not None
    tiles = [[value for _, value in way.launches[0].numbers] for way in each_way(case.kernel)]
    assert all(more > blocks for more, blocks in tiles)
    check([case], rng, every=True)


@needs_compiler
@pytest.mark.parametrize("figures", [FIGURES, AMPERE], ids=["hopper", "ampere"])
@pytest.mark.parametrize(("stride", "across", "windows"), [(1, 9, 9), (2, 9, 1), (2, 10, 1)])
def test_an_infinity_spoils_only_what_it_is_in_the_window_of(
    rng: np.random.Generator, figures: GpuFigures, stride: int, across: int, windows: int
) -> None:
    """The last step of a product has fewer taps than room, so that some operands are no pixels."""
    op = Conv((stride, stride), (1,) * 4, (1, 1))
    case = convolved("one", last(F16, 1, 4, 8, across), op, (3, 3), 16, epilogue="")
    case = replace(case, figures=figures)
    assert case.kernel is not None
    arrays = case.arrays(rng)
    x = next(v for v in arrays if v.literal is None)
    arrays[x][0, 2, 4, 4] = np.inf
    (got,) = Emulator([case.kernel]).run(case.kernel, arrays, case.outputs)
    assert np.isinf(got.astype(np.float32)).sum() == windows * 16 and not np.isnan(got.astype(np.float32)).any()


def test_the_image_is_made_ready_on_the_way() -> None:
    case = convolved("stem", rows(F32, 32, 3, 224, 224), Conv((2, 2), (3,) * 4, (1, 1)), (7, 7), 64)
    assert case.kernel is not None and case.kernel.name == "neg+cast+pad+relayout+few_channels+add+relu"
    assert len(case.kernel.launches) == 1


@pytest.mark.parametrize(
    "case",
    [
        convolved("fp32", last(F32, 1, 4, 5, 5), Conv((1, 1), (1,) * 4, (1, 1)), (3, 3), 16, F32),
        convolved("odd filters", last(F16, 1, 4, 5, 5), Conv((1, 1), (1,) * 4, (1, 1)), (3, 3), 24),
        convolved("many filters", last(F16, 1, 4, 5, 5), Conv((1, 1), (1,) * 4, (1, 1)), (3, 3), 144),
        convolved("a large window", last(F16, 1, 4, 12, 12), Conv((4, 4), (2,) * 4, (1, 1)), (11, 11), 64),
    ],
    ids=lambda case: case.name,
)
def test_others_are_left_alone(case: Case) -> None:
    assert case.kernel is None


@needs_compiler
@pytest.mark.parametrize("figures", [FIGURES, AMPERE], ids=["hopper", "ampere"])
@pytest.mark.parametrize(("across", "words"), [(36, True), (35, False)])
def test_pixels_of_three_are_read_by_words(
    rng: np.random.Generator, across: int, words: bool, figures: GpuFigures
) -> None:
    """If they are contiguous; an odd number of them would end within a word."""
    x = last(F16, 1, 3, 13, across)
    case = convolved("1 words", x, Conv((1, 2), (3, 2, 1, 3), (1, 1)), (6, 5), 32)
    case = replace(case, figures=figures)
    assert case.kernel is not None
    assert ("const u32* words" in case.kernel.launches[0].source) == words
    check([case], rng)


@needs_compiler
@pytest.mark.parametrize("image", [last(F16, 2, 4, 30, 40), rows(F16, 2, 4, 30, 40), rows(F32, 2, 3, 30, 40)], ids=str)
def test_a_result_is_rounded_to_integers(rng: np.random.Generator, image: TensorType) -> None:
    """As a quantised model's first convolution is: it stays in floats, and the next one multiplies integers."""
    case = convolved("1 stem", image, Conv((2, 2), (3,) * 4, (1, 1)), (7, 7), 64, epilogue="quantise")
    assert case.kernel is not None and [v.type.dtype for v in case.outputs] == [DType.I8]
    check([case], rng)


def grouped_cases() -> list[Case]:
    """Windows that are two pixels apart, which products of warpgroups share; filters in one to eight parts."""
    given = [
        ("1 stem", rows(F32, 1, 3, 37, 70), Conv((2, 2), (3,) * 4, (1, 1)), (7, 7), 64),
        ("1 words", last(F16, 2, 3, 20, 34), Conv((2, 2), (1,) * 4, (1, 1)), (3, 3), 32),
        ("3 packed", last(BF16, 1, 4, 19, 33), Conv((1, 2), (2, 1, 0, 3), (2, 1)), (2, 6), 48),
        ("1 many", rows(BF16, 1, 3, 18, 21), Conv((3, 2), (0, 2, 1, 1), (1, 1)), (4, 4), 128),
        ("2 parts", last(F32, 1, 3, 21, 29), Conv((2, 2), (2,) * 4, (1, 1)), (6, 5), 96),
    ]
    dtypes = [F16, F16, BF16, BF16, F16]
    return [convolved(*each, dtype) for each, dtype in zip(given, dtypes, strict=True)]


@needs_compiler
def test_products_of_warpgroups_share_windows(rng: np.random.Generator) -> None:
    cases = grouped_cases()
    assert all(case.kernel and case.kernel.launches[0].architecture == "sm_90a" for case in cases)
    check(cases, rng)


def pooled_cases(dtype: DType = F16, epilogue: str = "relu") -> list[Case]:
    """Windows of the pool cross the parts of a tile, its tiles and the ends of the image."""
    one, odd = Conv((1, 2), (1,) * 4, (1, 1)), Conv((1, 2), (1, 1, 2, 2), (2, 1))
    stem, shifted = Conv((2, 2), (3,) * 4, (1, 1)), replace(POOL, pads=(0, 1, 1, 0))
    given = [
        ("1 words", last(dtype, 1, 3, 40, 38), stem, (7, 7), True, POOL),
        ("1 stem", rows(F32, 2, 3, 70, 76), stem, (7, 7), True, POOL),
        ("1 thin", rows(dtype, 1, 4, 9, 40), one, (3, 3), True, POOL),
        ("3 odd", last(dtype, 1, 4, 31, 45), odd, (2, 4), False, shifted),
    ]
    fit = given[:3] if epilogue == "quantise" else given  # other sums would round to other integers
    return [convolved(name, x, op, size, 64, dtype, fixed, epilogue, pool) for name, x, op, size, fixed, pool in fit]


@needs_compiler
@pytest.mark.parametrize("epilogue", ["", "relu", "quantise"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda dtype: dtype.value)
def test_a_pool_follows(rng: np.random.Generator, epilogue: str, dtype: DType) -> None:
    check(pooled_cases(dtype, epilogue), rng)


@needs_compiler
def test_a_block_has_the_column_before_a_tile(rng: np.random.Generator) -> None:
    """Blocks begin within rows of tiles: the last column before them is computed again."""
    image, op = last(F16, 5, 3, 26, 224), Conv((2, 2), (3,) * 4, (1, 1))
    case = convolved("1 stem", image, op, (7, 7), 64, pool=POOL)
    case = replace(case, figures=replace(FIGURES, processors=1))
    assert case.kernel is not None
    tiles, each = (value for _, value in case.kernel.launches[0].numbers)
    assert tiles == 5 * 7 and each % 7
    check([case], rng)


@needs_compiler
@pytest.mark.parametrize("channels", [3, 4])
def test_nan_is_the_largest_of_its_windows_only(rng: np.random.Generator, channels: int) -> None:
    image, op = last(F16, 1, channels, 24, 24), Conv((2, 2), (3,) * 4, (1, 1))
    case = convolved("1 one", image, op, (7, 7), 64, epilogue="", pool=POOL)
    assert case.kernel is not None
    arrays = case.arrays(rng)
    x = next(v for v in arrays if v.literal is None)
    arrays[x][0, 2, 12, 10] = np.nan
    (got,) = Emulator([case.kernel]).run(case.kernel, arrays, case.outputs)
    (want,) = case.reference(arrays)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert 0 < np.isnan(got).sum() < got.size


@pytest.mark.parametrize(
    ("filters", "pool", "epilogue"),
    [
        (32, POOL, "relu"),
        (64, replace(POOL, window=(2, 2), pads=(0,) * 4), "relu"),
        (64, replace(POOL, strides=(1, 1)), "relu"),
        (64, POOL, "abs"),
        (64, POOL, "negative"),
    ],
    ids=["filters", "window", "strides", "decreases", "factor"],
)
def test_other_pools_are_left_alone(filters: int, pool: MaxPool, epilogue: str) -> None:
    stem = Conv((2, 2), (3,) * 4, (1, 1))
    case = convolved("stem", rows(F32, 1, 3, 32, 32), stem, (7, 7), filters, epilogue=epilogue, pool=pool)
    assert case.kernel is None
