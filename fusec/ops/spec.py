"""Share code among ops: checks that give a reason, broadcasting, and precision of the reference."""

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
    count = f"{low}" if low == high else f"{low} to {high}"
    require(low <= len(operands) <= high, f"{op} takes {count} operands, not {len(operands)}")


def require_float(op: str, *operands: TensorType) -> None:
    """Check that the operands are floating point, all of one dtype."""
    for t in operands:
        require(t.dtype.is_float, f"{op} takes floating-point operands, not {t.dtype.value}")
        require(t.dtype == operands[0].dtype, f"operands differ in dtype: {', '.join(o.dtype.value for o in operands)}")


def normalize_axis(axis: int, rank: int) -> int:
    """Return an axis in 0..rank-1; negative ones count from the end."""
    require(-rank <= axis < rank, f"axis {axis} is out of range for rank {rank}")
    return axis % rank


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Broadcast shapes as NumPy does.

    Raises VerifyError: when they do not agree.
    """
    rank = max(map(len, shapes), default=0)
    result: list[int] = []
    for dim in range(-rank, 0):
        sizes = {s[dim] for s in shapes if len(s) >= -dim}
        wide = sizes - {1}
        require(len(wide) <= 1, f"shapes {', '.join(str(list(s)) for s in shapes)} do not broadcast")
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def result_order(shape: tuple[int, ...], operands: Sequence[TensorType]) -> tuple[int, ...]:
    """Return the memory order of a pointwise result: that of the first operand of the whole shape."""
    return next((t.order for t in operands if t.shape == shape), ())


def is_half(x: Array) -> bool:
    """Return True for an array of f16 or bf16: stored in 16 bits, computed in f32."""
    return x.dtype.itemsize == 2 and DType.of(x.dtype).is_float


def widened(compute: Callable[..., Array], *operands: Array) -> Array:
    """Apply `compute` to the operands; 16-bit floats are raised to f32 and the result is rounded back once.

    NaN and infinity come out as IEEE says, without a warning.
    """
    with np.errstate(all="ignore"):
        if not is_half(operands[0]):
            return compute(*operands)
        wide = [x.astype(np.float32) if is_half(x) else x for x in operands]
        return compute(*wide).astype(operands[0].dtype)


def special(xp: Any) -> Any:
    """Return the special functions of the array module."""
    return importlib.import_module("scipy.special" if xp is np else "cupyx.scipy.special")
