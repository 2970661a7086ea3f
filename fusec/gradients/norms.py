"""Differentiate normalisations. 16-bit floats are cast to f32 first, because differences of sums lose precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fusec.builder import Tensor
from fusec.gradients.core import BackwardStep, Gradients, Rule, by_formula, total, wide
from fusec.ir import HALVES, DType
from fusec.ops import BatchNormBackward, LayerNorm, LayerNormBackward


def _per_channel(v: Tensor, rank: int) -> Tensor:
    return v.reshape(1, -1, *([1] * (rank - 2)))


def _standardized(x: Tensor, axes: tuple[int, ...], epsilon: float, centred: bool = True) -> tuple[Tensor, Tensor]:
    """Divide by the standard deviation; before that, subtract the mean if `centred`.

    Returns the result and the inverse deviation.
    """
    shifted = x - x.mean(axes, keepdims=True) if centred else x
    inverse = ((shifted * shifted).mean(axes, keepdims=True) + epsilon).rsqrt()
    return shifted * inverse, inverse


def _back(dnormal: Tensor, normal: Tensor, inverse: Tensor, axes: tuple[int, ...], centred: bool = True) -> Tensor:
    """Compute the gradient of `_standardized` from the gradient of its first result."""
    along = normal * (dnormal * normal).mean(axes, keepdims=True)
    return ((dnormal - dnormal.mean(axes, keepdims=True) if centred else dnormal) - along) * inverse


def _row_norm(step: BackwardStep) -> Gradients:
    """Differentiate layer_norm, or rms_norm, which does not subtract the mean.

    layer_norm_backward needs a scale with one element for each normalised element.
    """
    op, (x, scale, *bias) = step.op, step.x
    centred = isinstance(op, LayerNorm)
    same_dtype = scale.dtype is x.dtype or (scale.dtype is DType.F32 and x.dtype in HALVES)
    if x.size > 0 and scale.shape == x.shape[op.axis % x.rank :] and same_dtype:
        backward = LayerNormBackward(op.axis, op.epsilon, centred)
        return step.b.results(backward, step.dy, x, scale)[: len(step.x)]
    dy = wide(step.dy)
    return *_rows_back(op, dy, wide(x), wide(scale), centred), *([dy] if bias else [])


def _rows_back(op: Any, dy: Tensor, x: Tensor, scale: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
    """Compute the gradients of a norm of rows: of x, and of the scale as if each row had one."""
    axes = tuple(range(op.axis % x.rank, x.rank))
    normal, inverse = _standardized(x, axes, op.epsilon, centred)
    return _back(dy * scale, normal, inverse, axes, centred), dy * normal


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
    parts: list[Tensor] = []
    dscale = dbias = None
    if dy is not None:
        dx, dscale, dbias = step.b.results(BatchNormBackward(), dy, x, scale, mean, inverse)
        parts.append(dx)
    count = x.size // x.shape[1]
    if dmean is not None:
        part = _per_channel(dmean * (1.0 / count), x.rank).expand(x.shape).astype(x.dtype)
        parts.append(part)
    if dinverse is not None:
        slope = _per_channel(dinverse * inverse * inverse * inverse * (-1.0 / count), x.rank)
        parts.append(((wide(x) - _per_channel(wide(mean), x.rank)) * wide(slope)).astype(x.dtype))
    return total(parts), dscale, dbias


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
    x, scale, bias, sums, squares = map(wide, operands)
    count = x.size // x.shape[1]
    mean = sums * (1.0 / count)
    inverse = ((squares * (1.0 / count) - mean * mean).relu() + step.op.epsilon).rsqrt()
    centred = x - _per_channel(mean, x.rank)
    y = centred * _per_channel(inverse * scale, x.rank) + _per_channel(bias, x.rank)
    return y, mean, inverse


def _layer_norm_backward(step: BackwardStep, *operands: Tensor) -> tuple[Tensor, ...]:
    """Express layer_norm_backward by other ops."""
    dy, x, scale = map(wide, operands)
    rows = tuple(range(step.op.axis % x.rank))
    dx, dscale = _rows_back(step.op, dy, x, scale, step.op.centred)
    return dx, dscale.sum(rows), *([dy.sum(rows)] if step.op.centred else [])


def _lrn(step: BackwardStep) -> Gradients:
    """Differentiate LRN. Its sums over neighbouring channels are products with a band matrix of ones."""
    op, x, dy = step.op, wide(step.x[0]), wide(step.dy)
    channels, before = x.shape[1], (op.size - 1) // 2
    i, j = np.indices((channels, channels))
    band = ((j >= i - before) & (j <= i - before + op.size - 1)).astype(np.float64)
    flat = (x.shape[0], channels, math.prod(x.shape[2:]))
    rows, loss = x.reshape(flat), dy.reshape(flat)
    divisor = (step.b.constant(band, x.dtype) @ (rows * rows)) * (op.alpha / op.size) + op.bias
    scaled = loss * divisor**-op.beta
    around = step.b.constant(band.T, x.dtype) @ (scaled * rows / divisor)
    return (scaled - rows * around * (2.0 * op.alpha * op.beta / op.size)).reshape(x.shape)


RULES: dict[str, Rule] = {
    "layer_norm": _row_norm,
    "rms_norm": _row_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "batch_norm_train": _batch_norm_train,
    "channel_sums": by_formula(_channel_sums),
    "batch_norm_by_sums": by_formula(_batch_norm_by_sums),
    "batch_norm_backward": by_formula(_batch_norm_backward),
    "layer_norm_backward": by_formula(_layer_norm_backward),
    "lrn": _lrn,
}
