"""Import reductions. Axes are an attribute in older versions and an operand in newer ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, OpFunction, Table, axes_of
from fusec.ir import DType, TensorType, Value
from fusec.ops import Reduce
from fusec.ops.spec import require

# Results of floats where there are no elements, by the kinds that the IR does not compute there.
_EMPTY = {"max": -math.inf, "min": math.inf, "log_sum_exp": -math.inf, "mean": math.nan}


def _reduce(g: Emitter, kind: str, x: Value, axes: Sequence[int], keepdims: int) -> Value:
    dims = axes_of(axes, x.type.rank)
    if kind in ("max", "min") and x.type.dtype is DType.BOOL:  # any, all
        return g.cast(_reduce(g, kind, g.cast(x, DType.U8), axes, keepdims), DType.BOOL)
    if kind in ("l2", "log_sum", "log_sum_exp") and x.type.dtype.is_int:  # a root or logarithm, rounded towards 0
        return g.cast(_reduce(g, kind, g.cast(x, DType.F64), axes, keepdims), x.type.dtype)
    if any(x.type.shape[d] == 0 for d in dims) and kind in _EMPTY:
        return _of_no_elements(g, kind, x, dims, keepdims)
    return g(Reduce(kind, dims, bool(keepdims)), x)


def _of_no_elements(g: Emitter, kind: str, x: Value, dims: Sequence[int], keepdims: int) -> Value:
    """Return what no elements reduce to: the smallest value of the dtype for a maximum, the largest for a minimum.

    ONNX leaves the mean open. It is NaN, as in NumPy and torch.
    """
    is_order, dtype = kind in ("max", "min"), x.type.dtype
    require(dtype.is_float or (is_order and dtype.is_int), f"{kind} of no {dtype.value}")
    shape = [1 if d in dims else n for d, n in enumerate(x.type.shape) if keepdims or d not in dims]
    if dtype.is_float:
        element = np.array(_EMPTY[kind]).astype(dtype.numpy)
    else:
        info = np.iinfo(dtype.numpy)
        element = np.array(info.max if kind == "min" else info.min, dtype.numpy)
    return g.full(TensorType(tuple(shape), x.type.dtype), element)


def _by_attribute(kind: str) -> OpFunction:
    def emit(g: Emitter, x: Value, /, *, axes: Sequence[int] = (), keepdims: int = 1) -> Value:
        return _reduce(g, kind, x, axes or range(x.type.rank), keepdims)

    return emit


def _by_operand(kind: str) -> OpFunction:
    def emit(
        g: Emitter, x: Value, axes: Value | None = None, /, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Value:
        given = () if axes is None else g.ints(axes, "axes")
        # over no axes, only the pointwise part of the reduction is computed (the square of sum_square)
        every = () if noop_with_empty_axes else range(x.type.rank)
        return _reduce(g, kind, x, given or every, keepdims)

    return emit


_KINDS = {
    "ReduceL1": "l1",
    "ReduceL2": "l2",
    "ReduceLogSum": "log_sum",
    "ReduceLogSumExp": "log_sum_exp",
    "ReduceMax": "max",
    "ReduceMean": "mean",
    "ReduceMin": "min",
    "ReduceProd": "prod",
    "ReduceSum": "sum",
    "ReduceSumSquare": "sum_square",
}

TABLE: Table = {
    **{(op, 1): _by_attribute(kind) for op, kind in _KINDS.items()},
    **{(op, 13 if op == "ReduceSum" else 18): _by_operand(kind) for op, kind in _KINDS.items()},
}
