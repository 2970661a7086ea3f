"""Test kernels of grouped convolutions of images against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, assert_same, build, check, last, normal
from gpu.kernels.emulator import Emulator, needs_compiler
from gpu.kernels.product.test_thin_product import constant

from fusec.gpu.kernels.convolution.grouped_conv2d import grouped_conv2d
from fusec.ir import DType, Graph, Value
from fusec.ops import Conv, pw

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
Image = tuple[int, int, int, int]


def same(groups: int, pads: tuple[int, int, int, int] = (1, 1, 1, 1)) -> Conv:
    return Conv((1, 1), pads, (1, 1), groups)


def convolution(op: Conv, image: Image, window: tuple[int, int] = (3, 3), dtype: DType = F16) -> Case:
    """With bias and relu."""

    def make(g: Graph, x: Value) -> Value:
        w = constant(g, dtype, image[1], image[1] // op.groups, *window)
        return g.add(pw("relu"), g.add(pw("add"), g.add(op, x, w), constant(g, dtype, image[1], 1, 1)))

    return build(f"{dtype.value} {op.groups} groups {image} {window}", [last(dtype, *image)], make, normal)


def grouped_cases() -> list[Case]:
    return [
        convolution(same(16), (2, 64, 9, 20)),
        convolution(same(4), (1, 32, 17, 7), dtype=BF16),
        convolution(same(6), (2, 96, 7, 7)),
        convolution(same(2), (1, 64, 12, 9)),
        convolution(same(2, (2, 1, 0, 1)), (1, 96, 10, 8), (3, 2)),
        convolution(same(5), (2, 80, 9, 9)),
        convolution(same(3), (1, 72, 9, 9)),
        convolution(same(4), (1, 64, 9, 10), (2, 5)),
    ]


def cases_of_many_steps() -> list[Case]:
    """On a GPU with one multiprocessor, whose blocks visit several tiles."""
    small = replace(FIGURES, processors=1)
    cases = [convolution(same(16), (5, 64, 9, 20)), convolution(same(2), (3, 128, 15, 10))]
    return [replace(case, figures=small) for case in cases]


@needs_compiler
def test_kernels_compute_the_same(rng: np.random.Generator) -> None:
    check(grouped_cases(), rng)


@needs_compiler
def test_a_block_visits_several_tiles(rng: np.random.Generator) -> None:
    cases = cases_of_many_steps()
    for case in cases:
        kernel = case.kernel
        assert kernel is not None
        tiles = max(number for _, number in kernel.launches[0].numbers)
        assert kernel.launches[0].grid < tiles
    check(cases, rng)


@pytest.mark.parametrize(
    "case",
    [
        convolution(same(1), (1, 64, 9, 9)),
        convolution(same(32), (1, 64, 9, 9)),
        convolution(same(2), (1, 80, 9, 9)),
        convolution(same(2), (1, 256, 9, 9)),
        convolution(same(4), (1, 64, 9, 9), dtype=F32),
        convolution(replace(same(4), strides=(2, 2)), (1, 64, 9, 9)),
        convolution(replace(same(4), dilations=(2, 2)), (1, 64, 9, 9)),
        convolution(same(4, (0, 0, 0, 0)), (1, 64, 9, 9), (1, 1)),
    ],
    ids=["one group", "two channels", "channels", "many channels", "fp32", "strides", "dilations", "one tap"],
)
def test_other_convolutions_have_no_kernel(case: Case) -> None:
    assert grouped_conv2d(case.nodes, case.outputs, FIGURES) is None


@needs_compiler
@pytest.mark.parametrize("groups", [8, 4, 2])
def test_an_infinity_stays_in_its_group(rng: np.random.Generator, groups: int) -> None:
    """Products bundle groups of 4 and 8 channels, and zero times infinity would be NaN."""
    case = convolution(same(groups), (1, 32, 9, 10))
    assert case.kernel is not None
    arrays = case.arrays(rng)
    x = next(v for v in arrays if v.literal is None)
    arrays[x][0, 2, 4, 7] = np.inf
    arrays[x][0, 30, 0, 1] = np.nan
    (got,) = Emulator([case.kernel]).run(case.kernel, arrays, case.outputs)
    (want,) = case.reference(arrays)
    assert_same(case, [got], [want])
    assert np.isfinite(got[:, 32 // groups : -32 // groups]).all() and not np.isfinite(got).all()


def test_the_kernel_is_for_hopper() -> None:
    case = grouped_cases()[0]
    assert grouped_conv2d(case.nodes, case.outputs, FIGURES) is not None
    assert grouped_conv2d(case.nodes, case.outputs, replace(FIGURES, sm=80)) is None
