"""Gradients of attention and of rotary embeddings, by what these ops stand for."""

from __future__ import annotations

import math

import numpy as np

from fusec.builder import Tensor
from fusec.gradients.core import Gradients, Rule, Rules, Step, by_formula, wide
from fusec.gradients.indexing import RULES as INDEXING
from fusec.gradients.pointwise import RULES as POINTWISE
from fusec.gradients.products import RULES as PRODUCTS


def _attention(step: Step, *operands: Tensor) -> Tensor:
    """The scores, their softmax, and the mean they weigh; 16-bit floats in f32."""
    op, b = step.op, step.b
    q, k, v, *bias = map(wide, operands)
    (n, h, s, d), (_, g, t, _) = q.shape, k.shape
    grouped = q.reshape(n, g, h // g, s, d)
    scores = (grouped @ k[:, :, None].swapaxes(-1, -2)).reshape(n, h, s, t) * op.scale
    if op.causal:
        later = np.where(np.arange(t)[None, :] > np.arange(s)[:, None], -np.inf, 0.0)
        bias.append(b.constant(later, scores.dtype))
    for mask in bias:
        scores = b.where(mask.eq(-math.inf), mask, scores + mask) if op.hides else scores + mask
    if op.guarded:  # a row without keys: nothing comes of it, and nothing goes back
        blind = scores.max(-1, keepdims=True).eq(-math.inf)
        weights = b.where(blind, 0.0, b.where(blind, 0.0, scores).softmax())
    else:
        weights = scores.softmax()
    return (weights.reshape(n, g, h // g, s, t) @ v[:, :, None]).reshape(n, h, s, v.shape[-1])


def _rotary(step: Step) -> Gradients:
    """The rotation the other way round for x; for the angles' functions, what they were multiplied by."""
    x, cos, sin = step.x
    dy, half = step.dy, x.shape[-1] // 2
    turned = step.b.concat([-x[..., half:], x[..., :half]], -1)
    along = (dy * sin).expand(x.shape)
    back = step.b.concat([along[..., half:], -along[..., :half]], -1)
    return dy * cos + back, dy * x, dy * turned


RULES: dict[str, Rule] = {"attention": by_formula(_attention, lambda: _rules()), "rotary": _rotary}


def _rules() -> Rules:
    return {**POINTWISE, **PRODUCTS, **INDEXING}
