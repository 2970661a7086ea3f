"""Draw steps for the kernels of convolutions."""

from __future__ import annotations

from fusec.ir import DType, TensorType, channels_last
from fusec.ops import Cast, Conv, ConvWgrad, MatMul, Pad, Reduce, Slice
from fusec.testing.generators.graph_builder import RandomGraph
from fusec.testing.generators.motifs.kernels.parts import (
    convolved,
    half_dtype,
    image_input,
    image_side,
    op_with_epilogue,
    scaled_sums,
)
from fusec.testing.generators.motifs.layers import epilogue
from fusec.testing.generators.operations.pointwise import draw_pointwise


def depthwise(b: RandomGraph) -> None:
    """Draw a depthwise convolution, pointwise ops, and sometimes the mean of each channel."""
    channels = b.pick([8, 16, 4, 3, 5])
    y = epilogue(b, convolved(b, image_input(b, channels, image_side(b), image_side(b)), channels, channels), 2)
    if b.chance(40):
        b.add(Reduce("mean", (2, 3)), y)


def squeeze_excite(b: RandomGraph) -> None:
    """Draw a sequence of two or three small products, as in squeeze and excitation."""
    samples, width = b.pick([1, 2, 3, 5]), b.pick([8, 16, 5, 33])
    images = b.chance(60)
    y = b.input(TensorType((samples, width, 1, 1) if images else (samples, width), b.dtype))
    for last in (False, True) if b.chance(70) else (False, False, True):
        wide = b.pick([4, 8, 3, 17])
        if images:
            y = b.add(Conv((1, 1), (0,) * 4, (1, 1), 1), y, b.constant((wide, width, 1, 1), b.dtype))
        else:
            y = b.add(MatMul(), y, b.constant((width, wide), b.dtype))
        if b.chance(60):
            y = b.pointwise("add", y, b.constant((wide, 1, 1) if images else (wide,), b.dtype))
        y, width = draw_pointwise(b, b.pick(["sigmoid", "hard_sigmoid"] if last else ["relu", "swish"]), y), wide


def split_k(b: RandomGraph) -> None:
    """Draw a convolution of many channels over a small image."""
    b.dtype = half_dtype(b)
    x = image_input(b, b.pick([32, 64, 96]), b.pick([4, 1, 7, 5]), b.pick([4, 3, 7, 9]))
    epilogue(b, convolved(b, x, b.pick([16, 32, 48])), 3)


def deform_conv(b: RandomGraph) -> None:
    """Draw a deformable convolution of an image of any layout, with pointwise ops after it."""
    op_with_epilogue(b, image_input(b, b.pick([4, 8, 3, 16]), image_side(b), image_side(b)), "deform_conv")


def few_channels(b: RandomGraph) -> None:
    """Draw a convolution of an image of four channels, of which the last can be padding, or of a video."""
    b.dtype = half_dtype(b)
    if b.chance(30):
        sizes, k = (b.between(1, 4), b.between(3, 12), b.between(3, 12)), b.pick([3, 2])
        x = b.input(TensorType((b.pick([1, 2]), b.pick([3, 4]), *sizes), b.dtype, channels_last(5)))
        op = Conv((1, b.pick([1, 2]), b.pick([1, 2])), (0, k // 2, b.pick([0, 1])) * 2, (1, 1, 1), 1)
        w = b.constant((b.pick([16, 32, 48]), x.type.shape[1], 1, 4 - k % 2, k), b.dtype)
        epilogue(b, b.add(op, x, w), 3)
        return
    x = image_input(b, b.pick([4, 3]), image_side(b), image_side(b))
    if x.type.shape[1] == 3:
        x = b.add(Pad((0, 0, 0, 0, 0, 1, 0, 0), "constant", 0.0), x)
    epilogue(b, convolved(b, x, b.pick([16, 32, 48])), 3)


def filter_gradient(b: RandomGraph) -> None:
    """Draw the gradient of filters over four channels, of which the last can be sliced off, from windows two apart."""
    b.dtype = half_dtype(b)
    count, filters, rows, columns = b.pick([1, 2]), b.pick([16, 48]), b.between(2, 5), b.pick([8, 16, 24])
    window = b.pick([3, 5, 2])
    x = b.input(TensorType((count, 4, 2 * rows + window - 4, 2 * columns), b.dtype, channels_last(4)))
    dy = b.input(TensorType((count, filters, rows, columns), b.dtype, channels_last(4)))
    y = b.add(ConvWgrad((window, window), (2, 2), (1, 1, 1, max(window - 3, 0)), (1, 1)), x, dy)
    if b.chance(40):
        y = b.add(Slice((0,) * 4, (filters, 3, window, window), (1,) * 4), y)
    epilogue(b, y, 2)


def grouped_conv1d(b: RandomGraph) -> None:
    """Draw a grouped convolution along one dim with many taps, with ops after it."""
    b.dtype = half_dtype(b)
    groups, taps = b.pick([2, 3]), b.pick([8, 9, 16])
    channels, filters, length = 16 * groups * b.pick([1, 2]), 8 * groups * b.pick([1, 2]), b.between(taps, 40)
    x = b.input(TensorType((b.pick([1, 2]), channels, length), b.dtype, channels_last(3)))
    left = b.between(0, taps - 1)
    op = Conv((1,), (left, taps - 1 - left), (b.pick([1, 2]),), groups)
    y = b.add(op, x, b.constant((filters, channels // groups, taps), b.dtype))
    epilogue(b, y, 2)


def grouped_conv2d(b: RandomGraph) -> None:
    """Draw a grouped convolution of images that moves by one pixel, with ops after it."""
    b.dtype = half_dtype(b)
    channels, wide = b.pick([(32, 4), (16, 8), (48, 16), (64, 32), (72, 24)])
    k = b.pick([3, 2])
    x = b.input(TensorType((b.pick([1, 2]), channels, b.between(3, 12), b.between(3, 12)), b.dtype, channels_last(4)))
    op = Conv((1, 1), (1, b.pick([0, 1])) * 2, (1, 1), channels // wide)
    epilogue(b, b.add(op, x, b.constant((channels, wide, k, 3), b.dtype)), 2)


def few_filters(b: RandomGraph) -> None:
    """Draw a convolution of up to eight filters over an image of sixteen channels or more."""
    b.dtype = half_dtype(b)
    x = image_input(b, b.pick([16, 48]), image_side(b), image_side(b))
    epilogue(b, convolved(b, x, b.pick([3, 1, 4, 8]), stride=1), 3)


def resident_filters(b: RandomGraph) -> None:
    """Draw a convolution of 3 x 3 of at least 256 pixels with few channels, or of integers, with ops after it."""
    b.dtype = half_dtype(b)
    dtype, channels, filters = (DType.I8, 32, 64) if b.chance(50) else (b.dtype, b.pick([16, 48, 24]), b.pick([64, 40]))
    x = b.input(TensorType((1, channels, 16, b.pick([16, 17])), dtype, channels_last(4)))
    y = b.add(Conv((1, 1), (1,) * 4, (1, 1), 1), x, b.constant((filters, channels, 3, 3), dtype))
    if dtype is DType.I8:
        y = b.add(Cast(b.dtype), scaled_sums(b, y))
    epilogue(b, y, 2)
