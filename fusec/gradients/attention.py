"""Differentiate attention and rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fusec.builder import Tensor
from fusec.gradients.core import BackwardStep, Gradients, Rule, by_formula, wide
from fusec.ir import HALVES
from fusec.ops import AttentionBackward, AttentionTrain
from fusec.ops.attention import grouped_heads, head_groups


def _attention(step: BackwardStep, *operands: Tensor) -> Tensor:
    """Express attention by other ops: scores, their softmax, and the weighted sum of v. 16-bit floats use f32."""
    q, k, v, *bias = map(wide, operands)
    scores = _scores(step, q, k, bias, step.op.hides)
    if step.op.guarded:  # a row that sees no key has zeros as its result and its gradient
        where, empty = step.b.where, scores.max(-1, keepdims=True).eq(-math.inf)
        weights = where(empty, 0.0, where(empty, 0.0, scores).softmax())
    else:
        weights = scores.softmax()
    return grouped_heads(head_groups(weights, k) @ v[:, :, None])


def _rotary(step: BackwardStep) -> Gradients:
    """Rotate dy by the opposite angle for x. For cos and sin, multiply dy by their factors."""
    x, cos, sin = step.x
    dy, half = step.dy, x.shape[-1] // 2
    swapped = step.b.concat([-x[..., half:], x[..., :half]], -1)
    along = (dy * sin).expand(x.shape)
    back = step.b.concat([along[..., half:], -along[..., :half]], -1)
    return dy * cos + back, dy * x, dy * swapped


def _train(step: BackwardStep, *operands: Tensor) -> tuple[Tensor, Tensor]:
    """Express attention_train by other ops."""
    q, k, v, *bias = map(wide, operands)
    scores = _scores(step, q, k, bias)
    sums = scores.reduce("log_sum_exp", -1, keepdims=True)
    result = grouped_heads(head_groups((scores - sums).exp(), k) @ v[:, :, None])
    return result.astype(step.y[0].dtype), sums


def _backward(step: BackwardStep, *operands: Tensor) -> tuple[Tensor, ...]:
    """Express attention_backward by other ops."""
    dy, q, k, v, y, sums, *bias = map(wide, operands)
    weights = (_scores(step, q, k, bias) - sums).exp()
    slopes = grouped_heads(head_groups(dy, k) @ v[:, :, None].swapaxes(-1, -2))
    slopes = weights * (slopes - (dy * y).sum(-1, keepdims=True)) * step.op.scale
    dq = grouped_heads(head_groups(slopes, k) @ k[:, :, None])
    dk = (head_groups(slopes, k).swapaxes(-1, -2) @ head_groups(q, k)).sum(2)
    dv = (head_groups(weights, k).swapaxes(-1, -2) @ head_groups(dy, k)).sum(2)
    return tuple(g.astype(t.dtype) for g, t in zip((dq, dk, dv), step.y, strict=True))


def _scores(step: BackwardStep, q: Tensor, k: Tensor, bias: Sequence[Tensor], hides: bool = False) -> Tensor:
    """Compute the scores; with `hides`, -infinity in a mask hides even a score that is NaN."""
    scores = grouped_heads(head_groups(q, k) @ k[:, :, None].swapaxes(-1, -2)) * step.op.scale
    rows, columns = scores.shape[-2:]
    if step.op.causal:
        later = np.where(np.arange(columns)[None, :] > np.arange(rows)[:, None], -np.inf, 0.0)
        bias = [*bias, step.b.constant(later, scores.dtype)]
    for mask in bias:
        added = scores + mask
        scores = step.b.where(mask.eq(-math.inf), mask, added) if hides else added
    return scores


_expressed = by_formula(_attention)


def _rule(step: BackwardStep) -> Gradients:
    """Differentiate attention by attention_backward in 16 bits, else by other ops.

    cuDNN has kernels for attention_backward in 16 bits only, and none that gives the gradient of the bias.
    A later pass merges the two forward ops, so that attention is computed once.
    """
    op, q = step.op, step.x[0]
    plain = q.dtype in HALVES and not (op.hides or op.guarded) and not any(step.active[3:])
    if not plain:
        return _expressed(step)
    y, sums = step.b.results(AttentionTrain(op.scale, op.causal), *step.x)
    found = step.b.results(AttentionBackward(op.scale, op.causal), step.dy, *step.x[:3], y, sums, *step.x[3:])
    return (*found, *([None] * len(step.x[3:])))


RULES: dict[str, Rule] = {
    "attention": _rule,
    "attention_train": by_formula(_train),
    "attention_backward": by_formula(_backward),
    "rotary": _rotary,
}
