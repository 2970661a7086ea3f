"""Test the kernel of non-maximum suppression against the reference, through the emulator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check
from gpu.kernels.emulator import needs_compiler

from fusec.gpu.kernels.selection.suppression_plan import SuppressionPlan
from fusec.ir import DType, TensorType, Value
from fusec.ops import NonMaxSuppression

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
# Few processors have few blocks, of which each compares several columns one after the other.
SMALL = replace(FIGURES, shared_bytes=(3 << 10) + (4 << 10))  # has room for keys of 512 boxes, or for answers of 192


def boxes(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Many boxes are equal or touch, corners come in any order, some have no area, and many scores are equal."""
    if type.shape[-1] == 4:
        drawn = np.concatenate(
            [rng.integers(0, 12, (*type.shape[:-1], 2)), rng.integers(-3, 8, (*type.shape[:-1], 2))], -1
        )
        return (drawn + rng.integers(0, 2) * rng.standard_normal(drawn.shape)).astype(type.dtype.numpy)
    drawn = rng.choice(rng.standard_normal(9), type.shape) if rng.integers(2) else rng.standard_normal(type.shape)
    drawn = np.where(rng.random(type.shape) < 0.1, rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan], type.shape), drawn)
    return drawn.astype(type.dtype.numpy)


def suppression(
    op: NonMaxSuppression, images: int, classes: int, count: int, dtype: Any = F32, order: tuple[int, ...] = ()
) -> Case:
    types = [TensorType((images, count, 4), dtype, order), TensorType((images, classes, count), dtype, order)]

    def make(g: Any, *operands: Value) -> tuple[Value, ...]:
        return g.insert(op, operands).results

    return build(f"{op} {types}", types, make, boxes)


def random_case(rng: np.random.Generator, number: int) -> Case:
    count = int(rng.choice([1, 5, 63, 64, 65, 130, 300, 700]))
    op = NonMaxSuppression(
        int(rng.choice([1, 3, 70, 1 << 40])),
        float(np.float32(rng.choice([0.0, 0.3, 0.5, 0.9, 1.0]))),
        float(rng.choice([-math.inf, 0.0, 0.5, 9.0])),
        bool(number % 2),
    )
    orders = ((), (0, 2, 1), (1, 2, 0))
    case = suppression(
        op,
        int(rng.integers(1, 4)),
        int(rng.integers(1, 4)),
        count,
        (F32, F32, F16, BF16)[number % 4],
        orders[number % 3],
    )
    small = SMALL if number % 2 else replace(SMALL, processors=1)
    return replace(case, figures=small if number % 3 == 0 else FIGURES)


def random_cases() -> list[Case]:
    fixed = np.random.default_rng(17)  # the same sources each time: they are compiled once
    return [random_case(fixed, i) for i in range(40)]


@needs_compiler
def test_random_boxes(rng: np.random.Generator) -> None:
    cases = random_cases()
    plans = [SuppressionPlan.of(case.graph.inputs[0].type.shape[1], 1, case.figures) for case in cases]
    assert {plan.spills for plan in plans} == {False, True}, "keys are in shared memory, or in scratch memory"
    assert {plan.panels > 1 for plan in plans} == {False, True}, "boxes are compared together, or by panels"
    check(cases, rng)


@needs_compiler
def test_boxes_of_later_panels(rng: np.random.Generator) -> None:
    """With the figures of a real GPU, boxes are compared with those that were chosen in two panels before."""
    cases = [
        suppression(NonMaxSuppression(most, 0.4, least), 1, 2, 2100) for most, least in ((2100, -math.inf), (900, 0.0))
    ]
    assert all(case.kernel is not None and len(case.kernel.launches) == 8 for case in cases)
    check(cases, rng)


def nested(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Draw boxes with a corner in common, whose overlap is the quotient of their widths; any box may be the best."""
    if type.shape[-1] == 4:
        widths = rng.integers(1, 60, type.shape[:-1])
        zeros = np.zeros_like(widths)
        return np.stack([zeros, zeros, np.ones_like(widths), widths], -1).astype(type.dtype.numpy)
    return rng.standard_normal(type.shape).astype(type.dtype.numpy)


@needs_compiler
@pytest.mark.parametrize("iou", [0.0, 0.1, 1 / 3, 0.4, 0.5, 2 / 3, 0.7, 1.0])
def test_an_overlap_next_to_the_limit_is_rounded_as_a_quotient(rng: np.random.Generator, iou: float) -> None:
    """A quotient that rounds to the limit is not above it, whichever of the two is larger."""
    cases = [
        replace(suppression(NonMaxSuppression(300, float(limit)), 2, 1, 300), draw=nested)
        for limit in (np.float32(iou), np.nextafter(np.float32(iou), np.float32(2)))
    ]
    check(cases, rng)


def test_another_batch_needs_no_other_source() -> None:
    op = NonMaxSuppression(10, 0.5)
    one, eight = (suppression(op, images, 3, 100).kernel for images in (1, 8))
    assert one is not None and eight is not None
    assert [a.source for a in one.launches] == [b.source for b in eight.launches]
    assert [b.grid for b in eight.launches] == [8 * a.grid for a in one.launches]


def test_one_image_fills_the_gpu_and_many_classes_do_not_queue() -> None:
    """Blocks that compare are shared out to the classes, because most of them have nothing to do in later panels."""
    for images, classes in ((1, 1), (1, 80), (8, 80)):
        kernel = suppression(NonMaxSuppression(100, 0.5), images, classes, 8400).kernel
        assert kernel is not None
        compare = kernel.launches[1].grid
        resident = FIGURES.processors * FIGURES.processor_threads // kernel.launches[1].block
        assert 128 <= compare <= max(resident, images * classes)


@pytest.mark.parametrize("dtype", [DType.F64])
def test_what_has_no_kernel(dtype: DType) -> None:
    assert suppression(NonMaxSuppression(10, 0.5), 1, 1, 9, dtype).kernel is None
    assert suppression(NonMaxSuppression(0, 0.5), 1, 1, 9).kernel is None
    assert suppression(NonMaxSuppression(9, 0.5), 1, 1, (1 << 17) + 1).kernel is None
