"""Write logarithms, exponentials and running results of torch so that neither they nor their digits are lost.

torch's ONNX exporter writes `log1p(x)` as log(1 + x) and `expm1(x)` as exp(x) - 1, which round small numbers away. It
writes `logcumsumexp` as the logarithm of a running sum, which overflows. It has no function for `cumprod`, nor for the
checks of bools that torch writes for `bool(x.all())`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch  # pyright: ignore[reportMissingImports] - an extra, and absent where the code is checked
from torch.nn import functional  # pyright: ignore[reportMissingImports] - as above

NEAR_ZERO = 0.25  # up to here series are summed
TERMS = {torch.float64: (10, 13)}  # of the series of log1p and expm1, so that more would be rounded away
FEWER_TERMS = (5, 7)  # in fp32


def precise_ops() -> Mapping[Any, Callable[..., Any]]:
    """Return the functions that stand for torch's ops."""
    aten: Any = torch.ops.aten
    return {
        aten.log_sigmoid.default: log_sigmoid,
        aten.logaddexp.default: log_add_exp,
        aten.log1p.default: log1p,
        **dict.fromkeys((aten.expm1.default, aten.special_expm1.default), expm1),
        aten.special_xlog1py.default: x_log1p,
        aten.logcumsumexp.default: log_cum_sum_exp,
        aten.cumprod.default: cum_prod,
        aten._is_all_true.default: torch.all,
        aten._is_any_true.default: torch.any,
    }


def log_sigmoid(x: Any) -> Any:
    """Compute `functional.logsigmoid`; the exporter's logarithm of a sigmoid is -inf where that underflows."""
    return -functional.softplus(-x)


def log_add_exp(a: Any, b: Any) -> Any:
    """Compute `torch.logaddexp`; the exporter's exponentials overflow."""
    apart = torch.where(a == b, 0.0, -(a - b).abs())  # because the difference of equal infinities is NaN
    return torch.maximum(a, b) + log1p(torch.exp(apart))


def log1p(x: Any) -> Any:
    """Compute `torch.log1p`: near zero by a series of s = x / (2 + x), as log(1 + x) = 2 artanh(s)."""
    wide, stored = _wide(x)
    s = wide / (2 + wide)
    square = s * s
    odd = range(1, 2 * _terms(wide)[0], 2)
    whole = math.lcm(*odd)  # because the exporter rounds numbers to fp32, but no integer below 2**24
    total: Any = 0
    for n in reversed(odd):
        total = total * square + whole // n
    return torch.where(wide.abs() < NEAR_ZERO, 2 * s * (total / whole), torch.log(1 + wide)).to(stored)


def expm1(x: Any) -> Any:
    """Compute `torch.expm1`: near zero by its series."""
    wide, stored = _wide(x)
    total: Any = 1.0
    for n in reversed(range(2, _terms(wide)[1] + 1)):
        total = 1 + wide / n * total
    return torch.where(wide.abs() < NEAR_ZERO, wide * total, torch.exp(wide) - 1).to(stored)


def x_log1p(x: Any, y: Any) -> Any:
    """Compute `torch.special.xlog1py`, which is 0 for x = 0 unless y is NaN."""
    return torch.where((x == 0) & (y == y), 0.0, x * log1p(y))


def log_cum_sum_exp(x: Any, dim: int) -> Any:
    """Compute `torch.logcumsumexp`; the exporter's exponentials overflow and underflow."""
    wide, stored = _wide(x)
    return _running(wide, dim, -math.inf, log_add_exp).to(stored)


def cum_prod(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """Compute `torch.cumprod`, for which the exporter has no function."""
    if dtype is None and not x.is_floating_point():
        dtype = torch.int64
    given = x if dtype is None else x.to(dtype)
    wide, stored = _wide(given) if given.is_floating_point() else (given, given.dtype)
    return _running(wide, dim, 1, torch.mul).to(stored)


def _running(x: Any, dim: int, start: float, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine each element with all before it, in as many rounds as their number has binary digits.

    start: the number that changes nothing.

    Raises ValueError for a symbolic number of elements, because the number of rounds depends on it.
    """
    if x.dim() == 0:
        return x
    size, step = x.shape[dim], 1
    if isinstance(size, torch.SymInt):
        raise ValueError(f"a running product, or logarithm of a sum, along a symbolic dim is not supported: {size}")
    while step < size:
        first = torch.full_like(x.narrow(dim, 0, step), start)
        x = combine(torch.cat([first, x.narrow(dim, 0, size - step)], dim), x)
        step *= 2
    return x


def _wide(x: Any) -> tuple[Any, Any]:
    """Return a tensor in the type that floats are computed in, and the type of the result."""
    stored = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return (x if x.dtype is torch.float64 else x.to(torch.float32)), stored


def _terms(x: Any) -> tuple[int, int]:
    return TERMS.get(x.dtype, FEWER_TERMS)
