"""Define attention as one op, whose kernel need not store scores, and the rotary embedding of its operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fusec.ir import Array, Op, TensorType
from fusec.ops.spec import require, require_arity, require_float, widened


@dataclass(frozen=True)
class Attention(Op):
    """softmax(scale * q @ k^T + bias) @ v: q[B,H,S,D], k[B,G,T,D], v[B,G,T,E], bias to [B,H,S,T].

    H is a multiple of G: H/G consecutive heads of q share one of k and v. `causal` adds -infinity where a key comes
    after the query (counted from the first of each). `hides` makes a score -infinity where -infinity is added, even if
    it was NaN. `guarded` makes rows of weights zero that are NaN. `seen` is a known fact and changes nothing: the bias
    leaves every query a key.
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
            own = (1,) * (4 - bias.rank) + bias.shape
            fits = len(own) == 4 and all(d in (1, full) for d, full in zip(own, scores, strict=False))
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
        """-infinity where key j comes after query i, else 0."""
        return xp.where(xp.arange(t)[None, :] > xp.arange(s)[:, None], -np.inf, 0.0).astype(dtype)

    def _softmax(self, xp: Any, scores: Array) -> Array:
        if scores.shape[-1] == 0:
            return scores
        e = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = e / e.sum(axis=-1, keepdims=True)
        return xp.where(xp.isnan(weights), weights.dtype.type(0), weights) if self.guarded else weights


@dataclass(frozen=True)
class Rotary(Op):
    """x * cos + rotated * sin, where rotated is x with the halves of its last dim exchanged and the first negated.

    It is the rotary position embedding; cos and sin broadcast to x.
    """

    name: ClassVar[str] = "rotary"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 3)
        require_float(self.name, *operands)
        x, *angles = operands
        require(x.rank > 0 and x.shape[-1] % 2 == 0, f"{self.name}: x has shape {list(x.shape)}, not two halves")
        for t in angles:
            own = (1,) * (x.rank - t.rank) + t.shape
            fits = len(own) == x.rank and all(d in (1, full) for d, full in zip(own, x.shape, strict=False))
            require(fits, f"{self.name}: {list(t.shape)} does not broadcast to {list(x.shape)}")
        return (x,)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(x: Array, cos: Array, sin: Array) -> Array:
            half = x.shape[-1] // 2
            turned = xp.concatenate((-x[..., half:], x[..., :half]), axis=-1)
            return x * cos + turned * sin

        return (widened(compute, *operands),)
