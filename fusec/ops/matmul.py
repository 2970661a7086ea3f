"""Matrix product with NumPy's rules for batch dims; bias, scale and transposition are ops of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fusec.ir import Array, Op, TensorType
from fusec.ops.spec import broadcast, require, require_arity, require_float, widened


@dataclass(frozen=True)
class MatMul(Op):
    """a[…, M, K] @ b[…, K, N] -> […, M, N]; both of rank 2 or more, batch dims broadcast."""

    name: ClassVar[str] = "matmul"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 2)
        a, b = operands
        require_float(self.name, a, b)
        require(a.rank >= 2 and b.rank >= 2, f"operands have shapes {list(a.shape)} and {list(b.shape)}")
        require(a.shape[-1] == b.shape[-2], f"inner dims differ: {list(a.shape)} and {list(b.shape)}")
        batch = broadcast([a.shape[:-2], b.shape[:-2]])
        return (TensorType((*batch, a.shape[-2], b.shape[-1]), a.dtype),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return (widened(lambda a, b: _product(xp, a, b), *operands),)


def _product(xp: Any, a: Array, b: Array) -> Array:
    """By one matrix: all rows at once, rather than a product for each batch."""
    if a.ndim > 2 and b.ndim == 2 and a.size and b.size:
        return xp.matmul(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[-1])
    return xp.matmul(a, b)
