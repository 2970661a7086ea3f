"""Draw attention in the spellings that exporters write."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from fusec.ir import DType, TensorType, Value
from fusec.ops import Cast, Expand, MatMul, Reshape, Softmax, Split, Transpose, pw
from fusec.testing.generators.graph_builder import RandomGraph, Unfit


def attention(b: RandomGraph) -> None:
    """Draw softmax(q k^T * scale [+ mask]) v, in a spelling that exporters write."""
    if b.chance(20):  # of any rank, with one value possibly in several places
        q = b.float_value(2, 4)
        if q.type.size == 0:
            raise Unfit("no rows")
        k, v = b.like(q), b.like(q)
    else:
        q, k, v = _heads(b)
    rank = q.type.rank
    scale = b.pick([0.5, 0.35355339, 2.0])
    place = b.below(5)
    if place in (0, 1):
        q = _times(b, q, scale)
    keys = b.add(Transpose((*range(rank - 2), rank - 1, rank - 2)), k)
    if place in (1, 2):
        keys = _times(b, keys, scale)
    scores = b.add(MatMul(), q, keys)
    if place == 3:
        scores = _times(b, scores, scale) if b.chance(50) else b.pointwise("div", scores, number_like(b, scores, 4.0))
    scores = _masked(b, scores)
    wide = b.chance(15)
    weights = b.add(Softmax(-1), b.add(Cast(DType.F32), scores) if wide else scores)
    weights = b.add(Cast(q.type.dtype), weights) if wide else weights
    if b.chance(40):
        weights = b.pointwise("where", b.pointwise("is_nan", weights), number_like(b, weights, 0.0), weights)
    if rank == 3 and b.chance(30):
        weights = b.add(Reshape((1, *weights.type.shape)), weights)
        weights = b.add(Reshape(weights.type.shape[1:]), weights)
    made = b.add(MatMul(), weights, v)
    if rank == 4 and b.chance(60):
        batch, heads, rows, features = made.type.shape
        b.add(Reshape((batch, rows, heads * features)), b.add(Transpose((0, 2, 1, 3)), made))


def _heads(b: RandomGraph) -> tuple[Value, Value, Value]:
    """Draw queries, keys and values by head: of three projections, of one split projection, or with shared heads."""
    batch, rows, heads, features = b.pick([1, 2]), b.pick([4, 3, 1, 5]), b.pick([2, 1, 4]), b.pick([4, 8, 3])
    x = b.fresh(TensorType((batch, rows, heads * features), b.dtype))
    kind = b.below(4)
    if kind == 0:
        x = b.fresh(TensorType((batch, rows, 3 * heads * features), b.dtype))
        parts = list(b.insert(Split(2, (heads * features,) * 3), x).results)
    elif kind == 1:
        parts = [b.add(MatMul(), x, b.constant((heads * features,) * 2, b.dtype)) for _ in range(3)]
        if b.chance(50):
            parts = [b.pointwise("add", p, b.constant((heads * features,), b.dtype)) for p in parts]
    else:
        parts = [x, b.like(x), b.like(x)]
    by_head = [b.add(Transpose((0, 2, 1, 3)), b.add(Reshape((batch, rows, heads, features)), p)) for p in parts]
    if kind == 3:
        shared = [b.fresh(TensorType((batch, 1, rows, features), b.dtype)) for _ in range(2)]
        for i, k in enumerate(shared, 1):
            wide = b.add(Expand((batch, 1, heads, rows, features)), b.add(Reshape((batch, 1, 1, rows, features)), k))
            by_head[i] = b.add(Reshape((batch, heads, rows, features)), wide)
    if b.chance(25):  # all heads of all images in one dim
        by_head = [b.add(Reshape((batch * heads, rows, features)), t) for t in by_head]
    return by_head[0], by_head[1], by_head[2]


def number_like(b: RandomGraph, like: Value, number: float) -> Value:
    return b.graph.constant(np.asarray(number, like.type.dtype.numpy))


def _times(b: RandomGraph, x: Value, number: float) -> Value:
    return b.pointwise("mul", x, number_like(b, x, number))


def _masked(b: RandomGraph, scores: Value) -> Value:
    """Draw a mask or bias of the scores: added or by `where`, of later keys or of any shape; sometimes none."""
    rows, columns = scores.type.shape[-2:]
    later = np.triu(np.full((rows, columns), -np.inf), 1).astype(scores.type.dtype.numpy)
    kind = b.below(6)
    if kind == 0:
        return b.pointwise("add", scores, b.graph.constant(later))
    if kind == 1:
        return b.pointwise("add", scores, b.broadcastable(scores))
    if kind == 2:
        known, hides = b.chance(50), b.chance(40)  # hides: where it is true
        mask = b.graph.constant((later == 0) != hides) if known else b.mask(scores)
        least = float(ml_dtypes.finfo(scores.type.dtype.numpy).min) if known and b.chance(30) else -math.inf
        never = number_like(b, scores, least)
        shown = (mask, never, scores) if hides else (mask, scores, never)
        if np.broadcast_shapes(mask.type.shape, scores.type.shape) != scores.type.shape:
            raise Unfit("a mask wider than the scores")
        return b.add(pw("where"), *shown)
    if kind == 3:
        mask = b.mask(scores)
        hidden = b.add(pw("where"), mask, number_like(b, scores, 0.0), number_like(b, scores, -math.inf))
        return b.pointwise("add", scores, hidden)
    return scores
