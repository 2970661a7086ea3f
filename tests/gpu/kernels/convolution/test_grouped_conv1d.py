"""Test kernels of grouped convolutions along one dim against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, last, normal
from gpu.kernels.emulator import needs_compiler
from gpu.kernels.product.test_thin_product import constant

from fusec.gpu.kernels.convolution.grouped_conv1d import grouped_conv1d
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Conv, pw

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32


def convolution(op: Conv, image: tuple[int, int, int], filters: int, taps: int, dtype: DType = F16) -> Case:
    """With bias and gelu."""

    def make(g: Graph, x: Value) -> Value:
        w = constant(g, dtype, filters, image[1] // op.groups, taps)
        return g.add(pw("gelu"), g.add(pw("add"), g.add(op, x, w), constant(g, dtype, filters, 1)))

    return build(f"{dtype.value} {op.groups} groups {image} {filters} {taps}", [last(dtype, *image)], make, normal)


def along(taps: int, groups: int, dilation: int = 1) -> Conv:
    reach = (taps - 1) * dilation
    return Conv((1,), (reach // 2, reach - reach // 2), (dilation,), groups)


def grouped_cases() -> list[Case]:
    return [
        convolution(along(16, 4), (2, 192, 70), 192, 16),
        convolution(along(9, 2, dilation=3), (1, 64, 140), 128, 9, BF16),
        convolution(along(13, 3), (1, 48, 61), 24, 13),
        convolution(Conv((1,), (20, 0), (1,), 2), (2, 32, 30), 32, 32),
    ]


@needs_compiler
def test_all_variants_compute_the_same(rng: np.random.Generator) -> None:
    check(grouped_cases(), rng, every=True)


@pytest.mark.parametrize(
    "case",
    [
        convolution(along(16, 1), (1, 64, 70), 64, 16),
        convolution(along(4, 4), (1, 64, 70), 64, 4),
        convolution(along(16, 8), (1, 64, 70), 64, 16),
        convolution(along(16, 16), (1, 256, 70), 64, 16),
        convolution(along(16, 4), (1, 64, 70), 64, 16, F32),
        convolution(replace(along(16, 4), strides=(2,)), (1, 64, 70), 64, 16),
    ],
    ids=["one group", "few taps", "channels", "filters", "fp32", "strides"],
)
def test_other_convolutions_have_no_kernel(case: Case) -> None:
    assert grouped_conv1d(case.nodes, case.outputs, FIGURES) is None


def test_images_are_channels_last() -> None:
    w = np.ones((64, 16, 16), np.float16)
    made = build("rows", [TensorType((1, 64, 72), F16)], lambda g, x: g.add(along(16, 4), x, g.constant(w)))
    assert grouped_conv1d(made.nodes, made.outputs, FIGURES) is None


def test_the_kernel_is_for_hopper() -> None:
    case = grouped_cases()[0]
    assert grouped_conv1d(case.nodes, case.outputs, FIGURES) is not None
    assert grouped_conv1d(case.nodes, case.outputs, replace(FIGURES, sm=80)) is None
