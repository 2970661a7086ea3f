"""Test if tensors hold only finite numbers; training with scaled losses asks it of all gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fusec.ir import Array, DType, Op, TensorType
from fusec.ops.spec import require, wide


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
