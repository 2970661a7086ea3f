"""Test kernels of products of few rows with constant weights against the reference, through the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, rows
from gpu.kernels.emulator import needs_compiler
from gpu.kernels.product.few_rows.products import gated, product, refused, weights

from fusec.gpu.autotune.fusion.fusion_proposals import is_joint_work, may_begin
from fusec.gpu.kernels import GpuFigures, find
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import MatMul, RmsNorm, pw
from fusec.targets.target import load

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32


def normed(dtype: DType, shape: tuple[int, ...], columns: int) -> Case:
    """An RMS norm of the rows, and two products of its result."""

    def make(g: Graph, x: Value, scale: Value) -> Value:
        y = g.add(RmsNorm(-1, 1e-3), x, scale)
        gate = g.add(pw("swish", beta=1.0), g.add(MatMul(), y, weights(g, dtype, shape[-1], columns)))
        return g.add(pw("mul"), gate, g.add(MatMul(), y, weights(g, dtype, shape[-1], columns)))

    types = [rows(dtype, *shape), rows(dtype, shape[-1])]
    return build(f"normed {dtype.value} {shape} {columns}", types, make)


def few_rows_cases() -> list[Case]:
    return [
        product(F16, (1, 256), 32),
        product(F16, (1, 1, 4096), 37),
        product(BF16, (4, 264), 13),
        product(BF16, (2, 2, 64), 8),
        product(F16, (3, 1792), 20),
        product(F16, (2, 1, 96), 24, order=(1, 0, 2)),
        gated(F16, (1, 4096), 40),
        gated(BF16, (1, 2, 520), 9),
        gated(F16, (4, 8), 3),
        normed(F16, (1, 4096), 40),
        normed(BF16, (2, 2, 264), 11),
    ]


@needs_compiler
def test_all_variants_compute_the_product(rng: np.random.Generator) -> None:
    check(few_rows_cases(), rng, every=True)


@needs_compiler
def test_a_block_multiplies_group_after_group(rng: np.random.Generator) -> None:
    """Few multiprocessors, so that each block handles several groups of columns."""
    few = GpuFigures(**{**vars(FIGURES), "processors": 1})
    cases = [product(F16, (1, 2048), 100), gated(BF16, (2, 1024), 70)]
    for case in cases:
        case.figures = few
        assert case.kernel is not None and case.kernel.launches[0].grid * 4 < 70
    check(cases, rng, every=True)


def test_variants_fill_the_registers_without_spilling() -> None:
    for depth in (64, 2048, 4096, 11008, 14336):
        case = product(F16, (1, depth), 512)
        assert case.kernel is not None
        kernels = (case.kernel, *case.kernel.others)
        assert len({kernel.launches[0].block for kernel in kernels}) >= (2 if depth > 64 else 1), depth
        for kernel in kernels:
            threads = kernel.launches[0].block * FIGURES.processors
            assert (
                kernel.launches[0].grid * kernel.launches[0].block <= FIGURES.processor_threads * FIGURES.processors
            ), threads


def test_launches_are_dependent_and_weights_are_loaded_before_the_wait() -> None:
    kernel = gated(F16, (1, 4096), 512).kernel
    assert kernel is not None
    for each in (kernel, *kernel.others):
        launch = each.launches[0]
        before, _, after = launch.source.partition("wait_for_launches();")
        assert launch.dependent and "load_words" in before and "load_now" not in before and "load_now" in after


def test_a_norm_of_few_rows_and_products_of_its_result_are_a_proposal() -> None:
    case = normed(F16, (1, 512), 64)
    assert all(may_begin(case.nodes[:n], FIGURES) for n in range(1, len(case.nodes) + 1))
    assert [is_joint_work(case.nodes[:n]) for n in (1, 2)] == [False, True]
    assert not may_begin(normed(F16, (32, 512), 64).nodes[:2], FIGURES), "32 rows"


def test_a_norm_that_is_stored_stays_a_step() -> None:
    def make(g: Graph, x: Value, scale: Value) -> list[Value]:
        y = g.add(RmsNorm(-1, 1e-3), x, scale)
        return [y, g.add(MatMul(), y, weights(g, F16, 64, 32))]

    assert build("stored", [rows(F16, 1, 64), rows(F16, 64)], make).kernel is None


@pytest.mark.parametrize(
    ("why", "types", "make"),
    [
        *refused(1),
        ("five rows", [rows(F16, 5, 64)], lambda g, x: g.add(MatMul(), x, weights(g, F16, 64, 32))),
        ("a depth of 60", [rows(F16, 1, 60)], lambda g, x: g.add(MatMul(), x, weights(g, F16, 60, 32))),
    ],
)
def test_other_products_have_other_kernels_or_none(why: str, types: list[TensorType], make: Callable[..., Any]) -> None:
    kernel = build(why, types, make).kernel
    assert kernel is None or not any("few_rows" in launch.entry for launch in kernel.launches), why


@pytest.mark.parametrize("target", ["t4", "a100", "l4", "h100", "b200"])
def test_blocks_fit_the_multiprocessors_of_every_target(target: str) -> None:
    figures = GpuFigures.of(load(target))
    case = product(F16, (1, 4096), 14336)
    kernel = find(case.nodes, case.outputs, figures)
    assert kernel is not None
    for each in (kernel, *kernel.others):
        launch = each.launches[0]
        assert (
            launch.grid % figures.processors == 0
            and launch.grid * launch.block <= figures.processors * figures.processor_threads
        )
