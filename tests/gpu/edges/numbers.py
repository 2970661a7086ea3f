"""Edge values of each element type, their names, and rows of them for ops that reduce."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from fusec.ir import DType

Array = np.ndarray[Any, Any]


def edges(dtype: DType) -> Array:
    """Sixteen values: every kind of float there is, or the ends of an integer type and what lies around zero."""
    if dtype is DType.BOOL:
        return np.array([False, True] * 8)
    if dtype.is_int:
        info = np.iinfo(dtype.numpy)
        near = [0, 1, 2, 3, 7, 31, 33, info.max // 2, info.max - 1, info.max]
        signed = [-1, -2, -7, info.min, info.min + 1, info.min // 2] if info.min else [4, 5, 6, 8, 15, 64]
        return np.array(near + signed, dtype.numpy)
    info = ml_dtypes.finfo(dtype.numpy)
    most, least, low = float(info.max), float(info.tiny), float(info.smallest_subnormal)
    kinds = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -1.0, most, -most, least, -least, low, -low, least - low]
    return np.array([*kinds, 2.5, -0.5]).astype(dtype.numpy)


def more(dtype: DType) -> Array:
    """Forty-eight values: the edges, then where functions saturate, overflow or round."""
    if not dtype.is_float:
        return np.tile(edges(dtype), 3)
    far = [88.0, -88.0, 89.5, -104.0, 20.0, -20.0, 11.0, -11.0, 1e4, -1e4, 1e-3, -1e-3, 0.5, 1.5, -1.5, -2.5]
    near = [2.0, -2.0, 3.0, -3.0, 6.0, -6.0, 0.25, -0.25, 0.999, -0.999, 127.0, -127.0, 1e-6, -1e-6, 300.0, -300.0]
    return np.concatenate([edges(dtype), np.array(far + near).astype(dtype.numpy)])


def name(value: Any, dtype: DType) -> str:
    """Return the name of a value in a table of differences."""
    if not dtype.is_float:
        return str(value)
    number, info = float(value), ml_dtypes.finfo(dtype.numpy)
    sign, size = "-" if np.signbit(number) else "", abs(number)
    if np.isnan(number):
        return "nan"
    if np.isinf(number):
        return f"{sign}inf"
    if size == float(info.max):
        return f"{sign}max"
    if size == float(info.tiny):
        return f"{sign}least"
    if 0 < size < float(info.tiny):
        return f"{sign}denormal"
    return f"{sign}0" if size == 0 else f"{number:.4g}"


def plain(width: int, dtype: DType) -> Array:
    """Small numbers that add up to little, in any order exactly."""
    return np.resize(np.array([1.0, -2.0, 0.5, 1.0, -0.5, 2.0, -1.0, -1.0]), width).astype(dtype.numpy)


def rows(dtype: DType, width: int) -> tuple[list[str], Array]:
    """Rows to reduce, normalise or attend with, and their names."""
    info = ml_dtypes.finfo(dtype.numpy)
    most, least, low = float(info.max), float(info.tiny), float(info.smallest_subnormal)
    base = plain(width, dtype).astype(np.float64)
    made: dict[str, Array] = {"plain": base, "equal": np.full(width, 2.0), "zeros": np.zeros(width)}
    made["minus zeros"] = -np.zeros(width)
    kinds = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "max": most, "-max": -most}
    kinds |= {"least": least, "smallest": low, "denormal": least - low}
    for kind, value in kinds.items():
        one = base.copy()
        one[3] = value
        made[f"one {kind}"], made[f"all {kind}"] = one, np.full(width, value)
    both = base.copy()
    both[[2, 5]] = np.inf, -np.inf
    made["inf and -inf"] = both
    both = np.zeros(width)  # whose order of summation is nothing to speak of
    both[[2, 5]] = most, -most
    made["max and -max"] = both
    rest = np.full(width, -np.inf)
    rest[4] = 1.0
    made["all -inf but one"] = rest
    rest = np.full(width, np.nan)
    rest[4] = 1.0
    made["all nan but one"] = rest
    return list(made), np.stack(list(made.values())).astype(dtype.numpy)
