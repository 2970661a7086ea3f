"""Test kernels over tensors that lie within larger ones, read and written: the same numbers, and nothing in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.attention.cached import test_rotary
from gpu.kernels.cases import Case, check
from gpu.kernels.convolution import test_depthwise, test_few_channels, test_few_filters, test_split_k
from gpu.kernels.elementwise import test_gather_resize, test_pointwise, test_relayout
from gpu.kernels.emulator import needs_compiler
from gpu.kernels.norm import test_instance_norm, test_row_reduction
from gpu.kernels.pooling import test_pool_forward

from fusec.ir import DType, TensorType
from fusec.passes.partition.concat_in_place import ALIGNMENT_BYTES

FAMILIES: dict[str, Callable[[], list[Case]]] = {
    "depthwise": test_depthwise.random_cases,
    "few channels": test_few_channels.random_cases,
    "few channels, pooled": lambda: [*test_few_channels.pooled_cases(), *test_few_channels.pooled_cases(DType.BF16)],
    "few filters": test_few_filters.random_cases,
    "few pixels": test_split_k.few_cases,
    "instance norms": test_instance_norm.cases,
    "moves": test_relayout.move_cases,
    "pooling": test_pool_forward.random_cases,
    "shapes": test_pointwise.shape_cases,
    "rotary": test_rotary.cases,
    "rows": lambda: [*test_row_reduction.reductions(), *test_row_reduction.normed(), *test_row_reduction.surrounded()],
    "sampled": lambda: [*test_gather_resize.resize_cases(), *test_gather_resize.pad_cases()],
}
MOST = 16  # of each: compiling takes time


def widened(type: TensorType, dim: int, by: int) -> TensorType:
    """Return the type as a part of memory that has `by` more elements along a dim."""
    return replace(type, within=tuple(d + by if i == dim else d for i, d in enumerate(type.shape)))


def placed(case: Case, rng: np.random.Generator) -> Case | None:
    """The case with what it reads and writes within something larger, aligned as concats in place see to it."""
    outputs, changed = set(case.outputs), 0
    for value in case.graph.values():
        if value.literal is None and (value.node is None or value in outputs) and value.type.rank:
            dim = 1 if value.type.rank > 1 and rng.random() < 0.7 else int(rng.integers(value.type.rank))
            wider, itemsize = widened(value.type, dim, int(rng.choice([8, 16]))), value.type.dtype.itemsize
            outer = [stride for stride in wider.strides if stride > wider.strides[dim]]
            if all(stride * itemsize % ALIGNMENT_BYTES == 0 for stride in outer):
                case.graph.set_type(value, wider)
                changed += 1
    return case if changed and case.kernel is not None else None


@needs_compiler
@pytest.mark.parametrize("family", list(FAMILIES))
def test_parts_of_larger_tensors(family: str, rng: np.random.Generator) -> None:
    fixed = np.random.default_rng(11)  # the same sources each time: they are compiled once
    made = FAMILIES[family]()
    cases = [case for case in made[:: -(-len(made) // MOST)] if case.kernel is not None]
    found = [again for case in cases if (again := placed(case, fixed)) is not None]
    assert len(found) >= 5
    check(found, rng)
