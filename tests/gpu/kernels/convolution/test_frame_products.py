"""Test kernels of convolutions of videos with up to four channels against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, each_way, last, normal, rows
from gpu.kernels.convolution.test_few_channels import quantised, quarters
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.ir import DType, TensorType, channels_last
from fusec.ops import Cast, Conv, Relayout, pw

AMPERE = replace(FIGURES, sm=80)  # without products of warpgroups
F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
STEM = Conv((1, 2, 2), (1, 3, 3) * 2, (1, 1, 1))


def convolved(
    name: str,
    x: TensorType,
    op: Conv,
    window: tuple[int, int, int],
    filters: int,
    constant: bool = True,
    epilogue: str = "relu",
) -> Case:
    """A convolution of a video; before it a cast where the video is in f32, after it a bias and the epilogue."""
    dtype = x.dtype if x.dtype is not F32 else F16
    taps, nhwc = (filters, x.shape[1], *window), channels_last(5)
    array = np.random.default_rng(3).standard_normal(taps) / np.prod(taps[1:]) ** 0.5
    array = (np.rint(array * 64) / 64 if epilogue == "quantise" else array).astype(dtype.numpy)

    def make(g: Any, x: Any, *w: Any) -> Any:
        if x.type.dtype is F32:
            x = g.insert(Relayout(nhwc), [g.add(Cast(dtype), g.add(pw("neg"), x))]).result
        y = g.add(op, x, w[0] if w else g.constant(array))
        g.set_type(y, y.type.with_order(nhwc))
        bias = np.linspace(-1, 1, filters).reshape(1, -1, 1, 1, 1)
        if epilogue == "quantise":
            return quantised(g, y, g.constant(bias.astype(np.float32)))
        return g.add(pw(epilogue), g.add(pw("add"), y, g.constant(bias.astype(dtype.numpy)))) if epilogue else y

    draw = quarters if epilogue == "quantise" else normal
    return build(name, [x] if constant else [x, rows(dtype, *taps)], make, draw)


def frame_cases() -> list[Case]:
    """First convolutions of R3D, SlowFast, I3D, X3D and C3D, and sizes, strides and dilations that no model has."""
    flat = Conv((1, 2, 2), (0, 3, 3) * 2, (1, 1, 1))
    odd = Conv((2, 1, 2), (1, 0, 2, 0, 2, 1), (2, 2, 1))
    return [
        convolved("r3d", last(F16, 1, 3, 4, 20, 22), STEM, (3, 7, 7), 64),
        convolved("r3d rows", rows(F32, 1, 3, 3, 17, 19), STEM, (3, 7, 7), 32),
        convolved("slowfast", last(BF16, 2, 3, 2, 18, 34), flat, (1, 7, 7), 64),
        convolved("slowfast, five frames", last(F16, 1, 3, 4, 9, 16), replace(STEM, pads=(2, 3, 3) * 2), (5, 7, 7), 16),
        convolved("i3d", last(F16, 1, 3, 5, 11, 12), Conv((2, 2, 2), (3,) * 6, (1, 1, 1)), (7, 7, 7), 64),
        convolved("x3d", rows(F16, 1, 3, 3, 12, 13), replace(flat, pads=(0, 1, 1) * 2), (1, 3, 3), 48),
        convolved("c3d", last(F16, 1, 3, 4, 13, 17), Conv((1, 1, 1), (1,) * 6, (1, 1, 1)), (3, 3, 3), 64),
        convolved("four channels", last(F16, 2, 4, 5, 10, 11), STEM, (3, 4, 6), 128, False),
        convolved("others", last(BF16, 1, 3, 9, 12, 21), odd, (3, 2, 5), 96),
        convolved("quantised", last(F16, 1, 3, 4, 20, 22), STEM, (3, 7, 7), 64, epilogue="quantise"),
        convolved(
            "without ops", last(F16, 1, 3, 3, 9, 9), replace(STEM, dilations=(1, 2, 1)), (2, 3, 4), 64, epilogue=""
        ),
    ]


@needs_compiler
def test_convolutions_of_videos(rng: np.random.Generator) -> None:
    cases = frame_cases()
    assert all(case.kernel and case.kernel.launches[0].architecture == "sm_90a" for case in cases)
    check(cases, rng)


@needs_compiler
def test_blocks_share_many_filters(rng: np.random.Generator) -> None:
    """All of them leave shared memory for one warpgroup, and half of them for three."""
    case = convolved("five frames", last(F16, 1, 3, 3, 20, 18), replace(STEM, pads=(2, 3, 3) * 2), (5, 7, 7), 64)
    assert case.kernel is not None
    assert [way.launches[0].block // 128 for way in each_way(case.kernel)] == [3, 1]
    check([case, replace(case, figures=replace(FIGURES, processors=1))], rng, every=True)


@needs_compiler
def test_a_warpgroup_visits_several_parts(rng: np.random.Generator) -> None:
    """On a GPU of one multiprocessor there are more tiles than warpgroups, and frames of results in several parts."""
    case = convolved("r3d", last(F16, 2, 3, 7, 37, 18), STEM, (3, 7, 7), 16)
    made = [replace(case, figures=replace(FIGURES, processors=count)) for count in (1, 2)]
    assert all(case.kernel is not None for case in made)
    units = [[value for _, value in each.kernel.launches[0].numbers] for each in made if each.kernel]
    assert all(count > 4 * blocks for count, blocks in units)
    check(made, rng)


@needs_compiler
@pytest.mark.parametrize("op", [STEM, replace(STEM, strides=(1, 1, 1)), replace(STEM, pads=(1, 2, 2) * 2)], ids=str)
def test_an_infinity_spoils_only_what_it_is_in_the_window_of(rng: np.random.Generator, op: Conv) -> None:
    """Products have more taps than windows, and the ring has frames of other windows."""
    case = convolved("one", last(F16, 1, 3, 6, 18, 20), op, (3, 7, 7), 16, epilogue="")
    assert case.kernel is not None
    arrays = case.arrays(rng)
    x = next(v for v in arrays if v.literal is None)
    arrays[x][0, 2, 3, 9, 10] = np.inf
    arrays[x][0, 0, 0, 3, 4] = np.nan
    (got,) = Emulator([case.kernel]).run(case.kernel, arrays, case.outputs)
    (want,) = case.reference(arrays)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    assert np.isinf(got).any() and np.isfinite(got).any()


def test_a_video_is_made_ready_on_the_way() -> None:
    case = convolved("r3d", rows(F32, 8, 3, 16, 112, 112), STEM, (3, 7, 7), 64)
    assert case.kernel is not None and case.kernel.name == "neg+cast+relayout+few_channels+add+relu"
    assert len(case.kernel.launches) == 1


@pytest.mark.parametrize(
    "case",
    [
        convolved("five channels", last(F16, 1, 5, 4, 8, 8), STEM, (3, 7, 7), 64),
        convolved("odd filters", last(F16, 1, 3, 4, 8, 8), STEM, (3, 7, 7), 24),
        convolved("large strides", last(F16, 1, 3, 4, 8, 8), replace(STEM, strides=(2, 4, 4)), (3, 7, 7), 64),
        convolved("an odd number of pairs", last(F16, 1, 3, 4, 8, 8), STEM, (3, 5, 5), 64),
        convolved("many taps", last(F16, 1, 3, 8, 8, 8), replace(STEM, pads=(3,) * 6), (7, 7, 7), 128),
        replace(convolved("ampere", last(F16, 1, 3, 4, 8, 8), STEM, (3, 7, 7), 64), figures=AMPERE),
    ],
    ids=lambda case: case.name,
)
def test_others_are_left_alone(case: Case) -> None:
    assert case.kernel is None
