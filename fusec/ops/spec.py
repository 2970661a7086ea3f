"""Share code among ops: checks that give a reason, broadcasting, and the precision of references."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fusec.errors import VerifyError
from fusec.ir import Array, DType, TensorType


def require(condition: bool, reason: str) -> None:
    """Raise VerifyError(reason) unless the condition holds."""
    if not condition:
        raise VerifyError(reason)


def require_arity(op: str, operands: Sequence[TensorType], low: int, high: int | None = None) -> None:
    """Check the number of operands: exactly `low`, or `low` to `high`."""
    high = low if high is None else high
    if not low <= len(operands) <= high:
        count = f"{low}" if low == high else f"{low} to {high}"
        raise VerifyError(f"{op} takes {count} operands, not {len(operands)}")


def require_float(op: str, *operands: TensorType) -> None:
    """Check that the operands are floating point, all of one dtype."""
    for t in operands:
        require(t.dtype.is_float, f"{op} takes floating-point operands, not {t.dtype.value}")
        require(t.dtype == operands[0].dtype, f"operands differ in dtype: {', '.join(o.dtype.value for o in operands)}")


def product_dtype(op: str, a: TensorType, b: TensorType) -> DType:
    """Return the dtype of a sum of products: that of floating-point operands, or i32 for operands of i8."""
    require(a.dtype == b.dtype, f"operands differ in dtype: {a.dtype.value}, {b.dtype.value}")
    require(a.dtype.is_float or a.dtype is DType.I8, f"{op} takes floating-point or i8 operands, not {a.dtype.value}")
    return DType.I32 if a.dtype is DType.I8 else a.dtype


def normalize_axis(axis: int, rank: int) -> int:
    """Return an axis in 0..rank-1; negative ones count from the end."""
    require(-rank <= axis < rank, f"axis {axis} is out of range for rank {rank}")
    return axis % rank


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Broadcast shapes as NumPy does. Raises VerifyError if they do not agree."""
    if len(set(shapes)) == 1:
        return shapes[0]
    rank = max(map(len, shapes), default=0)
    result: list[int] = []
    for sizes in zip(*((1,) * (rank - len(s)) + s for s in shapes), strict=True):
        wide = {*sizes} - {1}
        if len(wide) > 1:
            raise VerifyError(f"shapes {', '.join(str(list(s)) for s in shapes)} do not broadcast")
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Tell if a shape broadcasts to `target` and not beyond it."""
    lead = len(target) - len(shape)
    return lead >= 0 and all(d in (1, full) for d, full in zip(shape, target[lead:], strict=True))


def result_order(shape: tuple[int, ...], operands: Sequence[TensorType]) -> tuple[int, ...]:
    """Return the memory order of a pointwise result: that of the first operand with the shape of the result."""
    return next((t.order for t in operands if t.shape == shape), ())


def is_half(x: Array) -> bool:
    """Tell if an array is of f16 or bf16, which references compute in f32."""
    return x.dtype.itemsize == 2 and DType.of(x.dtype).is_float


def wide(x: Array) -> Array:
    """Convert f16 and bf16 to f32; other arrays are returned as they are."""
    return x.astype(np.float32) if is_half(x) else x


def widened(compute: Callable[..., Array], *operands: Array) -> Array:
    """Compute in f32 if the first operand is f16 or bf16, and round the result once.

    NaN and infinity follow IEEE, without a warning.
    """
    with np.errstate(all="ignore"):
        if not is_half(operands[0]):
            return compute(*operands)
        return compute(*map(wide, operands)).astype(operands[0].dtype)


def summed(compute: Callable[..., Array], *operands: Array) -> Array:
    """Compute sums of products as `widened` does; those of 8 bits in float64, which is exact for most.

    Sums of integers wrap around in i32, and those of f8e4m3 are rounded to f32 once. float64's products are the fastest
    that NumPy has for them.
    """
    if operands[0].dtype == DType.F8E4M3.numpy:
        return compute(*(v.astype(np.float32).astype(np.float64) for v in operands)).astype(np.float32)
    if operands[0].dtype != np.int8:
        return widened(compute, *operands)
    return compute(*(v.astype(np.float64) for v in operands)).astype(np.int64).astype(np.int32)


def per_channel(x: Array, v: Array) -> Array:
    """Reshape a vector of channels, so that it broadcasts to x[N, C, spatial…]."""
    return v.reshape(1, -1, *([1] * (x.ndim - 2)))


def special(xp: Any) -> Any:
    """Return the special functions of the array module."""
    return importlib.import_module("scipy.special" if xp is np else "cupyx.scipy.special")
