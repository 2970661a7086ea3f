"""Define the matrix product, with NumPy's rules for batch dims; bias, scale and transposition are separate ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fusec.ir import Array, DType, Op, TensorType
from fusec.ops.spec import broadcast, require, require_arity, summed

INTEGERS = (DType.I32, DType.I64, DType.U32, DType.U64)  # those that ONNX multiplies in their own type


@dataclass(frozen=True)
class MatMul(Op):
    """a[…, M, K] @ b[…, K, N] -> […, M, N]; both of rank 2 or more, batch dims broadcast.

    Floats, integers of 32 and 64 bits, which wrap around, or i8 with exact sums in i32.
    """

    name: ClassVar[str] = "matmul"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 2)
        a, b = operands
        takes = a.dtype.is_float or a.dtype in (*INTEGERS, DType.I8)
        require(takes, f"{self.name} takes floats, i8 or integers of 32 or 64 bits, not {a.dtype.value}")
        require(a.dtype == b.dtype, f"operands differ in dtype: {a.dtype.value}, {b.dtype.value}")
        dtype = DType.I32 if a.dtype is DType.I8 else a.dtype
        require(a.rank >= 2 and b.rank >= 2, f"operands have shapes {list(a.shape)} and {list(b.shape)}")
        require(a.shape[-1] == b.shape[-2], f"inner dims differ: {list(a.shape)} and {list(b.shape)}")
        batch = broadcast([a.shape[:-2], b.shape[:-2]])
        return (TensorType((*batch, a.shape[-2], b.shape[-1]), dtype),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return (summed(lambda a, b: _product(xp, a, b), *operands),)


def _product(xp: Any, a: Array, b: Array) -> Array:
    """Multiply by one matrix: all rows in one product, rather than a product for each batch."""
    if a.ndim > 2 and b.ndim == 2 and a.size and b.size:
        return xp.matmul(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[-1])
    return xp.matmul(a, b)
