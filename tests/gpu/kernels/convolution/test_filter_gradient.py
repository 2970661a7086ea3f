"""Test kernels of the gradient of filters over four channels against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, last, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.ir import DType, TensorType
from fusec.ops import Cast, ConvWgrad, Slice, pw

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
STEM = ConvWgrad((7, 7), (2, 2), (3,) * 4, (1, 1))


def gradient(
    name: str,
    x: TensorType,
    op: ConvWgrad = STEM,
    filters: int = 64,
    sliced: bool = False,
    loss: TensorType | None = None,
) -> Case:
    """The gradient of filters; sliced to three channels, scaled and cast to fp32, as a training step updates them."""
    spatial = [
        (size + op.pads[d] + op.pads[d + 2] - (k - 1) * op.dilations[d] - 1) // op.strides[d] + 1
        for d, (size, k) in enumerate(zip(x.shape[2:], op.window, strict=True))
    ]

    def make(g: Any, x: Any, dy: Any) -> Any:
        y = g.add(op, x, dy)
        if not sliced:
            return y
        y = g.add(Slice((0,) * 4, (filters, 3, *op.window), (1,) * 4), y)
        return g.add(pw("mul"), g.add(Cast(F32), y), g.constant(np.float32(0.125)))

    case = build(name, [x, loss or last(x.dtype, x.shape[0], filters, *spatial)], make)
    return replace(case, within=4e-3 if x.dtype is BF16 else 5e-4)


def gradient_cases() -> list[Case]:
    """Windows and pads of both parities, rows of an odd number of octets, tiles without a second row, wide rows."""
    return [
        gradient("stem", last(F16, 3, 4, 31, 32)),
        gradient("stem of bf16", last(BF16, 2, 4, 22, 48), sliced=True),
        gradient("small", last(F16, 2, 4, 16, 16), ConvWgrad((3, 3), (2, 2), (1,) * 4, (1, 1)), 32, sliced=True),
        gradient("even", last(BF16, 1, 4, 20, 48), ConvWgrad((4, 6), (1, 2), (0, 2, 1, 2), (2, 1)), 48),
        gradient("no pads", last(F16, 1, 4, 9, 52), ConvWgrad((2, 5), (3, 2), (0,) * 4, (1, 1)), 16),
        gradient("wide", last(F16, 1, 4, 8, 256)),
    ]


@needs_compiler
@pytest.mark.parametrize("processors", [1, 3, 132])
def test_blocks_share_the_rows(rng: np.random.Generator, processors: int) -> None:
    cases = [replace(case, figures=replace(FIGURES, processors=processors)) for case in gradient_cases()]
    check(cases, rng)


@needs_compiler
@pytest.mark.parametrize("columns", [32, 48])
def test_an_infinity_spoils_only_the_taps_that_read_it(rng: np.random.Generator, columns: int) -> None:
    """Not the taps that fill up a pair, nor those of rows and pixels that fill up a tile."""
    case = gradient("one", last(F16, 1, 4, 10, columns))
    assert case.kernel is not None
    arrays = case.arrays(rng)
    image = case.graph.inputs[0]
    arrays[image][0, 2, -1, -1] = np.inf
    arrays[image][0, 1, 0, 0] = np.nan
    with np.errstate(invalid="ignore"):
        (got,), (want,) = Emulator([case.kernel]).run(case.kernel, arrays, case.outputs), case.reference(arrays)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert 0 < np.isfinite(want).sum() < want.size


def test_what_updates_the_filters_follows() -> None:
    case = gradient("one", last(F16, 64, 4, 224, 224), sliced=True)
    assert case.kernel is not None and case.kernel.name == "conv_wgrad+slice+cast+mul"
    assert case.kernel.launches[0].architecture == "sm_90a"


@pytest.mark.parametrize(
    "case",
    [
        gradient("fp32", last(F32, 1, 4, 16, 16)),
        gradient("rows", rows(F16, 1, 4, 16, 16)),
        gradient("loss in rows", last(F16, 1, 4, 16, 16), loss=rows(F16, 1, 64, 8, 8)),
        gradient("three channels", last(F16, 1, 3, 16, 16)),
        gradient("half an octet of columns", last(F16, 1, 4, 16, 24)),
        gradient("an odd number of columns", last(F16, 1, 4, 16, 15)),
        gradient("24 filters", last(F16, 1, 4, 16, 16), filters=24),
        gradient("many filters", last(F16, 1, 4, 16, 16), filters=128),
        gradient("windows one apart", last(F16, 1, 4, 16, 16), replace(STEM, strides=(2, 1))),
        gradient("taps two apart", last(F16, 1, 4, 32, 36), replace(STEM, dilations=(1, 2), pads=(0,) * 4)),
        gradient("a large window", last(F16, 1, 4, 16, 16), ConvWgrad((9, 9), (2, 2), (4,) * 4, (1, 1))),
        gradient("rows too long", last(F16, 1, 4, 8, 272)),
        replace(gradient("another GPU", last(F16, 1, 4, 16, 16)), figures=replace(FIGURES, sm=80)),
    ],
    ids=lambda case: case.name,
)
def test_others_are_left_alone(case: Case) -> None:
    assert case.kernel is None
