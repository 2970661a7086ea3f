"""Test if tensors hold finite numbers only, as a step with scaled losses must know of all its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fusec.ir import Array, DType, Op, TensorType
from fusec.ops.spec import is_half, require


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
            found = found & xp.isfinite(x.astype(xp.float32) if is_half(x) else x).all()
        return (found,)
