"""Test kernels of products of many rows with few weights against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, last, normal, rows
from gpu.kernels.emulator import needs_compiler

from fusec.gpu.autotune.fusion.fusion_proposals import is_joint_work, may_begin
from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.gpu.kernels.product import product_step
from fusec.gpu.kernels.product.thin_product import thin_product
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Cast, Conv, MatMul, pw

F16, BF16, F32, I8 = DType.F16, DType.BF16, DType.F32, DType.I8
ONE = Conv((1, 1), (0, 0, 0, 0), (1, 1))


def constant(g: Graph, dtype: DType, *shape: int) -> Value:
    rng = np.random.default_rng(sum(shape))
    spread = np.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 1.0
    return g.constant((rng.standard_normal(shape) * spread).astype(dtype.numpy))


def convolution(
    dtype: DType, image: tuple[int, int, int, int], filters: int, gated: bool = False, residual: bool = False
) -> Case:
    """With bias; by a gate's factors in front, with a residual after or a swish."""
    n, k, height, width = image

    def make(g: Graph, x: Value, *more: Value) -> Value:
        others = list(more)
        if gated:
            x = g.add(pw("mul"), x, others.pop(0))
        y = g.add(pw("add"), g.add(ONE, x, constant(g, dtype, filters, k, 1, 1)), constant(g, dtype, filters, 1, 1))
        return g.add(pw("add"), y, others.pop(0)) if residual else g.add(pw("swish", beta=1.0), y)

    types = (
        [last(dtype, *image)] + [last(dtype, n, k, 1, 1)] * gated + [last(dtype, n, filters, height, width)] * residual
    )
    return build(f"{dtype.value} {image} {filters} {gated} {residual}", types, make)


def matrix(n: int, k: int, columns: int) -> Case:
    """Rows of two dims; the operand of the last op is stored, too."""

    def make(g: Graph, x: Value) -> list[Value]:
        y = g.add(MatMul(), g.add(pw("relu"), x), constant(g, F16, k, columns))
        y = g.add(pw("add"), y, constant(g, F16, columns))
        return [y, g.add(pw("gelu"), y)]

    return build(f"matrix {n} {k} {columns}", [rows(F16, 2, n, k)], make)


def bytes_drawn(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """All bytes occur, the ends of their range often."""
    return np.clip(rng.integers(-160, 160, type.shape), -128, 127).astype(type.dtype.numpy)


def scalar(g: Graph, number: float) -> Value:
    return g.constant(np.float32(number))


def rounded(g: Graph, y: Value) -> Value:
    return g.add(Cast(I8), g.add(pw("clip", min=-128.0, max=127.0), g.add(pw("round"), y)))


def strided(dtype: DType, image: tuple[int, int, int, int], filters: int, strides: tuple[int, int]) -> Case:
    """With relu before and after the convolution, or of integers, which are rounded."""
    k = image[1]
    conv = Conv(strides, (0, 0, 0, 0), (1, 1))

    def make(g: Graph, x: Value) -> Value:
        if dtype is I8:
            w = bytes_drawn(np.random.default_rng(filters), TensorType((filters, k, 1, 1), I8))
            return rounded(g, g.add(pw("mul"), g.add(Cast(F32), g.add(conv, x, g.constant(w))), scalar(g, 1e-3)))
        y = g.add(conv, g.add(pw("relu"), x), constant(g, dtype, filters, k, 1, 1))
        return g.add(pw("relu"), y)

    draw = bytes_drawn if dtype is I8 else normal
    return build(f"{dtype.value} {image} {filters} {strides}", [last(dtype, *image)], make, draw, exact=dtype is I8)


def quantised(image: tuple[int, int, int, int], filters: int, residual: bool = False, wide: bool = False) -> Case:
    """With a scale and a bias of each filter, perhaps a residual of bytes; rounded to bytes, or wide: to f16."""
    n, k, height, width = image
    rng = np.random.default_rng(filters)

    def make(g: Graph, x: Value, *more: Value) -> Value:
        w = g.constant(bytes_drawn(rng, TensorType((filters, k, 1, 1), I8)))
        scale = g.constant(rng.uniform(0.5, 2.0, (filters, 1, 1)).astype(np.float32) / (70 * k**0.5))
        y = g.add(pw("mul"), g.add(Cast(F32), g.add(ONE, x, w)), scale)
        y = g.add(pw("add"), y, constant(g, F32, filters, 1, 1))
        if residual:
            scaled = g.add(pw("mul"), g.add(Cast(F32), more[0]), scalar(g, 0.37))
            y = g.add(pw("relu"), g.add(pw("add"), y, scaled))
        return g.add(Cast(F16), y) if wide else rounded(g, y)

    types = [last(I8, *image)] + [last(I8, n, filters, height, width)] * residual
    case = build(f"i8 {image} {filters} {residual} {wide}", types, make, bytes_drawn, exact=not wide)
    return replace(case, fused=not wide)


def quantised_matrix(n: int, k: int, columns: int) -> Case:
    """Rows of two dims; the sums are stored, too, because they are exact."""
    rng = np.random.default_rng(k)

    def make(g: Graph, x: Value) -> list[Value]:
        sums = g.add(MatMul(), x, g.constant(bytes_drawn(rng, TensorType((k, columns), I8))))
        return [sums, rounded(g, g.add(pw("mul"), g.add(Cast(F32), sums), scalar(g, 1e-3)))]

    return build(f"i8 matrix {n} {k} {columns}", [rows(I8, 2, n, k)], make, bytes_drawn, exact=True)


def dynamic(n: int, depth: int, columns: int) -> Case:
    """A product whose zero point and scale are inputs, as in models that were quantised dynamically."""
    rng = np.random.default_rng(columns)
    weights = bytes_drawn(rng, TensorType((depth, columns), I8))
    each = rng.uniform(0.5, 2.0, columns).astype(np.float32) / (5000 * depth**0.5)

    def make(g: Graph, x: Value, zero: Value, scale: Value) -> Value:
        sums = g.add(Cast(F32), g.add(MatMul(), x, g.constant(weights)))
        term = g.add(pw("mul"), zero, g.constant(weights.sum(0, dtype=np.float32)[None]))
        return g.add(pw("mul"), g.add(pw("sub"), sums, term), g.add(pw("mul"), scale, g.constant(each)))

    case = build(f"dynamic {n} {depth} {columns}", [rows(I8, n, depth), rows(F32), rows(F32)], make, bytes_drawn)
    return replace(case, within=1e-5)


def thin_cases() -> list[Case]:
    return [
        convolution(F16, (2, 16, 16, 16), 96),
        convolution(F16, (1, 40, 23, 23), 24, gated=True, residual=True),
        convolution(BF16, (3, 32, 14, 14), 8, gated=True),
        convolution(F16, (2, 104, 16, 17), 136, residual=True),
        matrix(300, 24, 40),
        convolution(F16, (11, 1152, 7, 7), 192, gated=True, residual=True),
        quantised((2, 64, 16, 16), 256, residual=True),
        quantised((2, 80, 16, 17), 136, wide=True),
        quantised((11, 480, 7, 7), 192, residual=True),
        quantised_matrix(300, 48, 40),
        strided(F16, (2, 16, 33, 38), 24, (2, 1)),
        strided(I8, (2, 32, 46, 47), 24, (2, 2)),
        dynamic(600, 64, 40),
    ]


@needs_compiler
def test_all_ways_give_the_same(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_step, "MIN_ROWS", 16)  # fewer rows, as each is emulated
    cases = [
        convolution(F16, (2, 16, 5, 5), 96),
        convolution(F16, (1, 40, 6, 6), 24, gated=True, residual=True),
        convolution(BF16, (3, 32, 4, 4), 8, gated=True),
        convolution(F16, (1, 104, 5, 7), 136, residual=True),
        matrix(9, 24, 40),
        convolution(F16, (2, 840, 3, 3), 40, gated=True),  # weights in two phases
        quantised((2, 64, 5, 5), 96, residual=True),
        quantised((1, 80, 5, 7), 136, wide=True),
        quantised((2, 496, 3, 3), 40),
        quantised_matrix(9, 48, 40),
        quantised((2, 24, 5, 7), 144),
        quantised((1, 8, 9, 9), 16, residual=True),
        quantised((2, 272, 3, 5), 24, residual=True),
        strided(F16, (2, 16, 5, 6), 24, (2, 1)),
        strided(I8, (2, 32, 6, 7), 24, (2, 3)),
        dynamic(30, 64, 40),
    ]
    check(cases, rng, every=True)


def test_few_variants_of_bytes_are_compiled() -> None:
    """Each costs time when a model is compiled first; others were at most 2 % faster on an H200."""
    cases = (quantised((32, 64, 56, 56), 256, residual=True), quantised((32, 256, 56, 56), 64))
    found = [thin_product(case.nodes, case.outputs, case.figures) for case in cases]
    assert [1 + len(kernel.others) for kernel in found if kernel is not None] == [2, 2]


def extreme(k: int, scale: float) -> Case:
    """Sums as large as they can be, times a scale, with a bias of each column."""
    bias = np.linspace(-200.0, 200.0, 16).astype(np.float32)

    def make(g: Graph, x: Value) -> Value:
        sums = g.add(MatMul(), x, g.constant(np.full((k, 16), -128, np.int8)))
        y = g.add(pw("add"), g.add(pw("mul"), g.add(Cast(F32), sums), scalar(g, scale)), g.constant(bias))
        return rounded(g, g.add(pw("clip", min=-2e7, max=1e9), y))

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        return rng.choice(np.array([-128, 127], np.int8), (type.shape[0], 1)).repeat(type.shape[1], 1)

    return build(f"extreme {k} {scale}", [rows(I8, 528, k)], make, draw, exact=True)


@needs_compiler
@pytest.mark.parametrize(("k", "scale"), [(256, 2.0**-16), (272, 2.0**-16), (512, 2.0**-17), (64, 2.0**12)])
def test_the_largest_sums_are_exact(k: int, scale: float, rng: np.random.Generator) -> None:
    check([extreme(k, scale)], rng)


@pytest.mark.parametrize(
    ("case", "fetched"),
    [
        (quantised((4, 64, 16, 16), 256, residual=True), 2),
        (quantised((4, 128, 16, 16), 256, residual=True, wide=True), 2),
        (quantised((4, 64, 16, 16), 256), 1),
        (quantised((4, 128, 16, 16), 256), 0),
        (strided(I8, (2, 32, 46, 47), 256, (2, 2)), 0),
    ],
)
def test_what_the_next_tile_reads_is_fetched(case: Case, fetched: int) -> None:
    """By variants that have registers for it: rows with a residual, or short ones."""
    found = thin_product(case.nodes, case.outputs, case.figures)
    assert found is not None
    counts = [variant.launches[0].source.count("fetch_line(a") for variant in variants_of(found)]
    assert counts == [fetched, 0]


def ended(scale: float, *factors: float) -> Case:
    """Sums times a scale, a relu, a factor of all columns or of each, and rounding. Many numbers are ties."""

    def make(g: Graph, x: Value) -> Value:
        sums = g.add(MatMul(), x, g.constant(bytes_drawn(np.random.default_rng(3), TensorType((64, 16), I8))))
        y = g.add(pw("relu"), g.add(pw("mul"), g.add(Cast(F32), sums), scalar(g, scale)))
        if factors:
            of_each = np.array(factors, np.float32)
            y = g.add(pw("mul"), y, g.constant(of_each if len(factors) == 1 else np.resize(of_each, 16)))
        return rounded(g, y)

    return build(f"ended {scale} {factors}", [rows(I8, 528, 64)], make, bytes_drawn, exact=True)


SHORT = [ended(2.0**-9), ended(2.0**-9, 0.75), ended(1.0), ended(1.0, 0.5), ended(2.0**-30, 2.0**20)]
OTHERS = [ended(2.0**-9, -0.75), ended(2.0**-9, 0.0), ended(2.0**-9, 0.25, -0.5)]


@needs_compiler
def test_saturation_replaces_relu_and_the_upper_limit(rng: np.random.Generator) -> None:
    check([*SHORT, *OTHERS], rng)


@pytest.mark.parametrize("case", [*SHORT, *OTHERS], ids=lambda case: case.name)
def test_bytes_that_follow_a_relu_take_fewer_instructions(case: Case) -> None:
    """If all that is multiplied by is positive."""
    kernel = case.kernel
    assert kernel is not None
    (launch,) = kernel.launches
    assert (" rounded_unit(" in launch.source, "store_units<" in launch.source) == (case in SHORT,) * 2


def test_a_gate_in_front_is_a_proposal() -> None:
    nodes = convolution(F16, (2, 16, 16, 16), 24, gated=True).nodes
    assert all(may_begin(nodes[:n], FIGURES) for n in range(1, len(nodes) + 1))
    assert [is_joint_work(nodes[:n]) for n in (2, 3)] == [True, True]
    assert not is_joint_work(nodes[1:]), "the product alone is cuDNN's step, which has a kernel for a form"


@pytest.mark.parametrize(
    ("why", "types", "make"),
    [
        ("fp32", [last(F32, 2, 16, 16, 16)], lambda g, x: g.add(ONE, x, constant(g, F32, 8, 16, 1, 1))),
        ("channels first", [rows(F16, 2, 16, 16, 16)], lambda g, x: g.add(ONE, x, constant(g, F16, 8, 16, 1, 1))),
        ("i8 of 20 channels", [last(I8, 2, 20, 16, 16)], lambda g, x: g.add(ONE, x, constant(g, I8, 8, 20, 1, 1))),
        (
            "i8 computed in front",
            [last(I8, 2, 16, 16, 16)],
            lambda g, x: g.add(ONE, g.add(pw("abs"), x), constant(g, I8, 8, 16, 1, 1)),
        ),
        (
            "rows of i8 that registers do not hold",
            [last(I8, 2, 1024, 16, 16)],
            lambda g, x: g.add(ONE, x, constant(g, I8, 64, 1024, 1, 1)),
        ),
        ("nine channels", [last(F16, 2, 9, 16, 16)], lambda g, x: g.add(ONE, x, constant(g, F16, 8, 9, 1, 1))),
        ("much to do", [rows(F16, 1024, 704)], lambda g, x: g.add(MatMul(), x, constant(g, F16, 704, 704))),
        ("few rows", [rows(F16, 256, 64)], lambda g, x: g.add(MatMul(), x, constant(g, F16, 64, 64))),
        ("weights computed", [rows(F16, 1024, 64), rows(F16, 64, 64)], lambda g, x, w: g.add(MatMul(), x, w)),
        (
            "a window",
            [last(F16, 2, 16, 32, 32)],
            lambda g, x: g.add(Conv((1, 1), (0, 0, 0, 0), (1, 1)), x, constant(g, F16, 16, 16, 2, 1)),
        ),
    ],
)
def test_others_are_left_alone(why: str, types: list[TensorType], make: Any) -> None:
    case = build(why, types, make)
    assert thin_product(case.nodes, case.outputs, case.figures) is None


@pytest.mark.parametrize(("dtype", "channels", "runs"), [(I8, 512, True), (I8, 576, False), (F16, 512, False)])
def test_of_bytes_more_are_multiplied_for_each_that_is_moved(dtype: DType, channels: int, runs: bool) -> None:
    """Up to as many as the registers of a thread hold."""
    case = strided(dtype, (1, channels, 32, 32), channels, (1, 1))
    assert (thin_product(case.nodes, case.outputs, case.figures) is not None) == runs


def test_a_prologue_whose_result_the_epilogue_reads_is_refused() -> None:
    def make(g: Graph, x: Value) -> Value:
        z = g.add(pw("relu"), x)
        return g.add(pw("add"), g.add(MatMul(), z, constant(g, F16, 64, 64)), z)

    assert build("in front", [rows(F16, 1024, 64)], make).kernel is None
