"""Draw matrix products, attention and rotary embeddings."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from fusec.ir import DType, TensorType, Value
from fusec.ops import Attention, AttentionBackward, AttentionTrain, MatMul, PackedMatMul, Rotary, Transpose
from fusec.ops.matmul import CODES, INTEGERS
from fusec.testing.generators.graph_builder import RandomGraph, Unfit


def multiply(b: RandomGraph, x: Value, columns: int = 0) -> Value:
    """Draw a matrix product of a value with a constant, with another value, or with a transposed one."""
    *batch, _, inner = x.type.shape
    columns = columns or b.pick([4, 8, 3, 1, 16, 5])
    kind = b.below(6)
    if kind <= 2:
        return b.add(MatMul(), x, b.constant((inner, columns), x.type.dtype))
    if kind == 3:
        other = tuple(d if b.chance(70) else 1 for d in batch)
        return b.add(MatMul(), x, b.fresh(TensorType((*other, inner, columns), x.type.dtype)))
    if kind == 4:
        transposed = b.add(Transpose((*range(len(batch)), len(batch) + 1, len(batch))), b.like(x))
        return b.add(MatMul(), x, transposed)
    rows = b.pick([2, 4, 3])
    return b.add(MatMul(), b.fresh(TensorType((rows, x.type.shape[-2]), x.type.dtype)), x)


def matmul(b: RandomGraph) -> None:
    if b.chance(10):  # integers, for fusec's own kernel
        shape = tuple(b.pick([1, 2, 3, 5]) for _ in range(b.pick([2, 2, 3])))
        multiply(b, b.fresh(TensorType(shape, b.pick((*INTEGERS, DType.I8)))))
        return
    multiply(b, b.float_value(2, 4))


def packed_matmul(b: RandomGraph) -> None:
    """Draw a product with integer weights in blocks; the last block is sometimes shorter."""
    multiply_packed(b, b.float_value(2, 4), b.pick([3, 1, 5, 16]))


def multiply_packed(b: RandomGraph, x: Value, columns: int, block: int = 0) -> Value:
    """Multiply by constant codes of 4 or 8 bits. block: weights that share a scale; 0 draws it."""
    depth, dtype = x.type.shape[-1], b.pick(CODES)
    block = block or b.pick([2, 3, 1, max(depth, 1), depth + 1])
    blocks = (columns, -(-depth // block))
    scale_type = x.type.dtype if b.chance(60) else DType.F32
    info, rng = ml_dtypes.iinfo(dtype.numpy), np.random.default_rng(b.below(1 << 16))
    low, high = (max(int(info.min), -3), 4) if b.exact else (int(info.min), int(info.max) + 1)

    def codes(shape: tuple[int, int]) -> Value:
        return b.graph.constant(rng.integers(low, high, shape).astype(dtype.numpy))

    zeros = [codes(blocks)] if b.chance(40) else []
    return b.add(PackedMatMul(block), x, codes((columns, depth)), b.constant(blocks, scale_type, "positive"), *zeros)


def attention_operands(b: RandomGraph) -> tuple[Value, Value, Value]:
    """Draw operands of an attention: shared heads, different lengths, or one value in several places."""
    q = b.float_value(4, 4)
    batch, heads, _, features = q.type.shape
    if q.type.size == 0:
        raise Unfit("no rows")
    if b.chance(40):
        return q, b.like(q), b.like(q)
    groups = b.pick([g for g in (heads, heads, 1, 2) if heads % g == 0])
    rows = b.pick([q.type.shape[2], 3, 1, 4, 5])
    k = b.fresh(TensorType((batch, groups, rows, features), q.type.dtype))
    return q, k, b.fresh(TensorType((batch, groups, rows, b.pick([features, features, 3, 8])), q.type.dtype))


def attention(b: RandomGraph) -> None:
    q, k, v = attention_operands(b)
    scores = (*q.type.shape[:3], k.type.shape[2])
    bias: list[Value] = []
    if b.chance(40):
        shape = b.broadcast_shape(scores)
        hidden = b.graph.constant(np.asarray(-math.inf, q.type.dtype.numpy))
        mask = b.fresh(TensorType(shape, q.type.dtype))
        masked = b.pointwise("where", b.mask(mask), mask, hidden) if b.chance(50) else mask
        bias.append(masked if masked.type.shape == shape else mask)
    scale = b.pick([1.0, 0.5, 0.35355339, 0.125])
    op = Attention(scale, b.chance(40), b.chance(25), b.chance(40), b.chance(20) and not bias)
    b.add(op, q, k, v, *bias)


def attention_train(b: RandomGraph) -> None:
    q, k, v = attention_operands(b)
    shape = b.broadcast_shape((*q.type.shape[:3], k.type.shape[2]))
    bias = [b.fresh(TensorType(shape, q.type.dtype))] if b.chance(30) else []
    b.insert(AttentionTrain(b.pick([1.0, 0.5, 0.125]), b.chance(40)), q, k, v, *bias)


def attention_backward(b: RandomGraph) -> None:
    """Draw the gradient of an attention from the results of the forward op, since other sums give huge weights."""
    q, k, v = attention_operands(b)
    scale, causal = b.pick([1.0, 0.5, 0.125]), b.chance(40)
    y, sums = b.insert(AttentionTrain(scale, causal), q, k, v).results
    b.insert(AttentionBackward(scale, causal), b.like(y), q, k, v, y, sums)


def rotary(b: RandomGraph) -> None:
    x = b.some(lambda t: t.dtype is b.dtype and t.rank > 0 and t.shape[-1] % 2 == 0)
    b.add(Rotary(), x, *(b.fresh(TensorType(b.broadcast_shape(x.type.shape), x.type.dtype)) for _ in range(2)))
