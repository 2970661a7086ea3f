"""Test the kernel of top_k against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, awkward, build, check, rows
from gpu.kernels.emulator import needs_compiler

from fusec.ir import DType, TensorType, Value
from fusec.ops import TopK

DTYPES = (DType.F32, DType.F16, DType.BF16, DType.I32, DType.I16, DType.I8)


def elements(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Draw normal numbers with NaN, infinities and both zeros among them, few numbers many times, or extremes."""
    kind = rng.integers(3)
    if kind == 0:
        return awkward(rng, type)
    if kind == 1:
        return rng.choice(np.array([1, 2, 3, 0, -1]), type.shape).astype(type.dtype.numpy)
    if type.dtype.is_int:
        limits = np.iinfo(type.dtype.numpy)
        return rng.integers(limits.min, limits.max, type.shape, endpoint=True, dtype=type.dtype.numpy)
    return (rng.standard_normal(type.shape) * 10.0 ** rng.integers(-4, 4, type.shape)).astype(type.dtype.numpy)


def top_k(op: TopK, type: TensorType, used: slice = slice(None)) -> Case:
    """Find elements of a tensor. used: the results that are read."""

    def make(g: Any, x: Value) -> tuple[Value, ...]:
        return g.insert(op, [x]).results[used]

    return build(f"{op} {type} {used}", [type], make, elements, exact=True)


def random_case(rng: np.random.Generator, number: int) -> Case:
    size = int(rng.choice([1, 2, 7, 33, 100, 1000, 3000]))
    k = int(rng.choice([1, min(2, size), max(1, size // 3), size]))
    op = TopK(k, int(rng.choice([-1, 2])), bool(rng.integers(2)))
    used = (slice(None), slice(0, 1), slice(1, 2))[number % 3]
    return top_k(op, rows(DTYPES[number % len(DTYPES)], 2, int(rng.integers(1, 3)), size), used)


def random_cases() -> list[Case]:
    fixed = np.random.default_rng(23)  # the same sources each time: they are compiled once
    return [random_case(fixed, i) for i in range(42)]


@needs_compiler
def test_random_elements(rng: np.random.Generator) -> None:
    for _ in range(3):
        check(random_cases(), rng)


@needs_compiler
def test_parts_of_long_rows(rng: np.random.Generator) -> None:
    """The last part has fewer elements than are wanted, or as many, or its own elements are the best."""
    shapes = ((1, 16385, 1000), (2, 16384 + 700, 700), (1, 30001, 300), (3, 20000, 1), (1, 40000, 1000))
    cases = [
        top_k(TopK(k, -1, bool(number % 2)), rows(dtype, count, size), (slice(None), slice(1, 2))[number % 2])
        for number, (dtype, (count, size, k)) in enumerate(zip(DTYPES, (*shapes, shapes[0]), strict=True))
    ]
    assert all(case.kernel is not None and len(case.kernel.launches) == 2 for case in cases)
    check(cases, rng)


def test_a_short_row_and_one_of_which_much_is_wanted_are_not_parted() -> None:
    for case in (top_k(TopK(1000), rows(DType.F32, 1, 16384)), top_k(TopK(4096), rows(DType.F32, 1, 60000))):
        assert case.kernel is not None and len(case.kernel.launches) == 1 and not case.kernel.scratch_bytes


def equal(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    return np.ones(type.shape, type.dtype.numpy)


@needs_compiler
def test_ties_at_the_last_place_are_those_of_the_first_elements(rng: np.random.Generator) -> None:
    """Of equal elements only the place differs, so that its digits are found, too."""
    case = replace(top_k(TopK(700), rows(DType.F32, 1, 20000)), draw=equal)
    check([case], rng)


def test_another_batch_needs_no_other_source() -> None:
    for size in (500, 50000):
        one, eight = (top_k(TopK(10), rows(DType.F32, count, size)).kernel for count in (1, 8))
        assert one is not None and eight is not None
        assert [launch.source for launch in one.launches] == [launch.source for launch in eight.launches]
        assert [8 * launch.grid for launch in one.launches] == [launch.grid for launch in eight.launches]


@pytest.mark.parametrize(
    ("op", "type"),
    [
        (TopK(2, 0), rows(DType.F32, 5, 6)),
        (TopK(2), rows(DType.F64, 5, 6)),
        (TopK(2), rows(DType.I64, 5, 6)),
        (TopK(0), rows(DType.F32, 5, 6)),
        (TopK(2), rows(DType.F32, 1, (1 << 20) + 1)),
        (TopK(1 << 16), rows(DType.F32, 1, 1 << 17)),
    ],
)
def test_what_has_no_kernel(op: TopK, type: TensorType) -> None:
    assert top_k(op, type).kernel is None


def test_a_gpu_with_little_shared_memory_sorts_fewer() -> None:
    case = top_k(TopK(4096), rows(DType.F32, 1, 9000))
    assert case.kernel is not None
    assert replace(case, figures=replace(FIGURES, shared_bytes=32 << 10)).kernel is None
