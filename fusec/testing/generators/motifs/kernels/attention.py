"""Draw steps for the kernels of attention, of its rotary embeddings and of its cache."""

from __future__ import annotations

import numpy as np

from fusec.ir import DType, TensorType, Value
from fusec.ops import Attention, AttentionBackward, AttentionTrain, Reshape, Rotary, Scatter, Slice, Transpose
from fusec.testing.generators.graph_builder import RandomGraph
from fusec.testing.generators.motifs.kernels.parts import half_dtype
from fusec.testing.generators.motifs.layers import ACTIVATIONS
from fusec.testing.generators.operations.pointwise import draw_pointwise

_ROWS = (5, 16, 17, 1, 33, 40)


def attention_forward(b: RandomGraph) -> None:
    """Draw attention of up to 64 features, with shared heads, a causal mask, a bias, and transposes around it."""
    batch, heads, features = b.pick([1, 2]), b.pick([1, 2, 4]), b.pick([8, 16, 40, 64, 24])
    groups, rows, keys = b.pick([g for g in (heads, 1, 2) if heads % g == 0]), b.pick(_ROWS), b.pick(_ROWS)
    dtype, transposed = half_dtype(b), b.chance(40)

    def operand(count: int, length: int) -> Value:
        if not transposed:
            return b.input(TensorType((batch, count, length, features), dtype))
        return b.add(Transpose((0, 2, 1, 3)), b.input(TensorType((batch, length, count, features), dtype)))

    q, k, v = operand(heads, rows), operand(groups, keys), operand(groups, keys)
    bias = [b.input(TensorType((b.pick([1, batch]), b.pick([1, heads]), rows, keys), dtype))] * b.chance(40)
    y = b.add(Attention(b.pick([0.25, 1.0, 0.125]), b.chance(50), guarded=b.chance(20)), q, k, v, *bias)
    if b.chance(40):
        b.add(Reshape((batch, rows, heads * features)), b.add(Transpose((0, 2, 1, 3)), y))


def attention_backward(b: RandomGraph) -> None:
    """Draw the gradients of attention of up to 64 features in fp16, from the results of its forward op."""
    heads, features = (b.pick([1, 2]), b.pick([1, 2])), b.pick([16, 32, 48, 64])
    rows, keys, ordered = b.pick(_ROWS), b.pick(_ROWS), b.chance(20)
    q, k, v = (b.input(TensorType((*heads, length, features), DType.F16)) for length in (rows, keys, keys))
    scale = b.pick([0.25, 0.125])
    y, sums = b.insert(AttentionTrain(scale), q, k, v).results
    b.insert(AttentionBackward(scale, ordered=ordered), b.input(y.type), q, k, v, y, sums)


def rotary(b: RandomGraph) -> None:
    """Draw a rotary embedding, sometimes of a transposed tensor, and pointwise ops after it."""
    rows, features = b.pick([3, 8, 1, 5]), b.pick([8, 16, 6, 2, 32])
    x = b.input(TensorType((b.pick([1, 2]), rows, b.pick([1, 3]), features), b.dtype))
    if b.chance(60):
        x = b.add(Transpose((0, 2, 1, 3)), x)
    angles = [b.fresh(TensorType((x.type.shape[2], features), b.dtype)) for _ in range(2)]
    y = b.add(Rotary(), x, *angles)
    if b.chance(40):
        draw_pointwise(b, b.pick(ACTIVATIONS), y)


def write_rows(b: RandomGraph) -> None:
    """Draw writes of rows at the same indices, some of them a part of a rotary embedding."""
    count, features, places = b.pick([2, 1, 4]), b.pick([8, 6, 16, 2]), b.pick([5, 9])
    at = [i - places if b.chance(20) else i for i in list(b.permutation(places))[:count]]
    indices = b.graph.constant(np.array(at, b.pick([DType.I64, DType.I32]).numpy))
    first = b.below(3)
    heads = b.input(TensorType((1, first + count, 1, features), b.dtype))
    angles = [b.fresh(TensorType((1, 1, 1, features), b.dtype)) for _ in range(2)]
    y = b.add(Rotary(), heads, *angles)
    if b.chance(30):
        b.add(Rotary(), b.input(TensorType((1, 3, 1, features), b.dtype)), *angles)
    part = b.add(Slice((0, first, 0, 0), (1, count, 1, features), (1,) * 4), y)
    rows = [b.add(Reshape((count, features)), part), b.fresh(TensorType((count, features), b.dtype))]
    for new in rows[b.below(2) :]:
        b.add(Scatter(), b.input(TensorType((places, features), b.dtype)), indices, new)


def cached_attention(b: RandomGraph) -> None:
    """Draw attention of one query over a cache into which the same step writes a row of each sequence."""
    batch, groups, sharers, features = b.pick([1, 2]), b.pick([1, 2]), b.pick([4, 1, 3]), b.pick([16, 64, 32])
    keys, dtype, rows = b.pick([9, 64, 130]), half_dtype(b), batch * groups
    at = np.array([i * keys + b.below(keys) for i in range(rows)], DType.I64.numpy)
    indices, shape = b.graph.constant(at), (batch, groups * sharers, 1, features)
    q, k, v = (b.input(TensorType(s, dtype)) for s in (shape, (batch, groups, 1, features), (rows, features)))
    if b.chance(70):
        angles = [b.fresh(TensorType((1, 1, 1, features), dtype)) for _ in range(2)]
        q, k = (b.add(Rotary(), x, *angles) for x in (q, k))
    new = [b.add(Reshape((rows, features)), k), v]
    caches = [b.input(TensorType((rows * keys, features), dtype)) for _ in range(2)]
    written = [b.add(Scatter(), cache, indices, each) for cache, each in zip(caches, new, strict=True)]
    views = [b.add(Reshape((batch, groups, keys, features)), each) for each in written]
    bias = [b.input(TensorType((b.pick([1, batch]), 1, 1, keys), dtype))] if b.chance(70) else []
    b.add(Attention(b.pick([0.25, 0.125]), hides=b.chance(30)), q, *views, *bias)
