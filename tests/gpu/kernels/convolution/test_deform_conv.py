"""Test kernels of deformable convolutions against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import Case, build, check, each_way, last, rows
from gpu.kernels.emulator import needs_compiler

from fusec.gpu.kernels import GpuFigures
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import DeformConv, Relayout, pw
from fusec.ops.convolution import windows_along
from fusec.targets.target import load, names

F64, F32, F16, BF16 = DType.F64, DType.F32, DType.F16, DType.BF16
ROUNDING = {F64: 1e-12, F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}


def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Offsets are so large that some elements are outside of the image, and others between its pixels."""
    return (rng.standard_normal(type.shape) * rng.choice([0.3, 1.5])).astype(type.dtype.numpy)


def deformed(
    op: DeformConv,
    x: TensorType,
    weight: tuple[int, int, int, int],
    masked: bool = True,
    constant: bool = True,
    kind: Any = rows,
    epilogue: bool = False,
) -> Case:
    """A deformable convolution, perhaps with a bias, relu and another memory order after it."""
    out = windows_along(x.shape[2:], weight[2:], op.strides, op.pads, op.dilations)
    moved = op.offset_groups * weight[2] * weight[3]
    offset, mask = kind(x.dtype, x.shape[0], 2 * moved, *out), kind(x.dtype, x.shape[0], moved, *out)
    rng = np.random.default_rng(5)
    array = (rng.standard_normal(weight) / np.prod(weight[1:]) ** 0.5).astype(x.dtype.numpy)

    def make(g: Graph, x: Value, offset: Value, *rest: Value) -> Value:
        w = g.constant(array) if constant else rest[-1]
        y = g.add(op, x, w, offset, *rest[:masked])
        if not epilogue:
            return y
        bias = g.constant(np.linspace(-1, 1, weight[0]).astype(x.type.dtype.numpy).reshape(1, -1, 1, 1))
        y = g.add(pw("relu"), g.add(pw("add"), y, bias))
        order = (0, 2, 3, 1) if not y.type.order else (0, 1, 2, 3)
        return g.insert(Relayout(order), [y]).result

    types = [x, offset, *([mask] if masked else []), *([] if constant else [rows(x.dtype, *weight)])]
    case = build(f"{op} {x} {weight} {masked} {constant} {epilogue}", types, make, draw)
    return replace(case, within=ROUNDING[x.dtype])


def random_case(rng: np.random.Generator, number: int) -> Case:
    groups, offset_groups = (int(rng.choice([1, 1, 2, 3])) for _ in range(2))
    dtype = (F32, F16, BF16, F64)[number % 4]
    channels = int(np.lcm(groups, offset_groups)) * int(rng.choice([1, 3, 4, 8, 16]))
    filters = groups * int(rng.choice([1, 3, 8, 16, 24, 70]))
    pair = [tuple(map(int, rng.integers(1, high, 2))) for high in (4, 3, 3)]
    (high, wide), strides, dilations = pair
    op = DeformConv(strides, tuple(map(int, rng.integers(0, 3, 4))), dilations, groups, offset_groups)
    kind = last if rng.integers(2) else rows
    image = kind(dtype, int(rng.integers(1, 3)), channels, *map(int, rng.integers(5, 9, 2)))
    masked, constant, epilogue = (bool(rng.integers(3)) for _ in range(3))
    shape = (filters, channels // groups, high, wide)
    return deformed(op, image, shape, masked, constant, last if rng.integers(2) else rows, epilogue)


def deform_cases() -> list[Case]:
    """Random ones, and some whose tiles have remainders along pixels, filters and the depth."""
    fixed, plain = np.random.default_rng(8), DeformConv((1, 1), (1,) * 4, (1, 1))
    return [
        *(random_case(fixed, i) for i in range(28)),
        deformed(plain, last(F16, 1, 32, 9, 10), (144, 32, 3, 3), epilogue=True),
        deformed(plain, last(BF16, 2, 16, 7, 5), (48, 16, 3, 3)),
        deformed(plain, last(F32, 1, 20, 9, 8), (132, 20, 3, 3)),
        deformed(replace(plain, groups=2), rows(F16, 1, 64, 6, 6), (24, 32, 3, 3)),
        deformed(DeformConv((1, 1), (0,) * 4, (1, 1)), rows(F16, 1, 40, 6, 6), (280, 40, 1, 1)),
    ]


@needs_compiler
def test_all_tilings_compute_the_same(rng: np.random.Generator) -> None:
    check(deform_cases(), rng, every=True)


@needs_compiler
def test_places_that_are_no_numbers(rng: np.random.Generator) -> None:
    """An offset that is infinite or NaN makes the results of its window NaN, and no others."""

    def odd(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        array = draw(rng, type)
        values = np.array([np.nan, np.inf, -np.inf]).astype(type.dtype.numpy)
        return np.where(rng.random(type.shape) < 0.01, rng.choice(values, type.shape), array).astype(type.dtype.numpy)

    op = DeformConv((1, 1), (1,) * 4, (1, 1), 2, 2)
    cases = [deformed(op, kind(dtype, 2, 8, 9, 7), (6, 4, 3, 3)) for kind in (rows, last) for dtype in (F32, F16, BF16)]
    check([replace(case, draw=odd) for case in cases], rng)


def test_a_block_has_all_filters_where_pixels_fill_the_gpu() -> None:
    op = DeformConv((1, 1), (1,) * 4, (1, 1))
    many = deformed(op, last(F16, 8, 64, 128, 128), (256, 64, 3, 3)).kernel
    few = deformed(op, last(F16, 1, 64, 16, 16), (256, 64, 3, 3)).kernel
    assert many is not None and many.launches[0].grid == 8 * 128 * 128 // 64
    assert few is not None and few.launches[0].grid > 16 * 16 // 32, "filters are shared among blocks"


@pytest.mark.parametrize("target", names())
def test_every_target_has_a_kernel(target: str) -> None:
    figures = GpuFigures.of(load(target))
    for case in deform_cases():
        kernel = replace(case, figures=figures).kernel
        assert kernel is not None and case.kernel is not None
        assert all(len(way.launches) == 1 for way in each_way(kernel))


def test_no_results_are_no_launch() -> None:
    case = deformed(DeformConv((1, 1), (0,) * 4, (1, 1)), rows(F32, 0, 4, 5, 5), (2, 4, 3, 3))
    assert case.kernel is not None and not case.kernel.launches
