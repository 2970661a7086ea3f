"""Test the mask of a relu after a batch norm: it follows the norm's result as stored, not as computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu.kernels.cases import Case, build, check, last, rows
from gpu.kernels.emulator import needs_compiler

from fusec.ir import DType, TensorType, Value
from fusec.ops import BatchNormBackward


def masked(g: Any, *v: Value) -> Any:
    return g.insert(BatchNormBackward(True), list(v)).results


def vanishing(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """All of the norm's results are a little above zero, which is zero in 16 bits."""
    array = rng.standard_normal(type.shape)
    return (array if type.rank > 1 else np.full(type.shape, 1e-9)).astype(type.dtype.numpy)


def cases() -> list[Case]:
    found: list[Case] = []
    for kind in (last, rows):
        x = kind(DType.F16, 3, 16, 5, 3)
        parameters = [rows(DType.F32, 16)] * 4  # scale, mean, inverse deviation, bias
        found.append(build(f"masked {kind.__name__}", [x, x, *parameters], masked, vanishing))
    return found


@needs_compiler
def test_a_result_that_is_zero_where_it_is_stored_was_masked(rng: np.random.Generator) -> None:
    check(cases(), rng)
    for case in cases():
        assert not any(gradient.any() for gradient in case.reference(case.arrays(rng)))
