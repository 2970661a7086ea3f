"""Products of 8-bit integers by warpgroups against the reference, through the emulator, which makes copies and products
as late as the kernel allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, last, rows
from gpu.kernels.convolution.test_thin_product import bytes_drawn, rounded, scalar
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.kernels import Kernel
from fusec.gpu.kernels.convolution.warpgroup_product import (
    MOST_TILINGS,
    NEXT_TO_THIN,
    TILINGS,
    Tiling,
    WarpgroupSource,
    match_bytes,
    warpgroup_product,
)
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Cast, Conv, MatMul, pw

F16, F32, I8 = DType.F16, DType.F32, DType.I8


def weights(g: Graph, *shape: int) -> Value:
    return g.constant(bytes_drawn(np.random.default_rng(sum(shape)), TensorType(shape, I8)))


def scaled(g: Graph, sums: Value, columns: int, *more: int) -> Value:
    """Multiply sums by a scale of each column."""
    scales = np.random.default_rng(columns).uniform(0.5, 2.0, (columns, *more)).astype(np.float32)
    return g.add(pw("mul"), g.add(Cast(F32), sums), g.constant(scales / 4096))


def matrix(n: int, k: int, columns: int) -> Case:
    """Rows of two dims. The sums are stored, too, because they are exact."""

    def make(g: Graph, x: Value) -> list[Value]:
        sums = g.add(MatMul(), x, weights(g, k, columns))
        return [sums, rounded(g, scaled(g, sums, columns))]

    return build(f"i8 matrix {n} {k} {columns}", [rows(I8, 2, n, k)], make, bytes_drawn, exact=True)


def layer(n: int, k: int, columns: int, gelu: bool = False) -> Case:
    """With a bias; then gelu and rounding to bytes, or a residual in f16."""

    def make(g: Graph, x: Value, *more: Value) -> Value:
        y = scaled(g, g.add(MatMul(), x, weights(g, k, columns)), columns)
        y = g.add(pw("add"), y, g.constant(np.linspace(-1, 1, columns, dtype=np.float32)))
        if gelu:
            return rounded(g, g.add(pw("mul"), g.add(pw("gelu"), y), scalar(g, 21.7)))
        return g.add(pw("add"), g.add(Cast(F16), y), *more)

    types = [rows(I8, n, k)] + [rows(F16, n, columns)] * (not gelu)

    def draw(rng: np.random.Generator, type: TensorType) -> Any:
        return bytes_drawn(rng, type) if type.dtype is I8 else rng.standard_normal(type.shape).astype(np.float16)

    return replace(build(f"i8 layer {n} {k} {columns} {gelu}", types, make, draw), near=True)


def convolution(image: tuple[int, int, int, int], filters: int, window: tuple[int, int], op: Conv) -> Case:
    """With relu; rounded to bytes."""

    def make(g: Graph, x: Value) -> Value:
        sums = g.add(op, x, weights(g, filters, image[1], *window))
        return rounded(g, g.add(pw("relu"), scaled(g, sums, filters, 1, 1)))

    return build(f"i8 {image} {filters} {window} {op}", [last(I8, *image)], make, bytes_drawn, exact=True)


THREE = Conv((1, 1), (1, 1, 1, 1), (1, 1))


def warpgroup_cases() -> list[Case]:
    return [
        matrix(70, 48, 40),
        layer(67, 272, 200),
        layer(130, 144, 72, gelu=True),
        convolution((2, 32, 7, 9), 40, (3, 3), THREE),
        convolution((1, 144, 9, 8), 136, (3, 2), Conv((2, 1), (1, 0, 0, 2), (1, 2))),
        convolution((2, 64, 9, 8), 24, (1, 1), Conv((2, 3), (0, 0, 0, 0), (1, 1))),
        convolution((2, 16, 6, 6), 8, (1, 1), THREE),
        convolution((2, 16, 6, 6), 8, (2, 2), Conv((1, 1), (0, 0, 0, 0), (1, 1))),
    ]


@needs_compiler
def test_all_tilings_compute_the_product(rng: np.random.Generator) -> None:
    check(warpgroup_cases(), rng, every=True)


@needs_compiler
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_tiling_goes_round_its_shared_memory(tiling: Tiling, rng: np.random.Generator) -> None:
    depth = tiling.depth * (tiling.stages + 2) + 16
    case = matrix(70, depth, 264)
    step = match_bytes(case.nodes, case.outputs)
    assert step is not None
    source = WarpgroupSource(step, case.outputs, tiling)
    kernel, arrays = Kernel("product", (source.launch(),)), case.arrays(rng)
    got = Emulator([kernel]).run(kernel, arrays, case.outputs)
    for one, other in zip(got, case.reference(arrays), strict=True):
        assert np.array_equal(one, other)
    assert source.shared_bytes * tiling.resident < 227 << 10


def entries(case: Case) -> list[str]:
    kernel = case.kernel
    assert kernel is not None
    return [each.launches[0].entry.rpartition("_")[0] for each in (kernel, *kernel.others)]


def test_thin_products_come_first_where_memory_bounds() -> None:
    assert entries(matrix(2048, 768, 768)) == ["warpgroup_product"] * MOST_TILINGS
    thin = entries(matrix(2048, 64, 256))
    assert thin[0] == "thin_product" and thin.count("warpgroup_product") == NEXT_TO_THIN


def test_blocks_that_fill_the_gpu_come_first() -> None:
    """32 x 768 columns are 128 blocks of 192 columns: one wave, of an H200."""
    kernel = matrix(2048, 768, 768).kernel
    assert kernel is not None and kernel.launches[0].grid == 128


def test_weights_are_copied_before_earlier_launches_end_and_nothing_else_is() -> None:
    kernel = layer(4096, 768, 768).kernel
    assert kernel is not None
    for launch in (each.launches[0] for each in (kernel, *kernel.others)):
        before, waits, after = launch.source.partition("wait_for_launches();")
        assert launch.early and waits
        names = [f"a{i}" for i, a in enumerate(launch.arguments) if a.value is not None and a.value.literal is None]
        computed = [name for name in names if f" = from_here({name});" in after]
        written = [f"r{i}" for i, c_type in enumerate(launch.parameters) if not c_type.startswith("const")]
        body = before.partition("ENTRY" if "ENTRY" in before else launch.entry + "(")[2].partition("{")[2]
        assert len(computed) == 2 and "copy_or_zeros_ahead(there" in body
        assert not any(f"{name} " in body or f"{name}[" in body for name in (*computed, *written))


def test_only_hopper_has_them() -> None:
    case = matrix(70, 48, 40)
    for sm, runs in ((80, False), (89, False), (90, True), (100, False)):
        found = warpgroup_product(case.nodes, case.outputs, replace(FIGURES, sm=sm))
        assert (found is not None) == runs


@pytest.mark.parametrize(
    ("why", "types", "make"),
    [
        ("depth", [rows(I8, 128, 24)], lambda g, x: g.add(MatMul(), x, weights(g, 24, 64))),
        ("columns", [rows(I8, 128, 32)], lambda g, x: g.add(MatMul(), x, weights(g, 32, 20))),
        ("computed weights", [rows(I8, 128, 32), rows(I8, 32, 64)], lambda g, x, w: g.add(MatMul(), x, w)),
        (
            "groups",
            [last(I8, 2, 32, 8, 8)],
            lambda g, x: g.add(Conv((1, 1), (0, 0, 0, 0), (1, 1), 2), x, weights(g, 32, 16, 1, 1)),
        ),
        ("channels first", [rows(I8, 2, 32, 8, 8)], lambda g, x: g.add(THREE, x, weights(g, 32, 32, 3, 3))),
        (
            "computed before",
            [rows(I8, 128, 32)],
            lambda g, x: g.add(MatMul(), g.add(pw("abs"), x), weights(g, 32, 64)),
        ),
    ],
)
def test_others_are_left_alone(why: str, types: list[TensorType], make: Any) -> None:
    case = build(why, types, make)
    assert warpgroup_product(case.nodes, case.outputs, FIGURES) is None
