"""Test kernels of products of many rows of 8-bit integers against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, last, rows
from gpu.kernels.emulator import needs_compiler
from gpu.kernels.product.test_thin_product import dynamic, rounded

from fusec.gpu.kernels.product.int8.dense_bytes import dense_bytes
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Cast, Conv, MatMul, pw

F16, F32, I8 = DType.F16, DType.F32, DType.I8
FEW = replace(FIGURES, processors=1)  # so that a block has several tiles


def bytes_drawn(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """All bytes occur, the ends of their range often; halves are normal."""
    if type.dtype is not I8:
        return rng.standard_normal(type.shape).astype(type.dtype.numpy)
    return np.clip(rng.integers(-160, 160, type.shape), -128, 127).astype(np.int8)


def scaled(g: Graph, x: Value, columns: int) -> Value:
    """A product with a scale and a bias of each column."""
    rng, depth = np.random.default_rng(columns), x.type.shape[-1]
    sums = g.add(MatMul(), x, g.constant(bytes_drawn(rng, TensorType((depth, columns), I8))))
    scale = g.constant(rng.uniform(0.5, 2.0, columns).astype(np.float32) / (5000 * depth**0.5))
    y = g.add(pw("mul"), g.add(Cast(F32), sums), scale)
    return g.add(pw("add"), y, g.constant(rng.standard_normal(columns).astype(np.float32)))


def matrix(n: int, depth: int, columns: int, end: str) -> Case:
    """Of two dims of rows; it ends with a residual in fp16, a gelu that is rounded, or the sums as they are."""

    def make(g: Graph, x: Value, *more: Value) -> Value:
        if end == "sums":
            return g.add(
                MatMul(), x, g.constant(bytes_drawn(np.random.default_rng(n), TensorType((depth, columns), I8)))
            )
        y = scaled(g, x, columns)
        if end == "residual":
            return g.add(pw("add"), g.add(Cast(F16), y), more[0])
        return rounded(g, g.add(pw("mul"), g.add(pw("gelu"), y), g.constant(np.float32(40.0))))

    types = [rows(I8, 2, n, depth)] + [rows(F16, 2, n, columns)] * (end == "residual")
    case = build(f"{n} {depth} {columns} {end}", types, make, bytes_drawn, exact=end == "sums")
    return replace(case, near=end == "gelu", figures=FEW)


def single(n: int, depth: int, columns: int) -> Case:
    """Rows of two dims of which the second has one place."""

    def make(g: Graph, x: Value, z: Value) -> Value:
        return g.add(pw("add"), g.add(Cast(F16), scaled(g, x, columns)), z)

    return build(f"single {n}", [rows(I8, n, 1, depth), rows(F16, n, 1, columns)], make, bytes_drawn)


def convolution(image: tuple[int, int, int, int], filters: int) -> Case:
    rng = np.random.default_rng(filters)

    def make(g: Graph, x: Value) -> Value:
        w = g.constant(bytes_drawn(rng, TensorType((filters, image[1], 1, 1), I8)))
        sums = g.add(Conv((1, 1), (0, 0, 0, 0), (1, 1)), x, w)
        scale = g.constant(rng.uniform(0.5, 2.0, (filters, 1, 1)).astype(np.float32) / 10000)
        return rounded(g, g.add(pw("mul"), g.add(Cast(F32), sums), scale))

    case = build(f"{image} {filters}", [last(I8, *image)], make, bytes_drawn, exact=True)
    return replace(case, figures=FEW)


def dense_cases() -> list[Case]:
    return [
        matrix(256, 640, 256, "sums"),
        matrix(300, 768, 192, "residual"),
        matrix(400, 640, 384, "gelu"),
        convolution((2, 640, 16, 17), 128),
        single(20, 640, 128),
        replace(dynamic(300, 640, 192), figures=FEW),
    ]


@needs_compiler
def test_all_variants_compute_the_product(rng: np.random.Generator) -> None:
    cases = [
        matrix(75, 640, 256, "sums"),
        matrix(150, 768, 192, "residual"),
        matrix(64, 640, 384, "gelu"),
        convolution((5, 768, 9, 8), 128),  # as many parts as stages, and three tiles
        single(20, 640, 128),
        replace(dynamic(150, 640, 192), figures=FEW),
    ]
    check(cases, rng, every=True)


def test_weights_are_copied_before_the_wait_and_rows_after_it() -> None:
    for case in dense_cases():
        kernel = dense_bytes(case.nodes, case.outputs, case.figures)
        assert kernel is not None
        for launch in (kernel.launches[0], *(other.launches[0] for other in kernel.others)):
            before, _, after = launch.source.partition("wait_for_launches();")
            assert launch.dependent and "copy_bytes_ahead" in before and "copy_or_zeros_ahead" not in before
            assert "copy_or_zeros_ahead" in after and launch.source.count("wait_for_launches();") == 2


@needs_compiler
def test_gelu_of_large_and_small_numbers(rng: np.random.Generator) -> None:
    """Far from zero it is the number or zero, and near it within half a step of the exact one."""
    bias = np.linspace(-400.0, 400.0, 128).astype(np.float32)

    def make(g: Graph, x: Value) -> Value:
        sums = g.add(MatMul(), x, g.constant(np.eye(128, dtype=np.int8)))
        y = g.add(pw("mul"), g.add(Cast(F32), sums), g.constant(np.float32(0.03)))
        y = g.add(pw("gelu"), g.add(pw("add"), y, g.constant(bias)))
        return rounded(g, g.add(pw("mul"), y, g.constant(np.float32(0.3))))

    check([replace(build("gelu", [rows(I8, 64, 128)], make, bytes_drawn), near=1 / 8)], rng)


def test_columns_of_a_tile_divide_those_of_the_product() -> None:
    cases = [matrix(512, 640, columns, "sums") for columns in (768, 256, 128, 64)]
    kernels = [dense_bytes(case.nodes, case.outputs, case.figures) for case in cases]
    assert [kernel and 1 + len(kernel.others) for kernel in kernels] == [3, 1, 1, None]


@pytest.mark.parametrize(
    ("why", "case"),
    [
        ("a depth of no whole parts", matrix(512, 704, 256, "sums")),
        ("few rows", matrix(7, 640, 256, "sums")),
        ("another GPU", replace(matrix(512, 640, 256, "sums"), figures=replace(FIGURES, sm=100))),
    ],
)
def test_others_are_left_alone(why: str, case: Case) -> None:
    assert dense_bytes(case.nodes, case.outputs, case.figures) is None
