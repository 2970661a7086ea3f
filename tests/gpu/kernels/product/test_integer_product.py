"""Test the kernel of integer matrix products against the reference, through the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.kernels.cases import Case, build, check, rows
from gpu.kernels.emulator import needs_compiler

from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Cast, MatMul, pw
from fusec.ops.matmul import INTEGERS


def whole_range(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Draw from all bits of the type, so that nearly every sum wraps around."""
    return rng.integers(0, 256, (*type.shape, type.dtype.itemsize), np.uint8).view(type.dtype.numpy)[..., 0]


def product(a: TensorType, b: TensorType) -> Case:
    return build(f"{a} @ {b}", [a, b], lambda g, x, y: g.add(MatMul(), x, y), whole_range, exact=True)


def integer_cases() -> list[Case]:
    cases = [product(rows(t, 5, 7), rows(t, 7, 3)) for t in (*INTEGERS, DType.I8)]
    shapes = [
        ((2, 1, 3, 4), (6, 4, 5)),
        ((4, 1), (1, 4)),
        ((1, 9), (9, 1)),
        ((3, 1, 2), (1, 2, 1)),
        ((2, 300), (300, 2)),
    ]
    cases += [product(rows(DType.I32, *a), rows(DType.I32, *b)) for a, b in shapes]
    cases += [
        product(rows(DType.I64, 3, 0), rows(DType.I64, 0, 2)),
        product(rows(DType.I64, 0, 3), rows(DType.I64, 3, 2)),
    ]
    turned = TensorType((2, 7, 3), DType.I64, (0, 2, 1))
    cases.append(product(rows(DType.I64, 5, 7), turned))
    cases.append(product(TensorType((2, 5, 7), DType.U32, (1, 2, 0)), rows(DType.U32, 2, 7, 3)))
    square = rows(DType.I32, 4, 4)
    cases.append(build("itself", [square], lambda g, x: g.add(MatMul(), x, x), whole_range, exact=True))
    cases.append(build("after it", [square, square, rows(DType.I32, 4)], shifted, whole_range, exact=True))
    return cases


def shifted(g: Graph, a: Value, b: Value, c: Value) -> list[Value]:
    y = g.add(MatMul(), a, b)
    return [y, g.add(Cast(DType.F32), g.add(pw("add"), y, c))]


@needs_compiler
def test_integer_products_are_exact(rng: np.random.Generator) -> None:
    check(integer_cases(), rng)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64])
def test_products_of_floats_are_left_alone(dtype: DType) -> None:
    assert product(rows(dtype, 5, 7), rows(dtype, 7, 3)).kernel is None
