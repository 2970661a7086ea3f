"""Test kernels that pool regions of images, against the reference, through the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu.kernels.cases import Case, build, check, last, normal, rows
from gpu.kernels.emulator import needs_compiler

from fusec.ir import DType, TensorType
from fusec.ops import RoiAlign, RoiPool, pw

F32, F16, BF16, F64 = DType.F32, DType.F16, DType.BF16, DType.F64


def regions(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Images are normal numbers. Regions lie in and around the image; some are empty, or no numbers."""
    if type.rank == 4:
        return normal(rng, type)
    if type.rank == 1:
        return rng.integers(0, 2, type.shape).astype(type.dtype.numpy)
    first = rng.uniform(-3, 9, (type.shape[0], 2))
    found = np.concatenate([first, first + rng.uniform(-1, 12, first.shape)], 1)
    return np.where(rng.random(type.shape) < 0.03, np.nan, found).astype(type.dtype.numpy)


def random_case(rng: np.random.Generator, number: int) -> Case:
    bins = (int(rng.integers(1, 5)), int(rng.integers(1, 5)))
    mode, scale = str(rng.choice(["avg", "max"])), float(rng.choice([1.0, 0.5, 0.3]))
    aligned = RoiAlign(bins, int(rng.integers(0, 4)), mode, scale, bool(rng.integers(2)))
    op = RoiPool(bins, scale) if number % 4 == 3 else aligned
    dtype = rng.choice(np.array([F32, F16, BF16, F64], dtype=object))
    x = (last if rng.integers(3) == 0 else rows)(dtype, 2, int(rng.choice([1, 3, 8])), *map(int, rng.integers(1, 9, 2)))
    count = int(rng.integers(0, 7))
    types = [x, rows(F64 if dtype is F64 else F32, count, 4), rows(DType.I32 if number % 2 else DType.I64, count)]
    extra = bool(rng.integers(2))

    def make(g: Any, x: Any, rois: Any, batches: Any) -> Any:
        y = g.add(op, x, rois, batches)
        return g.add(pw("relu"), g.add(pw("add"), y, y)) if extra else y

    return build(f"{number} {op} {types}", types, make, regions)


def random_cases() -> list[Case]:
    fixed = np.random.default_rng(12)  # the same sources each time: they are compiled once
    return [random_case(fixed, i) for i in range(60)]


@needs_compiler
def test_random_regions(rng: np.random.Generator) -> None:
    cases = random_cases()
    check(cases, rng)
    assert all(case.kernel is not None and len(case.kernel.launches) <= 1 for case in cases)


def enormous(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Regions reach far outside of the image, on both sides or on one, up to infinity."""
    if type.rank != 2:
        return regions(rng, type)
    far = rng.choice([20.0, 300.0, 1e4, 1e6, 1e12, 3e38, np.inf], type.shape)
    near = rng.random(type.shape) < 0.3
    signs = np.array([-1, -1, 1, 1])
    return np.where(near, rng.uniform(0, 9, type.shape), far * signs).astype(type.dtype.numpy)


def enormous_case(number: int) -> Case:
    x, mode = rows(F32, 2, 3, 5 + number, 7), ("avg", "max")[number % 2]
    op = RoiAlign((2, 3), 0, mode, 1.0, bool(number % 3))
    types = [x, rows(F32, 40, 4), rows(DType.I64, 40)]
    return build(f"{number} {op}", types, lambda g, *v: g.add(op, *v), enormous)


@needs_compiler
def test_samples_outside_of_the_image_are_skipped(rng: np.random.Generator) -> None:
    check([enormous_case(number) for number in range(6)], rng)
