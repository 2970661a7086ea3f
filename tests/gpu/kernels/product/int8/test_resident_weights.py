"""Test kernels of products whose weights stay in shared memory against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, check
from gpu.kernels.emulator import needs_compiler
from gpu.kernels.product.int8.test_dense_bytes import matrix
from gpu.kernels.product.test_thin_product import convolution, dynamic, quantised, quantised_matrix, strided

from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.gpu.kernels.product import product_step
from fusec.gpu.kernels.product.int8 import resident_weights
from fusec.ir import DType

I8 = DType.I8
FEW = replace(FIGURES, processors=2)  # so that a team has several tiles


def resident_cases() -> list[Case]:
    return [
        quantised((21, 256, 14, 14), 256, residual=True),
        quantised((90, 512, 7, 7), 256, residual=True, wide=True),
        quantised_matrix(2100, 288, 384),
        strided(I8, (3, 256, 80, 75), 128, (2, 2)),
    ]


@needs_compiler
def test_all_variants_compute_the_same(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_weights, "MIN_ROWS", 16)  # fewer rows, as each is emulated
    monkeypatch.setattr(product_step, "MIN_ROWS", 16)
    monkeypatch.setattr(resident_weights, "MIN_DEPTH", 32)
    monkeypatch.setattr(resident_weights, "MOST", 3)
    cases = [
        quantised((2, 64, 9, 15), 256, residual=True),
        quantised((3, 512, 9, 19), 128, residual=True, wide=True),
        quantised_matrix(230, 160, 128),
        strided(I8, (2, 128, 21, 25), 128, (2, 2)),
        quantised((2, 32, 12, 13), 128),
        matrix(75, 96, 128, "sums"),
        dynamic(150, 96, 128),
    ]
    cases = [replace(case, figures=FEW) for case in cases]
    assert all(entries(case)[0] == "resident_weights" for case in cases)
    check(cases, rng, every=True)


def entries(case: Case) -> list[str]:
    """The families of the variants of a case."""
    kernel = case.kernel
    found = variants_of(kernel) if kernel is not None else ()
    return [variant.launches[0].entry.rsplit("_", 1)[0] for variant in found]


def test_the_only_one_that_fits_is_compared_with_a_thin_product() -> None:
    case = quantised((90, 512, 7, 7), 128)
    less = replace(case, figures=replace(FIGURES, shared_bytes=180 << 10))
    assert entries(case) == ["resident_weights", "resident_weights"]
    assert entries(less)[:2] == ["resident_weights", "thin_product"]


def test_weights_are_copied_before_the_wait_and_rows_after_it() -> None:
    kernel = resident_cases()[0].kernel
    assert kernel is not None
    (launch,) = kernel.others[-1].launches
    before, _, after = launch.source.partition("wait_for_launches();")
    assert launch.dependent and "copy_ahead<16>" in before and "copy_or_zeros_ahead" not in before
    assert "copy_or_zeros_ahead" in after


def test_what_an_epilogue_reads_is_loaded_before_products_end() -> None:
    kernel = resident_cases()[0].kernel
    assert kernel is not None
    before, _, after = kernel.others[-1].launches[0].source.rpartition("wait_for_groups<0>")
    assert "load_now<u32, 4>" in before and "load_now<u32, 4>" not in after


@pytest.mark.parametrize(
    ("why", "case"),
    [
        ("few rows", quantised((1, 256, 16, 15), 128)),
        ("columns of no warpgroup", quantised((21, 256, 14, 14), 96)),
        ("few rows for its columns", quantised((2, 256, 14, 14), 1024)),
        ("a depth of no whole instructions", quantised((21, 272, 14, 14), 128)),
        ("a depth for thin products", quantised((21, 224, 14, 14), 128)),
        ("a depth for dense products", quantised((21, 544, 14, 14), 128)),
        ("16 bits", convolution(DType.F16, (21, 256, 14, 14), 128)),
        ("another GPU", replace(quantised((21, 256, 14, 14), 256), figures=replace(FIGURES, sm=100))),
    ],
)
def test_others_are_left_alone(why: str, case: Case) -> None:
    assert resident_weights.resident_weights(case.nodes, case.outputs, case.figures) is None
