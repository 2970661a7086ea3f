"""Define attention as one op, so that a kernel need not store the scores, and the rotary embedding of its operands.

For training there are a forward op that also returns sums of exponentials, and its gradient. Neither stores scores. The
gradient computes the scores again, and the weights from scores and sums.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from fusec.ir import Array, DType, Op, TensorType
from fusec.ops.spec import broadcasts_to, require, require_arity, require_float, wide, widened
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class Attention(Op):
    """softmax(scale * q @ k^T + bias) @ v: q[B,H,S,D], k[B,G,T,D], v[B,G,T,E], bias to [B,H,S,T].

    H is a multiple of G: H/G consecutive heads of q share one head of k and v. `causal` adds -infinity where a key
    comes after the query (counted from the first of each). `hides` makes a score -infinity where -infinity is added,
    even if it was NaN. `guarded` makes weights zero that are NaN. `seen` records that the bias leaves every query a
    key; it changes no result.
    """

    scale: float = 1.0
    causal: bool = False
    hides: bool = False
    guarded: bool = False
    seen: bool = False
    name: ClassVar[str] = "attention"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 3, 4)
        require_float(self.name, *operands)
        q, k, v = operands[:3]
        for letter, t in zip("qkv", (q, k, v), strict=True):
            require(t.rank == 4, f"{self.name}: {letter} has shape {list(t.shape)}, not four dims")
        (b, h, s, d), (_, g, t, _) = q.shape, k.shape
        require(k.shape[0] == v.shape[0] == b, f"{self.name}: batches of {b}, {k.shape[0]} and {v.shape[0]}")
        require(k.shape[3] == d, f"{self.name}: q has {d} features, k has {k.shape[3]}")
        require(v.shape[1:3] == (g, t), f"{self.name}: k has shape {list(k.shape)}, v {list(v.shape)}")
        require(g > 0 and h % g == 0, f"{self.name}: {h} heads of q do not divide among {g} of k and v")
        for bias in operands[3:]:
            scores = (b, h, s, t)
            fits = broadcasts_to(bias.shape, scores)
            require(fits, f"{self.name}: a bias of shape {list(bias.shape)} for scores {list(scores)}")
        return (TensorType((b, h, s, v.shape[3]), q.dtype),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(q: Array, k: Array, v: Array, *bias: Array) -> Array:
            (b, h, s, _), (_, g, t, _) = q.shape, k.shape
            weights = self._softmax(xp, self.scores(xp, q, k, *bias)).reshape(b, g, h // g, s, t)
            return xp.matmul(weights, v[:, :, None]).reshape(b, h, s, v.shape[-1])

        return (widened(compute, *operands),)

    def scores(self, xp: Any, q: Array, k: Array, *bias: Array) -> Array:
        """Compute the operand of the softmax, [B,H,S,T], with every mask added."""
        (b, h, s, d), (_, g, t, _) = q.shape, k.shape
        grouped = q.reshape(b, g, h // g, s, d)
        scores = xp.matmul(grouped, k[:, :, None].swapaxes(-1, -2)).reshape(b, h, s, t) * q.dtype.type(self.scale)
        for mask in (*bias, *([self._later(xp, s, t, q.dtype)] if self.causal else [])):
            scores = xp.where(xp.isneginf(mask), mask, scores + mask) if self.hides else scores + mask
        return scores

    @staticmethod
    def _later(xp: Any, s: int, t: int, dtype: Any) -> Array:
        """Return -infinity where key j comes after query i, else 0."""
        return xp.where(xp.arange(t)[None, :] > xp.arange(s)[:, None], -np.inf, 0.0).astype(dtype)

    def _softmax(self, xp: Any, scores: Array) -> Array:
        if scores.shape[-1] == 0:
            return scores
        e = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = e / e.sum(axis=-1, keepdims=True)
        return xp.where(xp.isnan(weights), weights.dtype.type(0), weights) if self.guarded else weights


@dataclass(frozen=True)
class Rotary(Op):
    """Rotary position embedding: x * cos + rotated * sin, where cos and sin broadcast to x.

    `rotated` is x with the halves of its last dim exchanged, and the new first half negated.
    """

    name: ClassVar[str] = "rotary"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 3)
        require_float(self.name, *operands)
        x, *angles = operands
        require(x.rank > 0 and x.shape[-1] % 2 == 0, f"{self.name}: x has shape {list(x.shape)}, not two halves")
        for t in angles:
            fits = broadcasts_to(t.shape, x.shape)
            require(fits, f"{self.name}: {list(t.shape)} does not broadcast to {list(x.shape)}")
        return (x,)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(x: Array, cos: Array, sin: Array) -> Array:
            half = x.shape[-1] // 2
            rotated = xp.concatenate((-x[..., half:], x[..., :half]), axis=-1)
            return x * cos + rotated * sin

        return (widened(compute, *operands),)


@dataclass(frozen=True)
class AttentionTrain(Op):
    """Attention, and for each query the logarithm of the sum of the exponentials of its scores.

    The logarithms are [B, H, S, 1] in f32; in f64 if the operands are f64.
    """

    scale: float = 1.0
    causal: bool = False
    name: ClassVar[str] = "attention_train"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 3, 4)
        (result,) = Attention(self.scale, self.causal).infer(*operands)
        return (result, _statistics(result))

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            q, k, v, *bias = map(wide, operands)
            scores = Attention(self.scale, self.causal).scores(xp, q, k, *bias)
            top = scores.max(axis=-1, keepdims=True)
            top = xp.where(xp.isinf(top), 0.0, top).astype(top.dtype)  # as `reduce` of kind log_sum_exp does
            powers = xp.exp(scores - top)
            total = powers.sum(axis=-1, keepdims=True)
            # exp(scores - sums) would lose the digits of a large sum
            result = grouped_heads(xp.matmul(head_groups(powers / total, k), v[:, :, None]))
            return result.astype(operands[0].dtype), xp.log(total) + top


@dataclass(frozen=True)
class AttentionBackward(Op):
    """Gradients of q, k and v of attention_train, from dy, q, k, v, its two results, and its bias if it has one.

    The logarithms may also have the dtype of the other operands. With `ordered` the gradients are added in a fixed
    order, so that every call gives the same bits.
    """

    scale: float = 1.0
    causal: bool = False
    ordered: bool = False
    name: ClassVar[str] = "attention_backward"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 6, 7)
        dy, q, k, v, y, sums, *bias = operands
        result, statistics = AttentionTrain(self.scale, self.causal).infer(q, k, v, *bias)
        own = TensorType(statistics.shape, q.dtype)
        for name, given, wanted in (("dy", dy, result), ("the result", y, result), ("sums", sums, statistics)):
            same = given.same_value_type(wanted) or (given is sums and given.same_value_type(own))
            require(same, f"{self.name}: {name} is {given}, not {wanted}")
        return tuple(TensorType(t.shape, t.dtype) for t in (q, k, v))

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            dy, q, k, v, y, sums, *bias = map(wide, operands)
            weights = xp.exp(Attention(self.scale, self.causal).scores(xp, q, k, *bias) - sums)
            slopes = grouped_heads(xp.matmul(head_groups(dy, k), v[:, :, None].swapaxes(-1, -2)))
            slopes = weights * (slopes - (dy * y).sum(axis=-1, keepdims=True)) * q.dtype.type(self.scale)
            dq = grouped_heads(xp.matmul(head_groups(slopes, k), k[:, :, None]))
            dk = xp.matmul(head_groups(slopes, k).swapaxes(-1, -2), head_groups(q, k)).sum(axis=2)
            dv = xp.matmul(head_groups(weights, k).swapaxes(-1, -2), head_groups(dy, k)).sum(axis=2)
            return tuple(g.astype(x.dtype) for g, x in zip((dq, dk, dv), operands[1:4], strict=True))


def _statistics(result: TensorType) -> TensorType:
    return TensorType((*result.shape[:3], 1), DType.F64 if result.dtype is DType.F64 else DType.F32)


def head_groups(x: Any, k: Any) -> Any:
    """Reshape an array or a Tensor [B, H, …] to [B, G, H/G, …]: heads that share their keys become one dim."""
    return x.reshape(x.shape[0], k.shape[1], x.shape[1] // k.shape[1], *x.shape[2:])


def grouped_heads(x: Any) -> Any:
    """Reshape [B, G, H/G, …] back to [B, H, …]."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
