"""Differentiate normalisations. 16-bit floats are cast to f32 first, because differences of sums lose precision."""

from __future__ import annotations

import math

import numpy as np

from fusec.builder import Tensor
from fusec.gradients.core import HALVES, BackwardStep, Gradients, Rule, Rules, by_formula, wide
from fusec.gradients.indexing import RULES as INDEXING
from fusec.gradients.pointwise import RULES as POINTWISE
from fusec.gradients.products import RULES as PRODUCTS
from fusec.ir import DType
from fusec.ops import BatchNormBackward, LayerNormBackward


def _per_channel(v: Tensor, rank: int) -> Tensor:
    return v.reshape(1, -1, *([1] * (rank - 2)))


def _standardized(x: Tensor, axes: tuple[int, ...], epsilon: float) -> tuple[Tensor, Tensor]:
    """Subtract the mean and divide by the standard deviation. Returns the result and the inverse deviation."""
    centred = x - x.mean(axes, keepdims=True)
    inverse = ((centred * centred).mean(axes, keepdims=True) + epsilon).rsqrt()
    return centred * inverse, inverse


def _back(dnormal: Tensor, normal: Tensor, inverse: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Compute the gradient of `_standardized` from the gradient of its first result."""
    along = normal * (dnormal * normal).mean(axes, keepdims=True)
    return (dnormal - dnormal.mean(axes, keepdims=True) - along) * inverse


def _layer_norm(step: BackwardStep) -> Gradients:
    if _has_backward_op(step):
        dx, dscale, dbias = step.b.results(LayerNormBackward(step.op.axis, step.op.epsilon), step.dy, *step.x[:2])
        return dx, dscale, *([dbias] if len(step.x) == 3 else [])
    x, scale, dy = wide(step.x[0]), wide(step.x[1]), wide(step.dy)
    axes = tuple(range(step.op.axis % x.rank, x.rank))
    normal, inverse = _standardized(x, axes, step.op.epsilon)
    dx = _back(dy * scale, normal, inverse, axes)
    return dx, dy * normal, *([dy] if len(step.x) == 3 else [])


def _has_backward_op(step: BackwardStep) -> bool:
    """Tell if layer_norm_backward covers this step: `scale` has one element for each normalised element."""
    x, scale = step.x[:2]
    same = scale.dtype is x.dtype or (scale.dtype is DType.F32 and x.dtype in HALVES)
    return x.size > 0 and scale.shape == x.shape[step.op.axis % x.rank :] and same


def _rms_norm(step: BackwardStep) -> Gradients:
    if _has_backward_op(step):
        return step.b.results(LayerNormBackward(step.op.axis, step.op.epsilon, False), step.dy, *step.x)
    x, scale, dy = wide(step.x[0]), wide(step.x[1]), wide(step.dy)
    axes = tuple(range(step.op.axis % x.rank, x.rank))
    inverse = ((x * x).mean(axes, keepdims=True) + step.op.epsilon).rsqrt()
    normal, dnormal = x * inverse, dy * scale
    dx = (dnormal - normal * (dnormal * normal).mean(axes, keepdims=True)) * inverse
    return dx, dy * normal


def _instance_norm(step: BackwardStep) -> Gradients:
    x, dy = wide(step.x[0]), wide(step.dy)
    axes = tuple(range(2, x.rank))
    normal, inverse = _standardized(x, axes, step.op.epsilon)
    dx = _back(dy * _per_channel(wide(step.x[1]), x.rank), normal, inverse, axes)
    return dx, (dy * normal).sum((0, *axes)), dy.sum((0, *axes))


def _group_norm(step: BackwardStep) -> Gradients:
    x, dy = wide(step.x[0]), wide(step.dy)
    grouped = (x.shape[0], step.op.groups, -1)
    normal, inverse = _standardized(x.reshape(grouped), (2,), step.op.epsilon)
    dnormal = dy * _per_channel(wide(step.x[1]), x.rank)
    dx = _back(dnormal.reshape(grouped), normal, inverse, (2,)).reshape(x.shape)
    axes = (0, *range(2, x.rank))
    return dx, (dy * normal.reshape(x.shape)).sum(axes), dy.sum(axes)


def _batch_norm(step: BackwardStep) -> Gradients:
    """Differentiate the batch norm of inference, whose mean and variance are operands."""
    x, scale, _, mean, variance = map(wide, step.x)
    dy, axes = wide(step.dy), (0, *range(2, x.rank))
    inverse = (variance + step.op.epsilon).rsqrt()
    factor = scale * inverse
    dbias = dy.sum(axes)
    along = (dy * (x - _per_channel(mean, x.rank))).sum(axes)
    dvariance = along * factor * inverse * inverse * -0.5
    return dy * _per_channel(factor, x.rank), along * inverse, dbias, -(dbias * factor), dvariance


def _batch_norm_train(step: BackwardStep) -> Gradients:
    """Apply batch_norm_backward to the gradient of the result, and pointwise ops to those of the statistics."""
    x, scale, _ = step.x
    _, mean, inverse = step.y
    dy, dmean, dinverse = step.dys
    dx: Tensor | None = None
    dscale: Tensor | None = None
    dbias: Tensor | None = None
    if dy is not None:
        dx, dscale, dbias = step.b.results(BatchNormBackward(), dy, x, scale, mean, inverse)
    count = x.size // x.shape[1]
    if dmean is not None:
        part = _per_channel(dmean * (1.0 / count), x.rank).expand(x.shape).astype(x.dtype)
        dx = part if dx is None else dx + part
    if dinverse is not None:
        slope = _per_channel(dinverse * inverse * inverse * inverse * (-1.0 / count), x.rank)
        part = ((wide(x) - _per_channel(wide(mean), x.rank)) * wide(slope)).astype(x.dtype)
        dx = part if dx is None else dx + part
    return dx, dscale, dbias


def _batch_norm_backward(step: BackwardStep, *operands: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Express batch_norm_backward by other ops."""
    dy, x, scale, mean, inverse, *bias = map(wide, operands)
    axes, count = (0, *range(2, x.rank)), x.size // x.shape[1]
    for shift in bias:
        y = (x - _per_channel(mean, x.rank)) * _per_channel(inverse * scale, x.rank) + _per_channel(shift, x.rank)
        dy = dy.pointwise("relu_backward", y)
    normal = (x - _per_channel(mean, x.rank)) * _per_channel(inverse, x.rank)
    dbias, dscale = dy.sum(axes), (dy * normal).sum(axes)
    inner = dy - _per_channel(dbias * (1.0 / count), x.rank) - normal * _per_channel(dscale * (1.0 / count), x.rank)
    return inner * _per_channel(scale * inverse, x.rank), dscale, dbias


def _channel_sums(step: BackwardStep, operand: Tensor) -> tuple[Tensor, Tensor]:
    """Express channel_sums by other ops."""
    x = wide(operand)
    axes = (0, *range(2, x.rank))
    return x.sum(axes), (x * x).sum(axes)


def _batch_norm_by_sums(step: BackwardStep, *operands: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Express batch_norm_by_sums by other ops."""
    x, scale, bias, total, squares = map(wide, operands)
    count = x.size // x.shape[1]
    mean = total * (1.0 / count)
    inverse = ((squares * (1.0 / count) - mean * mean).relu() + step.op.epsilon).rsqrt()
    centred = x - _per_channel(mean, x.rank)
    y = centred * _per_channel(inverse * scale, x.rank) + _per_channel(bias, x.rank)
    return y, mean, inverse


def _layer_norm_backward(step: BackwardStep, *operands: Tensor) -> tuple[Tensor, ...]:
    """Express layer_norm_backward by other ops."""
    dy, x, scale = map(wide, operands)
    first = step.op.axis % x.rank
    axes, rows = tuple(range(first, x.rank)), tuple(range(first))
    if step.op.centred:
        normal, inverse = _standardized(x, axes, step.op.epsilon)
        return _back(dy * scale, normal, inverse, axes), (dy * normal).sum(rows), dy.sum(rows)
    inverse = ((x * x).mean(axes, keepdims=True) + step.op.epsilon).rsqrt()
    normal, dnormal = x * inverse, dy * scale
    dx = (dnormal - normal * (dnormal * normal).mean(axes, keepdims=True)) * inverse
    return dx, (dy * normal).sum(rows)


def _lrn(step: BackwardStep) -> Gradients:
    """Differentiate LRN. Its sums over neighbouring channels are products with a band matrix of ones."""
    op, x, dy = step.op, wide(step.x[0]), wide(step.dy)
    channels, before = x.shape[1], (op.size - 1) // 2
    i, j = np.indices((channels, channels))
    band = ((j >= i - before) & (j <= i - before + op.size - 1)).astype(np.float64)
    flat = (x.shape[0], channels, math.prod(x.shape[2:]))
    rows, loss = x.reshape(flat), dy.reshape(flat)
    total = (step.b.constant(band, x.dtype) @ (rows * rows)) * (op.alpha / op.size) + op.bias
    scaled = loss * total**-op.beta
    around = step.b.constant(band.T, x.dtype) @ (scaled * rows / total)
    return (scaled - rows * around * (2.0 * op.alpha * op.beta / op.size)).reshape(x.shape)


RULES: dict[str, Rule] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "batch_norm_train": _batch_norm_train,
    "channel_sums": by_formula(_channel_sums, lambda: _rules()),
    "batch_norm_by_sums": by_formula(_batch_norm_by_sums, lambda: _rules()),
    "batch_norm_backward": by_formula(_batch_norm_backward, lambda: _rules()),
    "layer_norm_backward": by_formula(_layer_norm_backward, lambda: _rules()),
    "lrn": _lrn,
}


def _rules() -> Rules:
    return {**POINTWISE, **PRODUCTS, **INDEXING, **RULES}
