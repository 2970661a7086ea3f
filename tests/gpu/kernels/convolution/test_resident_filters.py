"""Test kernels of convolutions whose filters stay in shared memory against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, last, normal
from gpu.kernels.emulator import needs_compiler
from gpu.kernels.product.test_thin_product import bytes_drawn, constant, rounded, scalar

from fusec.gpu.kernels.convolution.resident_filters import resident_filters
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Cast, Conv, ConvTranspose, pw

F16, BF16, F32, I8 = DType.F16, DType.BF16, DType.F32, DType.I8
SAME = Conv((1, 1), (1, 1, 1, 1), (1, 1))
GRADIENT = ConvTranspose((1, 1), (1, 1, 1, 1), (1, 1), (0, 0))
FEW = replace(FIGURES, processors=3)  # a few blocks with several steps each, of a small image


def convolution(dtype: DType, image: tuple[int, int, int, int], filters: int, residual: bool = False) -> Case:
    """With bias, perhaps a residual, and relu."""
    n, k, height, width = image

    def make(g: Graph, x: Value, *more: Value) -> Value:
        y = g.add(pw("add"), g.add(SAME, x, constant(g, dtype, filters, k, 3, 3)), constant(g, dtype, filters, 1, 1))
        return g.add(pw("relu"), g.add(pw("add"), y, more[0]) if residual else y)

    types = [last(dtype, *image)] + [last(dtype, n, filters, height, width)] * residual
    return replace(build(f"{dtype.value} 3x3 {image} {filters} {residual}", types, make, normal), figures=FEW)


def quantised(image: tuple[int, int, int, int], filters: int, residual: bool = False) -> Case:
    """With a scale and a bias of each filter, perhaps a residual of bytes, and relu; rounded to bytes."""
    n, k, height, width = image
    rng = np.random.default_rng(filters)

    def make(g: Graph, x: Value, *more: Value) -> Value:
        w = g.constant(bytes_drawn(rng, TensorType((filters, k, 3, 3), I8)))
        scale = g.constant(rng.uniform(0.5, 2.0, (filters, 1, 1)).astype(np.float32) / (200 * k**0.5))
        y = g.add(pw("mul"), g.add(Cast(F32), g.add(SAME, x, w)), scale)
        y = g.add(pw("add"), y, constant(g, F32, filters, 1, 1))
        if residual:
            y = g.add(pw("add"), y, g.add(pw("mul"), g.add(Cast(F32), more[0]), scalar(g, 0.37)))
        return rounded(g, g.add(pw("relu"), y))

    types = [last(I8, *image)] + [last(I8, n, filters, height, width)] * residual
    made = build(f"i8 3x3 {image} {filters} {residual}", types, make, bytes_drawn, exact=True)
    return replace(made, figures=FEW, fused=True)


def trained(op: Conv | ConvTranspose, image: tuple[int, int, int, int], filters: int) -> Case:
    """The filters are no constant: those of a training step, and of the gradient of its image."""
    counts = (filters, image[1]) if isinstance(op, Conv) else (image[1], filters)
    types = [last(F16, *image), last(F16, *counts, 3, 3)]
    made = build(f"{op.name} with given filters {image} {filters}", types, lambda g, x, w: g.add(op, x, w), normal)
    return replace(made, figures=FEW)


def resident_cases() -> list[Case]:
    return [
        trained(SAME, (2, 64, 20, 19), 64),
        trained(GRADIENT, (3, 64, 17, 12), 128),
        trained(GRADIENT, (1, 32, 18, 20), 64),
        convolution(F16, (5, 64, 20, 19), 64),
        convolution(BF16, (3, 48, 23, 17), 128, residual=True),
        convolution(F16, (2, 32, 13, 11), 96, residual=True),
        convolution(F16, (2, 128, 9, 56), 32),
        convolution(F16, (3, 24, 19, 20), 24),
        convolution(F16, (2, 40, 14, 15), 72, residual=True),
        convolution(BF16, (3, 72, 14, 14), 40),
        convolution(F16, (1, 8, 17, 20), 104, residual=True),
        convolution(BF16, (5, 160, 14, 14), 32, residual=True),
        quantised((1, 32, 16, 20), 64),
        quantised((2, 32, 10, 13), 32, residual=True),
        quantised((10, 128, 15, 14), 128, residual=True),
    ]


@needs_compiler
def test_all_variants_compute_the_same(rng: np.random.Generator) -> None:
    check(resident_cases(), rng, every=True)


def convolved(op: Conv, filters: int = 64, channels: int = 64, relu_before: bool = False) -> Case:
    """A convolution by itself, or with a relu before it."""

    def make(g: Graph, x: Value) -> Value:
        x = g.add(pw("relu"), x) if relu_before else x
        return g.add(op, x, constant(g, F16, filters, channels, 3, 3))

    return build("convolution", [last(F16, 2, channels, 60, 60)], make)


@pytest.mark.parametrize(
    "case",
    [
        convolved(Conv((2, 2), (1,) * 4, (1, 1))),
        convolved(Conv((1, 1), (0,) * 4, (1, 1))),
        convolved(Conv((1, 1), (1,) * 4, (2, 2))),
        convolved(SAME, filters=84),
        convolved(SAME, channels=68),
        convolved(SAME, channels=512),
        convolved(SAME, relu_before=True),
    ],
    ids=["strides", "no pads", "dilation", "filters", "channels", "too many channels", "prologue"],
)
def test_other_convolutions_have_no_kernel(case: Case) -> None:
    assert resident_filters(case.nodes, case.outputs, FIGURES) is None


@pytest.mark.parametrize(("width", "has_kernel"), [(72, True), (68, False)])
def test_what_is_stored_in_a_larger_tensor_has_aligned_rows(width: int, has_kernel: bool) -> None:
    case = convolved(SAME)
    y = case.nodes[0].result
    case.graph.set_type(y, replace(y.type, within=(2, width, 60, 60)))
    assert (resident_filters(case.nodes, case.outputs, FIGURES) is not None) == has_kernel


def test_filters_that_a_launch_writes_are_read_after_the_wait_for_it() -> None:
    for case in (convolved(SAME), trained(SAME, (2, 64, 20, 19), 64), trained(GRADIENT, (2, 64, 20, 19), 64)):
        kernel = resident_filters(case.nodes, case.outputs, FIGURES)
        assert kernel is not None
        (launch,) = kernel.launches
        before, _, after = launch.source.partition("wait_for_launches();")
        loads = "(filters + swizzled"
        assert launch.dependent and loads in (before if len(case.graph.inputs) == 1 else after)
        assert (loads in before) == (len(case.graph.inputs) == 1)


def test_given_filters_are_channels_last_and_gradients_of_one_pixel_apart() -> None:
    x, filters = last(F16, 2, 64, 20, 19), TensorType((64, 64, 3, 3), F16)
    far = ConvTranspose((2, 2), (1, 1, 1, 1), (1, 1), (1, 1))
    for op, w in ((SAME, filters), (GRADIENT, filters), (far, last(F16, 64, 64, 3, 3))):
        case = build("none", [x, w], lambda g, x, w, op=op: g.add(op, x, w))
        assert resident_filters(case.nodes, case.outputs, FIGURES) is None, op


def test_the_kernel_is_for_hopper() -> None:
    case = convolved(SAME)
    assert resident_filters(case.nodes, case.outputs, FIGURES) is not None
    assert resident_filters(case.nodes, case.outputs, replace(FIGURES, sm=80)) is None
    assert resident_filters(case.nodes, case.outputs, replace(FIGURES, sm=100)) is None
