"""Test kernels of convolutions over few pixels against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, last, normal, rows
from gpu.kernels.emulator import needs_compiler

from fusec.errors import VerifyError
from fusec.gpu.kernels.convolution import split_k
from fusec.gpu.kernels.convolution.split_k_source import SplitKSource
from fusec.gpu.kernels.convolution.split_k_tiling import SplitKTiling
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Conv, Relayout, pw

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
ONE, SAME = Conv((1, 1), (0,) * 4, (1, 1)), Conv((1, 1), (1,) * 4, (1, 1))
TWO, SKIPPED = Conv((2, 2), (1,) * 4, (1, 1)), Conv((2, 2), (0,) * 4, (1, 1))


def convolved(
    name: str, x: TensorType, op: Conv, window: tuple[int, int], filters: int, residual: bool = False
) -> Case:
    """With bias and relu, perhaps with a residual between them: larger than what the reference rounds before it."""
    dtype, taps = x.dtype, (filters, x.shape[1] // op.groups, *window)
    rng = np.random.default_rng(3)
    array = (rng.standard_normal(taps) / np.prod(taps[1:]) ** 0.5 / 4).astype(dtype.numpy)
    bias = np.linspace(-0.2, 0.2, filters).astype(dtype.numpy).reshape(-1, 1, 1)

    def make(g: Graph, x: Value, *more: Value) -> Value:
        y = g.add(pw("add"), g.add(op, x, g.constant(array)), g.constant(bias))
        return g.add(pw("relu"), g.add(pw("add"), y, more[0]) if more else y)

    y = op.infer(x, TensorType(taps, dtype))[0]
    return build(name, [x, y] if residual else [x], make)


def pair(rng: np.random.Generator, high: int) -> tuple[int, int]:
    return int(rng.integers(1, high)), int(rng.integers(1, high))


def random_case(rng: np.random.Generator, number: int) -> Case:
    while True:
        window, strides, dilations = (pair(rng, high) for high in (6, 4, 3))
        pads, filters = tuple(map(int, rng.integers(0, 4, 4))), int(rng.choice([16, 32, 48, 80]))
        shape = (int(rng.integers(1, 4)), int(rng.choice([32, 64, 96, 160])), *map(int, rng.integers(1, (12, 15))))
        dtype = rng.choice(np.array([F16, BF16], dtype=object))
        op = Conv(strides, pads, dilations)
        name = f"{number} {op} {window} {filters} {dtype.value} {shape}"
        try:
            case = convolved(name, last(dtype, *shape), op, window, filters, bool(rng.integers(2)))
        except VerifyError:
            continue
        if case.kernel is not None:  # else there are too many taps to write out
            return case


def few_cases() -> list[Case]:
    fixed = np.random.default_rng(5)
    return [
        convolved("a tile in parts", last(F16, 1, 256, 7, 7), SAME, (3, 3), 32),
        convolved("more filters than whole tiles", last(F16, 1, 256, 5, 6), SAME, (3, 3), 48, residual=True),
        convolved("three parts", last(BF16, 1, 96, 9, 11), TWO, (3, 3), 64),
        convolved("places of two images", last(F16, 2, 256, 5, 7), ONE, (1, 1), 32, residual=True),
        convolved("pixels skipped", last(F16, 2, 128, 9, 7), SKIPPED, (1, 1), 48),
        convolved("one pixel", last(F16, 1, 64, 1, 1), ONE, (1, 1), 16),
        convolved("more than a tile", last(F16, 1, 64, 13, 17), SAME, (3, 3), 64),
        *(random_case(fixed, i) for i in range(8)),
    ]


@needs_compiler
def test_all_ways_give_the_same(rng: np.random.Generator) -> None:
    check(few_cases(), rng, every=True)


@needs_compiler
@pytest.mark.parametrize(
    "tiling",
    [
        SplitKTiling(5, 8, 32, 2, 2, 2, True),
        SplitKTiling(2, 16, 16, 4, 3, 1, True),
        SplitKTiling(3, 24, 64, 1, 8, 2, False),
        SplitKTiling(3, 8, 64, 4, 1, 4, False),
    ],
    ids=str,
)
def test_work_shared_out_otherwise_is_the_same_work(
    tiling: SplitKTiling, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tiles, of which the last ones hang over, and more or fewer warps for channels and filters."""
    monkeypatch.setattr(split_k, "variants", lambda conv, figures: [tiling])
    check([convolved(str(tiling), last(F16, 2, 128, 7, 10), SAME, (3, 3), 48, residual=True)], rng)


@needs_compiler
def test_what_lies_beyond_the_image_is_zero_whatever_lies_within(rng: np.random.Generator) -> None:
    """NaN and infinity reach the results whose taps they are under, and no others."""

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        array = normal(rng, type)
        array[0, 3, 0, 0], array[0, 70, 5, 8], array[0, 127, 8, 2] = np.nan, np.inf, -np.inf
        return array

    case = convolved("odd numbers", last(F16, 1, 128, 9, 9), SAME, (3, 3), 32)
    check([replace(case, draw=draw)], rng, every=True)


@needs_compiler
def test_results_are_stored_on_the_way_and_in_another_order(rng: np.random.Generator) -> None:
    array = (rng.standard_normal((32, 64, 3, 3)) / 24).astype(np.float16)

    def make(g: Graph, x: Value) -> list[Value]:
        y = g.add(SAME, x, g.constant(array))
        return [y, g.insert(Relayout((0, 1, 2, 3)), [g.add(pw("tanh"), y)]).result]

    check([build("twice", [last(F16, 2, 64, 5, 7)], make)], rng, every=True)


@pytest.mark.parametrize(
    ("shape", "op", "window", "filters"),
    [
        ((64, 56, 56), SAME, 3, 64),
        ((128, 28, 28), SAME, 3, 128),
        ((256, 28, 28), TWO, 3, 256),
        ((256, 14, 14), SAME, 3, 256),
        ((512, 7, 7), SAME, 3, 512),
        ((1024, 14, 14), ONE, 1, 256),
        ((512, 7, 7), ONE, 1, 2048),
    ],
)
def test_there_is_a_block_for_most_processors(shape: tuple[int, int, int], op: Conv, window: int, filters: int) -> None:
    case = convolved("of resnet50", last(F16, 1, *shape), op, (window, window), filters)
    processors = FIGURES.processors
    assert case.kernel is not None and case.kernel.name == "few_pixels+add+relu"
    for way in (case.kernel, *case.kernel.others):
        (launch,) = way.launches
        assert 0.7 * processors <= launch.grid <= 3 * processors and launch.grid % launch.cluster == 0
    assert not case.kernel.launches[0].architecture, "any GPU can run the first one"


def test_what_is_read_one_by_one_is_not_read_early() -> None:
    """The compiler may ask for it before the launches in front have written it."""
    image = last(F16, 1, 64, 6, 8)
    array = np.ones((32, 64, 1, 1), np.float16)
    for gate, dependent in (
        (last(F16, 1, 32, 6, 8), True),
        (last(F16, 1, 1, 6, 8), False),
        (rows(F16, 1, 32, 6, 8), False),
    ):
        case = build("gated", [image, gate], lambda g, x, z: g.add(pw("mul"), g.add(ONE, x, g.constant(array)), z))
        assert case.kernel is not None
        (launch,) = case.kernel.launches
        assert launch.dependent is dependent
        wait, copies = (launch.source.index(word) for word in ("wait_for_launches", "copy_or_zeros_ahead"))
        assert launch.source.index("load(i, i)") < wait < copies < launch.source.index("next_may_begin")


def test_thin_products_are_among_the_ways() -> None:
    """If memory bounds a convolution of one place, they may be faster."""
    case = convolved("thin", last(F16, 1, 64, 28, 28), ONE, (1, 1), 64, residual=True)
    assert case.kernel is not None
    names = [way.launches[0].entry.rpartition("_")[0] for way in (case.kernel, *case.kernel.others)]
    assert names[0] == "few_pixels" and names[-1] == "thin_product"


def test_neighbours_are_in_different_banks() -> None:
    """Of two results side by side, whose pixels eight threads read 64 bytes of each."""
    for stride in (1, 2, 3, 4):
        op = Conv((stride, stride), (1,) * 4, (1, 1))
        conv = convolved("banks", last(F16, 1, 64, 28, 28), op, (3, 3), 32).nodes[0]
        for splits in (1, 2):
            pitch = SplitKSource(conv, [], [conv.result], SplitKTiling(4, 8, 32, splits, 4, 1, False)).pitch
            assert pitch % 16 == 0 and pitch * stride % 128 == 64


@pytest.mark.parametrize(
    "case",
    [
        convolved("fp32", last(F32, 1, 64, 5, 5), SAME, (3, 3), 32),
        convolved("odd channels", last(F16, 1, 48, 5, 5), SAME, (3, 3), 32),
        convolved("odd filters", last(F16, 1, 64, 5, 5), SAME, (3, 3), 24),
        convolved("groups", last(F16, 1, 64, 5, 5), Conv((1, 1), (1,) * 4, (1, 1), 2), (3, 3), 32),
        convolved("channels first", rows(F16, 1, 64, 5, 5), SAME, (3, 3), 32),
        convolved("many pixels", last(F16, 1, 192, 65, 65), SAME, (3, 3), 32),
        convolved("many taps", last(F16, 1, 32, 32, 32), Conv((1, 1), (5,) * 4, (1, 1)), (11, 11), 256),
        build(
            "weights that are no constant",
            [last(F16, 1, 64, 5, 5), last(F16, 32, 64, 3, 3)],
            lambda g, x, w: g.add(SAME, x, w),
        ),
    ],
    ids=lambda case: case.name,
)
def test_others_are_left_alone(case: Case) -> None:
    assert case.kernel is None
