"""Define reductions over axes, softmax and log-softmax, and the test that tensors hold only finite numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from fusec.ir import Array, DType, Op, TensorType
from fusec.ops.spec import normalize_axis, require, require_arity, require_float, wide, widened
from fusec.system.dataclass import dataclass


def _logsumexp(xp: Any, x: Array, axes: tuple[int, ...]) -> Array:
    top = x.max(axis=axes, keepdims=True)
    top = xp.where(xp.isfinite(top), top, 0.0)
    return xp.log(xp.exp(x - top).sum(axis=axes, keepdims=True)) + top


# Each keeps the reduced dims, with size 1.
_KINDS: Mapping[str, Callable[[Any, Array, tuple[int, ...]], Array]] = {
    "sum": lambda xp, x, axes: x.sum(axis=axes, keepdims=True, dtype=x.dtype),
    "mean": lambda xp, x, axes: x.mean(axis=axes, keepdims=True),
    "max": lambda xp, x, axes: x.max(axis=axes, keepdims=True),
    "min": lambda xp, x, axes: x.min(axis=axes, keepdims=True),
    "prod": lambda xp, x, axes: x.prod(axis=axes, keepdims=True, dtype=x.dtype),
    "l1": lambda xp, x, axes: xp.abs(x).sum(axis=axes, keepdims=True, dtype=x.dtype),
    "l2": lambda xp, x, axes: xp.sqrt((x * x).sum(axis=axes, keepdims=True)),
    "sum_square": lambda xp, x, axes: (x * x).sum(axis=axes, keepdims=True, dtype=x.dtype),
    "log_sum": lambda xp, x, axes: xp.log(x.sum(axis=axes, keepdims=True)),
    "log_sum_exp": _logsumexp,
}
_FLOAT_ONLY = frozenset({"l2", "log_sum", "log_sum_exp"})


@dataclass(frozen=True)
class Reduce(Op):
    """Reduce over `axes` (ascending, not negative).

    Kinds: sum, mean, max, min, prod, l1, l2, sum_square, log_sum (log of the sum), log_sum_exp.
    """

    kind: str
    axes: tuple[int, ...]
    keepdims: bool = True
    name: ClassVar[str] = "reduce"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        x = operands[0]
        require(self.kind in _KINDS, f"reduce knows no kind {self.kind!r}")
        if self.kind in _FLOAT_ONLY:
            require_float(f"reduce {self.kind}", x)
        require(x.dtype.is_float or x.dtype.is_int, f"reduce takes numbers, not {x.dtype.value}")
        require(self.axes == tuple(sorted(set(self.axes))), f"axes {list(self.axes)} are not ascending")
        require(all(0 <= a < x.rank for a in self.axes), f"axes {list(self.axes)} for rank {x.rank}")
        empty = any(x.shape[a] == 0 for a in self.axes)
        require(not (empty and self.kind in ("max", "min", "mean", "log_sum_exp")), f"{self.kind} over an empty dim")
        if self.keepdims:
            shape = tuple(1 if i in self.axes else d for i, d in enumerate(x.shape))
            return (TensorType(shape, x.dtype, x.order),)
        return (TensorType(tuple(d for i, d in enumerate(x.shape) if i not in self.axes), x.dtype),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(x: Array) -> Array:
            result = _KINDS[self.kind](xp, x, self.axes)
            return (result if self.keepdims else result.squeeze(self.axes)).astype(x.dtype, copy=False)

        return (widened(compute, *operands),)


@dataclass(frozen=True)
class Softmax(Op):
    """exp(x - max) / sum along `axis`; the logarithm of that if `log`."""

    axis: int = -1
    log: bool = False
    name: ClassVar[str] = "softmax"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        require_float(self.name, operands[0])
        normalize_axis(self.axis, operands[0].rank)
        return (operands[0],)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(x: Array) -> Array:
            if x.size == 0:
                return x
            shifted = x - x.max(axis=self.axis, keepdims=True)
            total = xp.exp(shifted).sum(axis=self.axis, keepdims=True)
            return shifted - xp.log(total) if self.log else xp.exp(shifted) / total

        return (widened(compute, *operands),)


@dataclass(frozen=True)
class AllFinite(Op):
    """A bool: true unless an element of an operand (floats of any dtype and shape) is infinite or NaN."""

    name: ClassVar[str] = "all_finite"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require(bool(operands), f"{self.name} takes at least one operand")
        for t in operands:
            require(t.dtype.is_float, f"{self.name} takes floating-point operands, not {t.dtype.value}")
        return (TensorType((), DType.BOOL),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        found = xp.ones((), bool)
        for x in operands:
            found = found & xp.isfinite(wide(x)).all()
        return (found,)
