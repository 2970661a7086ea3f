"""Define matrix products: the plain one, and one with weights that stay integers of 4 or 8 bits in memory.

Batch dims follow NumPy's rules. Bias, scale and transposition are separate ops.
"""

from __future__ import annotations

from typing import Any, ClassVar

from fusec.ir import HALVES, Array, DType, Op, TensorType
from fusec.ops.spec import broadcast, require, require_arity, summed, wide, widened
from fusec.system.dataclass import dataclass

INTEGERS = (DType.I32, DType.I64, DType.U32, DType.U64)  # those that ONNX multiplies in their own type
SUMMED_IN = {DType.I8: DType.I32, DType.F8E4M3: DType.F32}  # types of 8 bits, and of the sums of their products
CODES = (DType.I4, DType.U4, DType.I8, DType.U8)  # types of packed weights
MAX_ROWS = 16  # of x, for fusec's kernel for packed weights
STREAMED_ROWS = 32  # of x, for fusec's kernel that streams weights of 16 bits


@dataclass(frozen=True)
class MatMul(Op):
    """a[…, M, K] @ b[…, K, N] -> […, M, N]; both of rank 2 or more, batch dims broadcast.

    Floats, integers of 32 and 64 bits, which wrap around, i8 with exact sums in i32, or f8e4m3 with sums in f32.

    fast_sums: tensor cores may add products of f8e4m3 with fewer bits than fp32 has, where that is faster.
    """

    fast_sums: bool = False
    name: ClassVar[str] = "matmul"
    rare: ClassVar[frozenset[str]] = frozenset({"fast_sums"})

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 2)
        a, b = operands
        takes = a.dtype.is_float or a.dtype in (*INTEGERS, *SUMMED_IN)
        require(takes, f"{self.name} takes floats, i8, f8e4m3 or integers of 32 or 64 bits, not {a.dtype.value}")
        require(a.dtype == b.dtype, f"operands differ in dtype: {a.dtype.value}, {b.dtype.value}")
        dtype = SUMMED_IN.get(a.dtype, a.dtype)
        require(not self.fast_sums or a.dtype is DType.F8E4M3, f"fast sums are for f8e4m3, not {a.dtype.value}")
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


def can_stream(weights: TensorType) -> bool:
    """Tell if fusec's kernel streams weights [K, N]: it has tiles of 16 columns, and steps of 32 along the depth."""
    depth, columns = weights.shape[-2:]
    return weights.dtype in HALVES and depth % 32 == 0 and columns % 16 == 0


def fits_kernel(codes: TensorType, block: int) -> bool:
    """Tell if fusec's kernel reads these weights: it has tiles of 16 columns, and threads that load 16 bytes.

    A thread's numbers share a scale, so a block has 16 or 32 numbers, or whole chunks of 64 (of 32 in 8 bits).
    """
    columns, depth = codes.shape
    chunk = 256 // codes.dtype.bits
    whole = block >= depth or block in (16, 32) or block % chunk == 0
    return columns % 16 == 0 and depth % chunk == 0 and columns > 0 and depth > 0 and whole


@dataclass(frozen=True)
class PackedMatMul(Op):
    """x[…, M, K] @ w^T -> […, M, N], where w[n, k] = (codes[n, k] - zeros[n, k // block]) * scales[n, k // block].

    Operands: x, codes[N, K], scales[N, blocks], and zeros[N, blocks] of the type of the codes; without them 0. Each
    weight is computed in fp32 and not rounded to the type of x.

    block: neighbours along K that share a scale and a zero point; the last block may be shorter.
    """

    block: int
    name: ClassVar[str] = "packed_matmul"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require(len(operands) in (3, 4), f"{self.name} takes 3 or 4 operands, not {len(operands)}")
        x, codes, scales, *zeros = operands
        require(x.dtype.is_float and x.rank >= 2, f"{self.name} takes floats of rank 2 or more, not {x}")
        require(codes.dtype in CODES and codes.rank == 2, f"codes {codes} are no matrix of integers of 4 or 8 bits")
        require(codes.shape[1] == x.shape[-1], f"inner dims differ: {list(x.shape)} and codes {list(codes.shape)}")
        require(self.block >= 1, f"blocks of {self.block}")
        shape = (codes.shape[0], -(-codes.shape[1] // self.block))
        require(scales.dtype.is_float and scales.shape == shape, f"scales {scales}, not {list(shape)} floats")
        for zero in zeros:
            require(zero.same_value_type(TensorType(shape, codes.dtype)), f"zeros {zero} for codes {codes}")
        return (TensorType((*x.shape[:-1], codes.shape[0]), x.dtype),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return (widened(lambda x, *packed: xp.matmul(x, self.weights(xp, *packed).T), *operands),)

    def weights(self, xp: Any, codes: Array, scales: Array, *zeros: Array) -> Array:
        """Return w[N, K] in fp32, or in fp64 if the scales are."""
        factors = self._by_element(xp, wide(scales), codes.shape[1])
        numbers = codes.astype(factors.dtype)
        if zeros:
            numbers -= self._by_element(xp, zeros[0].astype(factors.dtype), codes.shape[1])
        return numbers * factors

    def _by_element(self, xp: Any, blocks: Array, count: int) -> Array:
        return xp.repeat(blocks, self.block, axis=1)[:, :count] if self.block < count else blocks
