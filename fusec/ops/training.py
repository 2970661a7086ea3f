"""Define ops that only training needs: gradients of filters, max pooling and norms, and batch norm over the batch."""

from __future__ import annotations

import math
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
from fusec.ops.spec import normalize_axis, per_channel, require, require_arity, require_float, wide, widened
from fusec.system.dataclass import dataclass

MOST_PLACES = 1 << 8  # elements of a window whose places u8 names


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
        # images and positions become one dim, because the product sums over both
        matrix = xp.moveaxis(columns[images], 0, 1 + len(count)).reshape(groups, taps, -1)
        loss = xp.moveaxis(dy[images], 0, 1).reshape(groups, dy.shape[1] // groups, -1)
        result += xp.matmul(loss, matrix.swapaxes(1, 2))
    return result.reshape(dy.shape[1], x.shape[1] // groups, *op.window)


@dataclass(frozen=True)
class MaxPoolTrain(Pool):
    """Maximum over each window, and the place of the first maximum in its window, as u8: a row-major index.

    Outside the image is less than every number. A window has at most 256 elements.
    """

    name: ClassVar[str] = "max_pool_train"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        require_float(self.name, *operands)
        (y,) = super().infer(*operands)
        _check_places(self)
        return (y, TensorType(y.shape, DType.U8, y.order))

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        places = _first_places(self, xp, wide(operands[0])).astype(np.uint8)
        return (widened(lambda x: _flat_windows(self, xp, x).max(axis=2), *operands), places)


@dataclass(frozen=True)
class MaxPoolBackward(Pool):
    """Gradient of max_pool of the same attributes, from dy and its operand x.

    The first maximum of each window gets the whole gradient of the window. With `image`, the spatial dims of x, the
    second operand is the places of max_pool_train instead of x.
    """

    image: tuple[int, ...] = ()
    name: ClassVar[str] = "max_pool_backward"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 2)
        dy, x = operands
        if self.image:
            places, x = x, TensorType((*dy.shape[:2], *self.image), dy.dtype, dy.order)
            _check_places(self)
            require(
                places.dtype is DType.U8 and places.shape == dy.shape,
                f"places of {places.dtype.value}{list(places.shape)} for dy of shape {list(dy.shape)}",
            )
        require_float(self.name, dy, x)
        (pooled,) = super().infer(x)
        require(dy.shape == pooled.shape, f"dy has shape {list(dy.shape)}, pooling x gives {list(pooled.shape)}")
        return (x,)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(dy: Array, x: Array) -> Array:
            first = x if self.image else _first_places(self, xp, x)
            spatial = self.image or x.shape[2:]
            result = xp.zeros((*x.shape[:2], *self.padded(spatial)), dy.dtype)
            for number, tap in enumerate(indices_of(self.window)):
                place = tuple(
                    slice(t * d, t * d + s * (c - 1) + 1, s)
                    for t, d, s, c in zip(tap, self.dilations, self.strides, dy.shape[2:], strict=True)
                )
                result[(slice(None), slice(None), *place)] += xp.where(first == number, dy, 0).astype(dy.dtype)
            crop = tuple(slice(p0, p0 + i) for p0, i in zip(self.pads, spatial, strict=False))
            return result[(slice(None), slice(None), *crop)]

        return (widened(compute, *operands),)


def _check_places(pool: Pool) -> None:
    taps = math.prod(pool.window)
    require(taps <= MOST_PLACES, f"{pool.name}: a window of {taps} elements, of which u8 names {MOST_PLACES}")


def _flat_windows(pool: Pool, xp: Any, x: Array) -> Array:
    """Return [N, C, taps, count…]."""
    windows = pool.windows(xp, x, -math.inf)
    return windows.reshape(*x.shape[:2], math.prod(pool.window), *pool.counts(x.shape[2:]))


def _first_places(pool: Pool, xp: Any, x: Array) -> Array:
    """Return the tap of the first maximum of each window: [N, C, count…]."""
    return _flat_windows(pool, xp, x).argmax(axis=2)


def _check_statistics(op: str, x: TensorType, parameters: tuple[TensorType, ...]) -> None:
    require_float(op, x)
    require(x.rank >= 2, f"{op} needs a channel dim, x has shape {list(x.shape)}")
    require(x.size > 0, f"{op}: statistics of an empty batch {list(x.shape)}")
    for t in parameters:
        require(t.shape == (x.shape[1],), f"{op}: parameter of shape {list(t.shape)} for {x.shape[1]} channels")
        same = t.dtype is parameters[0].dtype and _are_statistics(t, x)
        require(same, f"{op}: parameters of {t.dtype.value} with x of {x.dtype.value}")


def _are_statistics(t: TensorType, x: TensorType) -> bool:
    """Tell if parameters or statistics of x may have the dtype of `t`: that of x, or f32 for 16 bits."""
    return t.dtype is x.dtype or (t.dtype is DType.F32 and x.dtype in HALVES)


@dataclass(frozen=True)
class BatchNormTrain(Op):
    """Normalise x over its batch, times scale plus bias; also the mean and 1/sqrt(variance + epsilon) of the batch.

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
            x, scale, bias = map(wide, operands)
            axes = (0, *range(2, x.ndim))
            mean = x.mean(axis=axes)
            centred = x - per_channel(x, mean)
            inverse = 1.0 / xp.sqrt((centred * centred).mean(axis=axes) + self.epsilon)
            y = centred * per_channel(x, inverse * scale) + per_channel(x, bias)
            dtype = operands[1].dtype
            return (y.astype(operands[0].dtype), mean.astype(dtype), inverse.astype(dtype))


@dataclass(frozen=True)
class ChannelSums(Op):
    """Sum of the elements of each channel, and sum of their squares; in f32 if x has 16 bits."""

    name: ClassVar[str] = "channel_sums"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        (x,) = operands
        _check_statistics(self.name, x, ())
        statistics = TensorType((x.shape[1],), DType.F64 if x.dtype is DType.F64 else DType.F32)
        return (statistics, statistics)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            x = wide(operands[0])
            axes = (0, *range(2, x.ndim))
            return (x.sum(axis=axes), (x * x).sum(axis=axes))


@dataclass(frozen=True)
class BatchNormBySums(Op):
    """The results of batch_norm_train, from x, scale, bias and the channel_sums of x.

    The variance is the mean of squares less the square of the mean, and at least zero. It loses digits where the mean
    is many standard deviations.
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
            require(_are_statistics(given, x), f"{self.name}: sums of {given.dtype.value} with x of {x.dtype.value}")
        return (x, TensorType(scale.shape, scale.dtype), TensorType(scale.shape, scale.dtype))

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            x, scale, bias = map(wide, operands[:3])
            count = x.size // x.shape[1]
            mean, squares = (v.astype(xp.float64) / count for v in operands[3:])
            inverse = 1.0 / xp.sqrt(xp.maximum(squares - mean * mean, 0.0) + self.epsilon)
            mean, inverse = mean.astype(x.dtype), inverse.astype(x.dtype)
            y = (x - per_channel(x, mean)) * per_channel(x, inverse * scale) + per_channel(x, bias)
            dtype = operands[1].dtype
            return (y.astype(operands[0].dtype), mean.astype(dtype), inverse.astype(dtype))


@dataclass(frozen=True)
class BatchNormBackward(Op):
    """Gradients of x, scale and bias of batch_norm_train, from dy, x, scale, and its two statistics.

    With `relu`, dy is the gradient of the relu of its result, and bias is an operand, too.
    """

    relu: bool = False
    name: ClassVar[str] = "batch_norm_backward"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 6 if self.relu else 5)
        dy, x, scale, *others = operands
        _check_statistics(self.name, x, (scale, *others))
        require(dy.same_value_type(x), f"dy is {dy}, x {x}")
        statistics = TensorType(scale.shape, scale.dtype)
        return (x, statistics, statistics)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            dy, x, scale, mean, inverse, *bias = map(wide, operands)
            axes, count = (0, *range(2, x.ndim)), x.size // x.shape[1]
            centred = x - per_channel(x, mean)
            for shift in bias:  # rounded like the forward result, because the rounding may make it zero
                y = centred * per_channel(x, inverse * scale) + per_channel(x, shift)
                dy = xp.where(y.astype(operands[1].dtype) > 0, dy, xp.zeros_like(dy))
            normal = centred * per_channel(x, inverse)
            dbias, dscale = dy.sum(axis=axes), (dy * normal).sum(axis=axes)
            inner = dy - per_channel(x, dbias / count) - normal * per_channel(x, dscale / count)
            dx = inner * per_channel(x, scale * inverse)
            dtype = operands[2].dtype
            return (dx.astype(operands[1].dtype), dscale.astype(dtype), dbias.astype(dtype))


@dataclass(frozen=True)
class LayerNormBackward(Op):
    """Gradients of x, scale and bias of layer_norm of the same attributes, from dy, x and scale.

    The scale has the whole shape of the normalised dims. Without `centred`, these are the gradients of x and scale of
    rms_norm. With x in f16 or bf16, scale and its gradient may be f32.
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
        fits = _are_statistics(scale, x)
        require(fits, f"{self.name}: parameters of {scale.dtype.value} with x of {x.dtype.value}")
        statistics = TensorType(scale.shape, scale.dtype)
        return (x, statistics, statistics) if self.centred else (x, statistics)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            dy, x, scale = map(wide, operands)
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
            dtype = operands[2].dtype
            return (dx.astype(operands[1].dtype), *(v.astype(dtype) for v in sums))
