"""Test kernels of products of some rows with constant weights against the reference, through the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, each_way, rows
from gpu.kernels.emulator import needs_compiler
from gpu.kernels.product.few_rows.products import gated, product, refused, sliced, weights

from fusec.gpu.kernels import GpuFigures, find
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import MatMul, RmsNorm, pw
from fusec.targets.target import load

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
FEW = GpuFigures(**{**vars(FIGURES), "processors": 4})


def normed(dtype: DType, shape: tuple[int, ...], columns: int, figures: GpuFigures = FEW, largest: float = 1.0) -> Case:
    """An RMS norm of the rows, and two products of its result."""

    def make(g: Graph, x: Value) -> Value:
        scale = np.random.default_rng(columns).uniform(-largest, largest, shape[-1]).astype(dtype.numpy)
        y = g.add(RmsNorm(-1, 1e-3), x, g.constant(scale))
        gate = g.add(pw("swish", beta=1.0), g.add(MatMul(), y, weights(g, dtype, shape[-1], columns)))
        return g.add(pw("mul"), gate, g.add(MatMul(), y, weights(g, dtype, shape[-1], columns)))

    case = build(f"normed {dtype.value} {shape} {columns}", [rows(dtype, *shape)], make)
    case.figures = figures
    case.within = 8e-3 if dtype is BF16 else 1e-3  # the reference rounds the normalised rows, the kernel does not
    return case


def streamed_cases() -> list[Case]:
    return [
        product(F16, (16, 256), 64, FEW),
        product(BF16, (5, 96), 48, FEW),
        product(F16, (2, 4, 512), 32, FEW),
        product(F16, (2, 512), 48, FEW),
        product(F16, (9, 1, 1024), 80, FEW),
        product(BF16, (32, 192), 16, FEW),
        product(F16, (2, 5, 128), 32, FEW, (1, 0, 2)),
        gated(F16, (16, 256), 64, FEW),
        gated(BF16, (3, 7, 64), 48, FEW),
        gated(F16, (6, 1024), 16, FEW),
        normed(F16, (16, 512), 64),
        normed(BF16, (2, 6, 160), 48, largest=300.0),
        normed(F16, (7, 512), 32, largest=0.1),
        sliced(F16, (16, 256), (64, 16, 16), FEW),
        sliced(BF16, (5, 1, 512), (24, 8, 16), FEW, normed=True),
        sliced(F16, (2, 4, 192), (64, 32, 32), FEW, normed=True),
    ]


@needs_compiler
def test_all_variants_compute_the_product(rng: np.random.Generator) -> None:
    check(streamed_cases(), rng, every=True)


def launches_of(case: Case) -> list[Any]:
    kernel = case.kernel
    assert kernel is not None
    return [each.launches[0] for each in each_way(kernel)]


def test_cases_share_the_depth_in_clusters_and_alone() -> None:
    clusters = {launch.cluster for case in streamed_cases() for launch in launches_of(case)}
    assert {1, 2, 4} <= clusters


def test_a_ring_of_few_stages_goes_round(rng: np.random.Generator) -> None:
    """A block multiplies more stages than its ring has, so that warps wait for free stages."""
    case = product(F16, (16, 8192), 64, GpuFigures(**{**vars(FIGURES), "processors": 1, "shared_bytes": 60 << 10}))
    assert all(launch.resident_bytes <= 60 << 10 for launch in launches_of(case))
    check([case], rng, every=True)


def test_up_to_four_rows_have_variants_of_both_families() -> None:
    entries = [launch.entry for launch in launches_of(product(F16, (4, 4096), 512, FIGURES))]
    assert entries[0].startswith("few_rows") and entries[-1].startswith("streamed_weights")


@pytest.mark.parametrize(
    ("depth", "columns"), [(4096, 4096), (4096, 6144), (14336, 4096), (4096, 32000), (4096, 128256)]
)
def test_blocks_of_a_large_product_run_together(depth: int, columns: int) -> None:
    found = launches_of(product(F16, (16, depth), columns, FIGURES))
    processors = FIGURES.processors
    assert found[0].grid / processors / -(-found[0].grid // processors) > 0.9
    assert columns >= 32000 or all(0.9 * processors < each.grid <= processors for each in found)
    assert all(2 * each.resident_bytes > FIGURES.dynamic_bytes for each in found), "no other launch runs next to it"


def test_launches_are_dependent_and_weights_are_requested_before_the_wait() -> None:
    for launch in launches_of(gated(F16, (16, 4096), 512, FIGURES)):
        before, _, after = launch.source.partition("wait_for_launches();")
        assert launch.dependent and before.count("copy_bytes_ahead(memory") == 2, "of both products"
        assert "copy_ahead<16>(to + " not in before and "copy_ahead<16>(to + " in after


@pytest.mark.parametrize(
    ("why", "types", "make"),
    [
        *refused(8),
        ("one row", [rows(F16, 1, 64)], lambda g, x: g.add(MatMul(), x, weights(g, F16, 64, 32))),
        ("33 rows", [rows(F16, 33, 64)], lambda g, x: g.add(MatMul(), x, weights(g, F16, 64, 32))),
        ("a depth of 40", [rows(F16, 8, 40)], lambda g, x: g.add(MatMul(), x, weights(g, F16, 40, 32))),
        ("24 columns", [rows(F16, 8, 64)], lambda g, x: g.add(MatMul(), x, weights(g, F16, 64, 24))),
        (
            "a scale that is computed",
            [rows(F16, 8, 64), rows(F16, 64)],
            lambda g, x, s: g.add(MatMul(), g.add(RmsNorm(-1, 1e-3), x, s), weights(g, F16, 64, 32)),
        ),
    ],
)
def test_other_products_have_other_kernels_or_none(why: str, types: list[TensorType], make: Callable[..., Any]) -> None:
    kernel = build(why, types, make).kernel
    assert kernel is None or not any("streamed_weights" in launch.entry for launch in kernel.launches), why


@pytest.mark.parametrize("target", ["t4", "a100", "l4", "h100", "b200"])
def test_only_gpus_with_clusters_have_the_kernel(target: str) -> None:
    figures = GpuFigures.of(load(target))
    case = product(F16, (16, 4096), 14336)
    kernel = find(case.nodes, case.outputs, figures)
    assert (kernel is not None) == (target in ("h100", "b200"))
    for each in () if kernel is None else each_way(kernel):
        assert each.launches[0].grid <= figures.processors
        assert each.launches[0].resident_bytes <= figures.dynamic_bytes
