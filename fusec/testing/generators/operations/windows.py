"""Draw convolutions, pools and their gradients, with windows that fit an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fusec.ir import DType, TensorType, Value
from fusec.ops import (
    AvgPool,
    Cast,
    Conv,
    ConvTranspose,
    ConvWgrad,
    DeformConv,
    FlippedConv,
    MaxPool,
    MaxPoolBackward,
    MaxPoolTrain,
)
from fusec.ops.convolution import windows_along
from fusec.ops.pooling import Pool
from fusec.testing.generators.graph_builder import Draw, RandomGraph, Unfit


def window(b: RandomGraph, sizes: Sequence[int], pads_below_window: bool = False) -> tuple[tuple[int, ...], ...]:
    """Draw window, strides, pads and dilations that fit an image of these spatial sizes."""
    n = len(sizes)
    kernel = [b.pick([3, 1, 2, 5]) for _ in range(n)] if b.chance(85) else [1] * n
    dilations = [b.pick([1, 1, 1, 2]) for _ in range(n)]
    starts, ends = list[int](), list[int]()
    same = b.chance(40)
    for i, size in enumerate(sizes):
        most = dilations[i] * (kernel[i] - 1)
        pads = [0, 0]
        if same:
            pads = [most // 2, most // 2]
        elif b.chance(40):
            pads = [b.below(min(most, 2) + 1), b.below(min(most, 2) + 1)]
        if not pads_below_window and b.chance(4):
            pads[1] += 2
        while size + sum(pads) < dilations[i] * (kernel[i] - 1) + 1:
            kernel[i] -= 1
            if pads_below_window:
                pads = [min(p, dilations[i] * (kernel[i] - 1)) for p in pads]
        starts.append(pads[0])
        ends.append(pads[1])
    strided = b.chance(35 if max(kernel, default=1) > 1 else 70)
    strides = tuple(b.pick([2, 1, 3, 1]) for _ in range(n)) if strided else (1,) * n
    return tuple(kernel), strides, (*starts, *ends), tuple(dilations)


def convolve(
    b: RandomGraph,
    x: Value,
    filters: int = 0,
    keep_size: bool = False,
    kind: type[Conv] | type[FlippedConv] = Conv,
) -> Value:
    """Draw a convolution of an image. `keep_size`: the result has the spatial size of the image."""
    channels, spatial = x.type.shape[1], x.type.shape[2:]
    n = len(spatial)
    groups = b.pick([1, 1, 1, *(g for g in (2, channels) if g > 1 and channels % g == 0)])
    filters = filters or groups * b.pick([1, 2, 4, 8, 3]) if filters == 0 or filters % groups else filters
    if keep_size:
        side = b.pick([1, 3])
        kernel, strides, pads, dilations = (side,) * n, (1,) * n, (side // 2,) * 2 * n, (1,) * n
    else:
        kernel, strides, pads, dilations = window(b, spatial)
    shape = (filters, channels // groups, *kernel)
    if math.prod(shape) > 1500:
        raise Unfit("too many weights")
    type = TensorType(shape, x.type.dtype)
    # constant filters are reversed at compile time; then little is left to test
    weight = b.fresh(type) if b.chance(8 if kind is Conv else 70) else b.constant(shape, x.type.dtype)
    return b.add(kind(strides, pads, dilations, groups), x, weight)


def conv(b: RandomGraph) -> None:
    image = b.image()
    if b.chance(8):  # exact sums of 8-bit integers
        image = b.fresh(TensorType(image.type.shape, DType.I8))
    convolve(b, image)


def conv_flipped(b: RandomGraph) -> None:
    convolve(b, b.image(), kind=FlippedConv)


def conv_transpose(b: RandomGraph) -> None:
    convolve_transposed(b, b.image())


def convolve_transposed(b: RandomGraph, x: Value) -> Value:
    """Draw a transposed convolution of an image."""
    channels, spatial = x.type.shape[1], x.type.shape[2:]
    n = len(spatial)
    groups = b.pick([1, 1, *(g for g in (2, channels) if channels % g == 0)])
    kernel = tuple(b.pick([2, 3, 1]) for _ in range(n))
    strides = tuple(b.pick([1, 2, 3]) for _ in range(n))
    dilations = tuple(b.pick([1, 1, 2]) for _ in range(n))
    pads = tuple(b.below(2) for _ in range(2 * n)) if b.chance(50) else (0,) * 2 * n
    extra = tuple(b.below(s) for s in strides) if b.chance(40) else (0,) * n
    weight = b.constant((channels, b.pick([1, 2, 3]), *kernel), x.type.dtype)
    return b.add(ConvTranspose(strides, pads, dilations, extra, groups), x, weight)


def deform_conv(b: RandomGraph) -> None:
    """Draw a deformable convolution whose offsets are exact in 16 bits, and which reads between pixels."""
    x = b.some(lambda t: t.rank == 4 and 0 < t.size <= 4096 and t.dtype.is_float)
    batch, channels, *image = x.type.shape
    groups, offset_groups = (b.pick([1, 1, *(g for g in (2, 3, channels) if channels % g == 0)]) for _ in range(2))
    kernel, strides, pads, dilations = window(b, image)
    shape = (groups * b.pick([1, 2, 4, 8, 3]), channels // groups, *kernel)
    moved = offset_groups * math.prod(kernel)
    out = windows_along(image, kernel, strides, pads, dilations)
    if math.prod(shape) > 1500 or batch * moved * math.prod(out) > 4096:
        raise Unfit("too many weights or offsets")
    w = b.fresh(TensorType(shape, x.type.dtype)) if b.chance(8) else b.constant(shape, x.type.dtype)
    numbers = np.array([2 * b.between(-12, 12) + 1 for _ in range(11)]) / 8
    offset = b.graph.constant(np.resize(numbers, (batch, 2 * moved, *out)).astype(x.type.dtype.numpy))
    mask = [b.fresh(TensorType((batch, moved, *out), x.type.dtype))] if b.chance(50) else []
    b.add(DeformConv(strides, pads, dilations, groups, offset_groups), x, w, offset, *mask)


def pool(kind: type[MaxPool] | type[AvgPool]) -> Draw:
    def draw(b: RandomGraph) -> None:
        x = b.image()
        kernel, strides, pads, dilations = window(b, x.type.shape[2:], pads_below_window=True)
        ceil_mode = b.chance(30)
        if kind is AvgPool:
            b.add(AvgPool(kernel, strides, pads, dilations, ceil_mode, b.chance(40)), x)
        else:
            b.add(MaxPool(kernel, strides, pads, dilations, ceil_mode), x)

    return draw


def conv_wgrad(b: RandomGraph) -> None:
    """Draw the weight gradient of a convolution that fits an image."""
    x = b.image()
    channels, spatial = x.type.shape[1], x.type.shape[2:]
    groups = b.pick([1, 1, *(g for g in (2, channels) if channels % g == 0)])
    kernel, strides, pads, dilations = window(b, spatial)
    count = windows_along(spatial, kernel, strides, pads, dilations)
    filters = groups * b.pick([1, 2, 4])
    dy = b.fresh(TensorType((x.type.shape[0], filters, *count), x.type.dtype))
    b.add(ConvWgrad(kernel, strides, pads, dilations, groups), x, dy)


def max_pool_backward(b: RandomGraph) -> None:
    """Draw the gradient of a max pool of integers, because rounding can change which of two floats is larger."""
    x, attributes = _integers_to_pool(b)
    op = MaxPoolBackward(*attributes)
    b.add(op, _gradient_of_pool(b, x, op), x)


def max_pool_train(b: RandomGraph) -> None:
    """Draw a max pool with its places, and the gradient at them."""
    x, attributes = _integers_to_pool(b)
    places = b.insert(MaxPoolTrain(*attributes), x).results[1]
    op = MaxPoolBackward(*attributes, image=x.type.shape[2:])
    b.add(op, _gradient_of_pool(b, x, op), places)


def _integers_to_pool(b: RandomGraph) -> tuple[Value, tuple[Any, ...]]:
    """Draw whole numbers, and the attributes of a max pool over them."""
    b.image()
    x = b.add(Cast(b.dtype), b.input(TensorType(b.image_shape(), DType.I8)))
    return x, (*window(b, x.type.shape[2:], pads_below_window=True), b.chance(30))


def _gradient_of_pool(b: RandomGraph, x: Value, op: Pool) -> Value:
    return b.fresh(TensorType((*x.type.shape[:2], *op.counts(x.type.shape[2:])), b.dtype))
