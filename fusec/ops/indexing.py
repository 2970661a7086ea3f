"""Define ops that order elements or place them by index: top_k, scatter, and running sums, products and recurrences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from fusec.ir import Array, DType, Op, TensorType
from fusec.ops.spec import normalize_axis, require, require_arity, require_float, wide, widened
from fusec.system.dataclass import dataclass

REDUCTIONS = ("none", "add", "mul", "max", "min")
_COMBINE: Mapping[str, Callable[[Any], Any]] = {
    "add": lambda xp: xp.add,
    "mul": lambda xp: xp.multiply,
    "max": lambda xp: xp.maximum,
    "min": lambda xp: xp.minimum,
}


@dataclass(frozen=True)
class TopK(Op):
    """The `k` largest (or smallest) elements along `axis`, and their i64 indices; the first of equal elements wins."""

    k: int
    axis: int = -1
    largest: bool = True
    name: ClassVar[str] = "top_k"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        x = operands[0]
        axis = normalize_axis(self.axis, x.rank)
        require(x.dtype.is_float or x.dtype.is_int, f"top_k takes numbers, not {x.dtype.value}")
        require(0 <= self.k <= x.shape[axis], f"k is {self.k}, axis {axis} has {x.shape[axis]} elements")
        shape = (*x.shape[:axis], self.k, *x.shape[axis + 1 :])
        return (TensorType(shape, x.dtype), TensorType(shape, DType.I64))

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        x, axis = operands[0], self.axis % operands[0].ndim
        key = wide(x)
        if self.largest:  # a stable sort of the flipped array, so that the first of equal elements stays first
            order = xp.flip(xp.argsort(xp.flip(key, axis), axis=axis, kind="stable"), axis)
            order = x.shape[axis] - 1 - order
        else:
            order = xp.argsort(key, axis=axis, kind="stable")
        order = order[(slice(None),) * axis + (slice(0, self.k),)].astype(xp.int64)
        return (xp.take_along_axis(x, order, axis=axis), order)


@dataclass(frozen=True)
class Scatter(Op):
    """Rows of x[P, …] replaced by (or combined with) updates[N, …] at indices[N]; negative ones count from the end.

    `reduction`: none (of duplicates any may win), add, mul, max, min.
    """

    reduction: str = "none"
    name: ClassVar[str] = "scatter"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 3)
        x, indices, updates = operands
        require(self.reduction in REDUCTIONS, f"scatter knows no reduction {self.reduction!r}")
        require(x.rank >= 1, "scatter takes no scalars")
        require(indices.dtype.is_int and indices.rank == 1, f"indices are {indices}, not a list of integers")
        require(updates.dtype is x.dtype, f"operands differ in dtype: {x.dtype.value}, {updates.dtype.value}")
        numbers = x.dtype.is_float or x.dtype.is_int
        require(self.reduction == "none" or numbers, f"scatter {self.reduction} takes numbers, not {x.dtype.value}")
        wanted = (*indices.shape, *x.shape[1:])
        require(updates.shape == wanted, f"updates of shape {list(updates.shape)}, not {list(wanted)}")
        require(x.shape[0] > 0 or indices.size == 0, "scatter into an empty dim")
        return (TensorType(x.shape, x.dtype),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(x: Array, indices: Array, updates: Array) -> Array:
            _require_rows(xp, x, indices)
            result, at = xp.array(x, copy=True), indices.astype(xp.int64)
            at = xp.where(at < 0, at + len(x), at)
            if xp is np or (self.reduction == "add" and x.dtype.char in "fdiIL"):
                _COMBINE[self.reduction](xp).at(result, at, updates)
            else:  # one by one, because CuPy has few of these methods, and not for all types
                for i in range(len(at)):
                    place = at[i : i + 1]
                    result[place] = _COMBINE[self.reduction](xp)(result[place], updates[i : i + 1])
            return result

        if self.reduction == "none":
            x, indices, updates = operands
            result = xp.array(x, copy=True)
            self.write_rows(xp, result, indices, updates)
            return (result,)
        return (widened(compute, *operands),)

    def write_rows(self, xp: Any, x: Array, indices: Array, updates: Array) -> None:
        """Replace rows of x itself, as the op without a reduction replaces them in a copy; one assignment."""
        _require_rows(xp, x, indices)
        bits = np.dtype(f"u{x.dtype.itemsize}")  # because CuPy does not index every type, such as bf16
        x.view(bits)[indices] = updates.view(bits)


def _require_rows(xp: Any, x: Array, indices: Array) -> None:
    """Raise IndexError for a row that x lacks. A GPU is not asked, because the host would have to wait for it."""
    if xp is np and indices.size and (indices.min() < -len(x) or indices.max() >= len(x)):
        raise IndexError(f"scatter has an index outside 0..{len(x) - 1}")


@dataclass(frozen=True)
class Cumulate(Op):
    """Running `sum` or `prod` along `axis`, each element included."""

    kind: str
    axis: int
    name: ClassVar[str] = "cumulate"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        x = operands[0]
        require(self.kind in ("sum", "prod"), f"cumulate knows no kind {self.kind!r}")
        require(x.dtype.is_float or x.dtype.is_int, f"cumulate takes numbers, not {x.dtype.value}")
        normalize_axis(self.axis, x.rank)
        return (x,)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(x: Array) -> Array:
            running = xp.cumsum if self.kind == "sum" else xp.cumprod
            return running(x, axis=self.axis, dtype=x.dtype)

        return (widened(compute, *operands),)


@dataclass(frozen=True)
class LinearScan(Op):
    """Linear recurrence h_t = a_t h_{t-1} + b_t along `axis`, from h = 0. The result is every h_t."""

    axis: int
    name: ClassVar[str] = "linear_scan"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 2)
        a, b = operands
        require_float(self.name, a, b)
        require((a.shape, a.dtype) == (b.shape, b.dtype), f"linear_scan takes equal types, not {a} and {b}")
        normalize_axis(self.axis, a.rank)
        return (TensorType(a.shape, a.dtype),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(a: Array, b: Array) -> Array:
            factors, terms = (xp.moveaxis(v, self.axis, 0) for v in (a, b))
            result = xp.zeros(factors.shape, a.dtype)
            state = xp.zeros(factors.shape[1:], a.dtype)
            for t in range(len(factors)):
                state = factors[t] * state + terms[t]
                result[t] = state
            return xp.ascontiguousarray(xp.moveaxis(result, 0, self.axis))

        return (widened(compute, *operands),)
