"""Define ops of training alone: gradients of filters and of max pooling, batch norm by the batch's own statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fusec.ir import HALVES, Array, DType, Op, TensorType
from fusec.ops.convolution import (
    IM2COL_BYTES,
    check_window,
    indices_of,
    pad_spatial,
    sliding,
    windows_along,
)
from fusec.ops.pooling import Pool
from fusec.ops.spec import is_half, normalize_axis, require, require_arity, require_float, widened


@dataclass(frozen=True)
class ConvWgrad(Op):
    """Gradient of a convolution's filters: x[N, C, spatial…] with dy[N, K, spatial…] -> [K, C/groups, window…].

    Attributes are the convolution's; `window` has the filters' spatial dims.
    """

    window: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int = 1
    name: ClassVar[str] = "conv_wgrad"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 2)
        x, dy = operands
        require_float(self.name, x, dy)
        n = x.rank - 2
        require(1 <= n <= 3, f"{self.name} takes 1 to 3 spatial dims, x has shape {list(x.shape)}")
        require(len(self.window) == n and all(k >= 1 for k in self.window), f"window {list(self.window)} for {n} dims")
        check_window(self.name, n, self.strides, self.pads, self.dilations)
        require(self.groups >= 1 and x.shape[1] % self.groups == 0, f"groups={self.groups} with {x.shape[1]} channels")
        spatial = windows_along(x.shape[2:], self.window, self.strides, self.pads, self.dilations)
        require(
            dy.rank == x.rank and (dy.shape[0], *dy.shape[2:]) == (x.shape[0], *spatial),
            f"dy has shape {list(dy.shape)}, the convolution gives [{x.shape[0]}, K, {', '.join(map(str, spatial))}]",
        )
        require(dy.shape[1] % self.groups == 0, f"{dy.shape[1]} filters do not divide into {self.groups} groups")
        return (TensorType((dy.shape[1], x.shape[1] // self.groups, *self.window), x.dtype),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return (widened(lambda x, dy: correlate_batch(xp, x, dy, self), *operands),)


def correlate_batch(xp: Any, x: Array, dy: Array, op: ConvWgrad) -> Array:
    """Compute the filters' gradient by im2col and matmuls over blocks of images."""
    count, groups = dy.shape[2:], op.groups
    taps = x.shape[1] // groups * math.prod(op.window)
    columns = sliding(xp, pad_spatial(xp, x, op.pads), op.window, op.strides, op.dilations, count)
    result = xp.zeros((groups, dy.shape[1] // groups, taps), x.dtype)
    block = max(1, IM2COL_BYTES // max(1, groups * taps * math.prod(count) * x.dtype.itemsize))
    for first in range(0, x.shape[0], block):
        images = slice(first, min(first + block, x.shape[0]))
        # the image's number next to the places, which both are summed over
        matrix = xp.moveaxis(columns[images], 0, 1 + len(count)).reshape(groups, taps, -1)
        loss = xp.moveaxis(dy[images], 0, 1).reshape(groups, dy.shape[1] // groups, -1)
        result += xp.matmul(loss, matrix.swapaxes(1, 2))
    return result.reshape(dy.shape[1], x.shape[1] // groups, *op.window)


@dataclass(frozen=True)
class MaxPoolBackward(Pool):
    """Gradient of max_pool of the same attributes, from dy and the pooled x: all to each window's first maximum."""

    name: ClassVar[str] = "max_pool_backward"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 2)
        require_float(self.name, *operands)
        dy, x = operands
        (pooled,) = super().infer(x)
        require(dy.shape == pooled.shape, f"dy has shape {list(dy.shape)}, pooling x gives {list(pooled.shape)}")
        return (x,)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(dy: Array, x: Array) -> Array:
            n = x.ndim - 2
            windows = self.windows(xp, x, -math.inf)
            first = windows.reshape(*x.shape[:2], math.prod(self.window), *dy.shape[2:]).argmax(axis=2)
            ends = [
                max(p, (c - 1) * s + d * (k - 1) + 1 - i - p0)
                for c, s, d, k, i, p0, p in zip(
                    dy.shape[2:],
                    self.strides,
                    self.dilations,
                    self.window,
                    x.shape[2:],
                    self.pads[:n],
                    self.pads[n:],
                    strict=True,
                )
            ]
            padded = [i + p0 + p1 for i, p0, p1 in zip(x.shape[2:], self.pads, ends, strict=False)]
            result = xp.zeros((*x.shape[:2], *padded), x.dtype)
            for number, tap in enumerate(indices_of(self.window)):
                place = tuple(
                    slice(t * d, t * d + s * (c - 1) + 1, s)
                    for t, d, s, c in zip(tap, self.dilations, self.strides, dy.shape[2:], strict=True)
                )
                result[(slice(None), slice(None), *place)] += xp.where(first == number, dy, 0).astype(x.dtype)
            crop = tuple(slice(p0, p0 + i) for p0, i in zip(self.pads[:n], x.shape[2:], strict=True))
            return result[(slice(None), slice(None), *crop)]

        return (widened(compute, *operands),)


def _check_statistics(op: str, x: TensorType, parameters: tuple[TensorType, ...]) -> None:
    require_float(op, x)
    require(x.rank >= 2, f"{op} needs a channel dim, x has shape {list(x.shape)}")
    require(x.size > 0, f"{op}: statistics of an empty batch {list(x.shape)}")
    halves = HALVES
    for t in parameters:
        require(t.shape == (x.shape[1],), f"{op}: parameter of shape {list(t.shape)} for {x.shape[1]} channels")
        same = t.dtype is parameters[0].dtype and (t.dtype is x.dtype or (t.dtype is DType.F32 and x.dtype in halves))
        require(same, f"{op}: parameters of {t.dtype.value} with x of {x.dtype.value}")


def _channels(x: Array, v: Array) -> Array:
    return v.reshape(1, -1, *([1] * (x.ndim - 2)))


def _wide(xp: Any, x: Array) -> Array:
    return x.astype(xp.float32) if is_half(x) else x


@dataclass(frozen=True)
class BatchNormTrain(Op):
    """x by the mean and variance of its batch, times scale plus bias; also that mean and 1/sqrt(variance + epsilon).

    With x in f16 or bf16, the parameters and so the statistics may be f32.
    """

    epsilon: float = 1e-5
    name: ClassVar[str] = "batch_norm_train"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 3)
        x, scale, bias = operands
        _check_statistics(self.name, x, (scale, bias))
        return (x, TensorType(scale.shape, scale.dtype), TensorType(scale.shape, scale.dtype))

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            x, scale, bias = (_wide(xp, v) for v in operands)
            axes = (0, *range(2, x.ndim))
            mean = x.mean(axis=axes)
            centred = x - _channels(x, mean)
            inverse = 1.0 / xp.sqrt((centred * centred).mean(axis=axes) + self.epsilon)
            y = centred * _channels(x, inverse * scale) + _channels(x, bias)
            kept = operands[1].dtype
            return (y.astype(operands[0].dtype), mean.astype(kept), inverse.astype(kept))


@dataclass(frozen=True)
class ChannelSums(Op):
    """Sum of each channel's elements, and sum of their squares; f32 for 16 bits."""

    name: ClassVar[str] = "channel_sums"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        (x,) = operands
        _check_statistics(self.name, x, ())
        kept = TensorType((x.shape[1],), DType.F64 if x.dtype is DType.F64 else DType.F32)
        return (kept, kept)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            x = _wide(xp, operands[0])
            axes = (0, *range(2, x.ndim))
            return (x.sum(axis=axes), (x * x).sum(axis=axes))


@dataclass(frozen=True)
class BatchNormBySums(Op):
    """The results of batch_norm_train, from x, scale, bias and the channel_sums of x.

    The variance is the mean of squares less the square of the mean, and no less than zero. A mean of many deviations
    costs digits.
    """

    epsilon: float = 1e-5
    name: ClassVar[str] = "batch_norm_by_sums"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 5)
        x, scale, bias, *sums = operands
        _check_statistics(self.name, x, (scale, bias))
        for given in sums:
            require(
                given.shape == scale.shape, f"{self.name}: sums of shape {list(given.shape)} for {x.shape[1]} channels"
            )
            fits = given.dtype is x.dtype or (given.dtype is DType.F32 and x.dtype in HALVES)
            require(fits, f"{self.name}: sums of {given.dtype.value} with x of {x.dtype.value}")
        return (x, TensorType(scale.shape, scale.dtype), TensorType(scale.shape, scale.dtype))

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            x, scale, bias = (_wide(xp, v) for v in operands[:3])
            count = x.size // x.shape[1]
            mean, squares = (v.astype(xp.float64) / count for v in operands[3:])
            inverse = 1.0 / xp.sqrt(xp.maximum(squares - mean * mean, 0.0) + self.epsilon)
            mean, inverse = mean.astype(x.dtype), inverse.astype(x.dtype)
            y = (x - _channels(x, mean)) * _channels(x, inverse * scale) + _channels(x, bias)
            kept = operands[1].dtype
            return (y.astype(operands[0].dtype), mean.astype(kept), inverse.astype(kept))


@dataclass(frozen=True)
class BatchNormBackward(Op):
    """Gradients of x, scale and bias of batch_norm_train, from dy, x, scale, and its two statistics.

    With `relu`, of the relu of its result: bias is then an operand too.
    """

    relu: bool = False
    name: ClassVar[str] = "batch_norm_backward"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 6 if self.relu else 5)
        dy, x, scale, *others = operands
        _check_statistics(self.name, x, (scale, *others))
        require(dy.same_value_type(x), f"dy is {dy}, x {x}")
        kept = TensorType(scale.shape, scale.dtype)
        return (x, kept, kept)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            dy, x, scale, mean, inverse, *bias = (_wide(xp, v) for v in operands)
            axes, count = (0, *range(2, x.ndim)), x.size // x.shape[1]
            centred = x - _channels(x, mean)
            for shift in bias:  # rounded as the result was, which may be what makes it zero
                y = centred * _channels(x, inverse * scale) + _channels(x, shift)
                dy = xp.where(y.astype(operands[1].dtype) > 0, dy, xp.zeros_like(dy))
            normal = centred * _channels(x, inverse)
            dbias, dscale = dy.sum(axis=axes), (dy * normal).sum(axis=axes)
            inner = dy - _channels(x, dbias / count) - normal * _channels(x, dscale / count)
            dx = inner * _channels(x, scale * inverse)
            kept = operands[2].dtype
            return (dx.astype(operands[1].dtype), dscale.astype(kept), dbias.astype(kept))


@dataclass(frozen=True)
class LayerNormBackward(Op):
    """Gradients of x, scale and bias of layer_norm of the same attributes, from dy, x and scale, a full one.

    Not `centred`: those of x and scale of rms_norm. With x in f16 or bf16, scale and so its gradient may be f32.
    """

    axis: int = -1
    epsilon: float = 1e-5
    centred: bool = True
    name: ClassVar[str] = "layer_norm_backward"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 3)
        require_float(self.name, *operands[:2])
        dy, x, scale = operands
        axis = normalize_axis(self.axis, x.rank)
        require(x.size > 0, f"{self.name}: statistics of an empty batch {list(x.shape)}")
        require(dy.same_value_type(x), f"dy is {dy}, x {x}")
        shapes = f"parameter of shape {list(scale.shape)} for normalised dims {list(x.shape[axis:])}"
        require(scale.shape == x.shape[axis:], f"{self.name}: {shapes}")
        same = scale.dtype is x.dtype or (scale.dtype is DType.F32 and x.dtype in HALVES)
        require(same, f"{self.name}: parameters of {scale.dtype.value} with x of {x.dtype.value}")
        kept = TensorType(scale.shape, scale.dtype)
        return (x, kept, kept) if self.centred else (x, kept)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            dy, x, scale = (_wide(xp, v) for v in operands)
            first = self.axis % x.ndim
            axes, rows = tuple(range(first, x.ndim)), tuple(range(first))
            centred = x - x.mean(axis=axes, keepdims=True) if self.centred else x
            inverse = 1.0 / xp.sqrt((centred * centred).mean(axis=axes, keepdims=True) + self.epsilon)
            normal, inner = centred * inverse, dy * scale
            along = normal * (inner * normal).mean(axis=axes, keepdims=True)
            if self.centred:
                along = along + inner.mean(axis=axes, keepdims=True)
            dx, dscale = (inner - along) * inverse, (dy * normal).sum(axis=rows)
            sums = (dscale, dy.sum(axis=rows)) if self.centred else (dscale,)
            kept = operands[2].dtype
            return (dx.astype(operands[1].dtype), *(v.astype(kept) for v in sums))
