"""Draw the graphs that `benchmarks.kernels.kernel_times` times: steps of models, each for one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fusec.ir import DType, Graph, TensorType, Value, channels_last
from fusec.ops import (
    Attention,
    AttentionBackward,
    AvgPool,
    BatchNormBackward,
    BatchNormTrain,
    Cast,
    Concat,
    Conv,
    ConvWgrad,
    Cumulate,
    DeformConv,
    Gather,
    GridSample,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LayerNormBackward,
    LinearScan,
    MatMul,
    MaxPool,
    MaxPoolBackward,
    MaxPoolTrain,
    NonMaxSuppression,
    PackedMatMul,
    Pad,
    Recurrent,
    Reduce,
    Relayout,
    Resize,
    RoiAlign,
    Scatter,
    Softmax,
    TopK,
    Transpose,
    pw,
)

F16, F32, I8, I64 = DType.F16, DType.F32, DType.I8, DType.I64


def nhwc(*shape: int) -> TensorType:
    return TensorType(shape, F16, channels_last(len(shape)))


def rows(*shape: int, dtype: DType = F16) -> TensorType:
    return TensorType(shape, dtype)


def suppression(images: int, classes: int, boxes: int) -> tuple[Sequence[TensorType], Callable[..., Any]]:
    """Choose among random boxes, of which most overlap."""
    op = NonMaxSuppression(boxes, 0.5)
    types = [rows(images, boxes, 4, dtype=F32), rows(images, classes, boxes, dtype=F32)]
    return types, lambda g, *x: g.insert(op, x).results


def depthwise(channels: int, window: int, stride: int) -> Callable[..., Value]:
    """Make a depthwise convolution with bias and clip."""

    def make(g: Graph, x: Value) -> Value:
        w = g.constant(np.full((channels, 1, window, window), 0.1, np.float16))
        bias = g.constant(np.linspace(0, 1, channels).astype(np.float16).reshape(-1, 1, 1))
        pad = window // 2
        y = g.add(Conv((stride, stride), (pad,) * 4, (1, 1), channels), x, w)
        return g.add(pw("clip", min=0.0, max=6.0), g.add(pw("add"), y, bias))

    return make


def squeeze_excite(channels: int, window: int, stride: int, reduced: int) -> Callable[..., Sequence[Value]]:
    """Make a depthwise convolution with swish, and the gate of its channels: squeeze and excitation."""

    def product(g: Graph, x: Value, columns: int) -> Value:
        w = g.constant(np.full((columns, x.type.shape[1], 1, 1), 1 / x.type.shape[1], np.float16))
        return g.add(
            pw("add"), g.add(Conv((1, 1), (0,) * 4, (1, 1)), x, w), g.constant(np.ones((columns, 1, 1), np.float16))
        )

    def make(g: Graph, x: Value) -> Sequence[Value]:
        w = g.constant(np.full((channels, 1, window, window), 0.1, np.float16))
        bias = g.constant(np.linspace(0, 1, channels).astype(np.float16).reshape(-1, 1, 1))
        convolved = g.add(Conv((stride, stride), (window // 2,) * 4, (1, 1), channels), x, w)
        y = g.add(pw("swish"), g.add(pw("add"), convolved, bias))
        small = g.add(pw("relu"), product(g, g.add(Reduce("mean", (2, 3)), y), reduced))
        return y, g.add(pw("sigmoid"), product(g, small, channels))

    return make


def few_filters(filters: int, channels: int, window: int) -> Callable[..., Value]:
    """Make the last convolution of a network from image to image, with bias and tanh."""

    def make(g: Graph, x: Value) -> Value:
        w = g.constant(np.full((filters, channels, window, window), 0.01, np.float16))
        bias = g.constant(np.linspace(0, 1, filters).astype(np.float16).reshape(-1, 1, 1))
        y = g.add(Conv((1, 1), (window // 2,) * 4, (1, 1)), x, w)
        return g.insert(Relayout((0, 1, 2, 3)), [g.add(pw("tanh"), g.add(pw("add"), y, bias))]).result

    return make


def convolution(filters: int, channels: int, window: int, stride: int = 1) -> Callable[..., Value]:
    """Make a convolution with bias and relu."""

    def make(g: Graph, x: Value) -> Value:
        w = g.constant(np.full((filters, channels, window, window), 0.01, np.float16))
        bias = g.constant(np.linspace(0, 1, filters).astype(np.float16).reshape(-1, 1, 1))
        y = g.add(Conv((stride, stride), (window // 2,) * 4, (1, 1)), x, w)
        return g.add(pw("relu"), g.add(pw("add"), y, bias))

    return make


def of_video(filters: int, window: tuple[int, int, int], stride: int) -> Callable[..., Value]:
    """Make a convolution of a video of three channels with bias and relu, which moves by one frame."""

    def make(g: Graph, x: Value) -> Value:
        w = g.constant(np.full((filters, 3, *window), 0.01, np.float16))
        bias = g.constant(np.linspace(0, 1, filters).astype(np.float16).reshape(1, -1, 1, 1, 1))
        y = g.add(Conv((1, stride, stride), tuple(size // 2 for size in window) * 2, (1, 1, 1)), x, w)
        g.set_type(y, y.type.with_order(channels_last(5)))
        return g.add(pw("relu"), g.add(pw("add"), y, bias))

    return make


def image(g: Graph, x: Value) -> Value:
    """Cast an image, pad it to four channels, and store it channels last."""
    padded = g.add(Pad((0, 0, 0, 0, 0, 1, 0, 0)), g.add(Cast(F16), x))
    return g.insert(Relayout(channels_last(4)), [padded]).result


def grouped(channels: int, wide: int) -> Callable[..., Value]:
    """Make a grouped convolution of 3 x 3 with bias and relu.

    wide: channels of a group.
    """

    def make(g: Graph, x: Value) -> Value:
        w = g.constant(np.full((channels, wide, 3, 3), 0.01, np.float16))
        bias = g.constant(np.linspace(0, 1, channels).astype(np.float16).reshape(-1, 1, 1))
        y = g.add(Conv((1, 1), (1,) * 4, (1, 1), channels // wide), x, w)
        return g.add(pw("relu"), g.add(pw("add"), y, bias))

    return make


def residual(g: Graph, x: Value, y: Value) -> Value:
    return g.add(pw("relu"), g.add(pw("add"), x, y))


def normalised(g: Graph, x: Value, z: Value, scale: Value, bias: Value) -> Sequence[Value]:
    """Make the end of a residual block in training: batch norm, add, relu."""
    y, mean, inverse = g.insert(BatchNormTrain(), [x, scale, bias]).results
    return g.add(pw("relu"), g.add(pw("add"), y, z)), mean, inverse


def normalised_backward(g: Graph, dy: Value, y: Value, *others: Value) -> Sequence[Value]:
    """Make the gradients of a relu and of the batch norm before it, from the relu's result."""
    return g.insert(BatchNormBackward(), [g.add(pw("relu_backward"), dy, y), *others]).results


def batch_norm(*shape: int) -> tuple[Sequence[TensorType], Callable[..., Any]]:
    x, p = nhwc(*shape), rows(shape[1], dtype=F32)
    return [x, x, p, p], normalised


def batch_norm_backward(*shape: int) -> tuple[Sequence[TensorType], Callable[..., Any]]:
    x, p = nhwc(*shape), rows(shape[1], dtype=F32)
    return [x, x, x, p, p, p], normalised_backward


def backward_of_norm(g: Graph, dy: Value, x: Value, scale: Value, z: Value) -> Sequence[Value]:
    """Make the gradient of a layer norm in a residual block: the skip connection's gradient is added."""
    dx, *sums = g.insert(LayerNormBackward(), [dy, x, scale]).results
    return g.add(pw("add"), dx, z), *sums


def blocks_of_four_bits(g: Graph, x: Value, scale: Value) -> Value:
    """Make weights of 4 bits wide: each block has a scale, the zero point is 8."""
    centred = g.add(pw("sub"), g.add(Cast(F32), x), g.constant(np.float32(8)))
    return g.add(Cast(F16), g.add(pw("mul"), centred, g.add(Cast(F32), scale)))


def packed_product(dtype: DType, depth: int, columns: int) -> Callable[..., Value]:
    """Make a product with weights of 4 or 8 bits in blocks of 32, with a scale of 16 bits each."""

    def make(g: Graph, x: Value) -> Value:
        codes, scales = np.ones((columns, depth), dtype.numpy), np.full((columns, depth // 32), 0.01, np.float16)
        return g.add(PackedMatMul(32), x, g.constant(codes), g.constant(scales))

    return make


def product(columns: int) -> Callable[..., Value]:
    """Make a product with constant weights, and a residual if given."""

    def make(g: Graph, x: Value, *residuals: Value) -> Value:
        y = g.add(MatMul(), x, g.constant(np.full((x.type.shape[-1], columns), 0.01, np.float16)))
        return g.add(pw("add"), y, *residuals) if residuals else y

    return make


def gated_products(columns: int) -> Callable[..., Value]:
    """Make two products of the same rows, one of which gates the other."""

    def make(g: Graph, x: Value) -> Value:
        gate = g.add(pw("swish", beta=1.0), product(columns)(g, x))
        return g.add(pw("mul"), gate, product(columns)(g, x))

    return make


def product_of_bytes(depth: int, columns: int) -> Callable[..., Any]:
    """Multiply int8 by weights; with a scale and a bias of each column, gelu, and rounding to int8."""

    def make(g: Graph, x: Value) -> Value:
        rng = np.random.default_rng(0)
        sums = g.add(MatMul(), x, g.constant(rng.integers(-128, 128, (depth, columns), np.int8)))
        y = g.add(pw("mul"), g.add(Cast(F32), sums), g.constant(rng.random(columns, np.float32) / np.float32(2e5)))
        y = g.add(pw("gelu"), g.add(pw("add"), y, g.constant(rng.standard_normal(columns).astype(np.float32))))
        return rounded(g, g.add(pw("mul"), y, g.constant(np.float32(30.0))))

    return make


def rounded(g: Graph, y: Value) -> Value:
    """Round to bytes."""
    return g.add(Cast(I8), g.add(pw("clip", min=-128.0, max=127.0), g.add(pw("round"), y)))


def quantised(filters: int, channels: int, window: int = 1) -> Callable[..., Value]:
    """Make a convolution of bytes with scale, bias, a residual of bytes if given, relu and rounding to bytes."""

    def make(g: Graph, x: Value, *residuals: Value) -> Value:
        w = g.constant(np.full((filters, channels, window, window), 3, np.int8))
        groups = x.type.shape[1] // channels
        pad = (window // 2,) * 4
        y = g.add(Cast(F32), g.add(Conv((1, 1), pad, (1, 1), groups), x, w))
        scale = g.constant(np.full((filters, 1, 1), 1e-3, np.float32))
        bias = g.constant(np.linspace(0, 1, filters).astype(np.float32).reshape(-1, 1, 1))
        y = g.add(pw("add"), g.add(pw("mul"), y, scale), bias)
        for residual in residuals:
            y = g.add(pw("add"), y, g.add(pw("mul"), g.add(Cast(F32), residual), g.constant(np.float32(0.37))))
        return rounded(g, g.add(pw("relu"), y))

    return make


def regions(g: Graph, x: Value) -> Value:
    """Pool 1,000 regions of one image, of 2 to 32 pixels a side, from their places between pixels."""
    rng = np.random.default_rng(0)
    start, size = rng.uniform(0, 32, (1000, 2)), rng.uniform(2, 32, (1000, 2))
    rois = g.constant(np.concatenate([start, start + size], 1).astype(np.float16))
    return g.add(RoiAlign((7, 7), 2), x, rois, g.constant(np.zeros(1000, np.int64)))


def deformable(filters: int, channels: int) -> Callable[..., Value]:
    """Make a deformable convolution with a mask, and its bias."""

    def make(g: Graph, x: Value, offset: Value, mask: Value) -> Value:
        w = g.constant(np.full((filters, channels, 3, 3), 0.01, np.float16))
        bias = g.constant(np.linspace(0, 1, filters).astype(np.float16).reshape(-1, 1, 1))
        return g.add(pw("add"), g.add(DeformConv((1, 1), (1,) * 4, (1, 1)), x, w, offset, mask), bias)

    return make


def bytes_last(*shape: int) -> TensorType:
    return TensorType(shape, I8, channels_last(len(shape)))


P32, P768 = rows(32), rows(768)
CASES: dict[str, tuple[Sequence[TensorType], Callable[..., Any]]] = {
    "max pool 3x3/2, 256x64x112x112": (
        [nhwc(256, 64, 112, 112)],
        lambda g, x: g.add(MaxPool((3, 3), (2, 2), (1,) * 4, (1, 1)), x),
    ),
    "int8 max pool 3x3/2, 256x64x112x112": (
        [bytes_last(256, 64, 112, 112)],
        lambda g, x: g.add(MaxPool((3, 3), (2, 2), (1,) * 4, (1, 1)), x),
    ),
    "average pool 3x3, 32x288x35x35": (
        [nhwc(32, 288, 35, 35)],
        lambda g, x: g.add(AvgPool((3, 3), (1, 1), (1,) * 4, (1, 1), count_include_pad=True), x),
    ),
    "resize by 8, rows of 8x21x520x520": (
        [rows(8, 21, 65, 65)],
        lambda g, x: g.add(Resize((8, 21, 520, 520), (1.0, 1.0, 8.0, 8.0), "linear"), x),
    ),
    "mean over space, 256x2048x7x7": ([nhwc(256, 2048, 7, 7)], lambda g, x: g.add(Reduce("mean", (2, 3)), x)),
    "mean over space, 32x96x56x56": ([nhwc(32, 96, 56, 56)], lambda g, x: g.add(Reduce("mean", (2, 3)), x)),
    "depthwise 3x3, 32x96x112x112": ([nhwc(32, 96, 112, 112)], depthwise(96, 3, 1)),
    "depthwise 3x3/2, 32x96x112x112": ([nhwc(32, 96, 112, 112)], depthwise(96, 3, 2)),
    "depthwise 5x5, 32x240x28x28": ([nhwc(32, 240, 28, 28)], depthwise(240, 5, 1)),
    **{
        f"depthwise {window}x{window}{'/2' * (stride - 1)}, 32x{channels}x{high}x{high}": (
            [nhwc(32, channels, high, high)],
            depthwise(channels, window, stride),
        )
        for window, stride, channels, high in (
            (7, 1, 96, 56),
            (7, 1, 192, 28),
            (7, 1, 384, 14),
            (7, 1, 768, 7),
            (3, 1, 144, 56),
            (3, 2, 144, 56),
            (3, 1, 384, 14),
            (3, 1, 960, 7),
        )
    },
    **{
        f"depthwise {window}x{window}{'/2' * (stride - 1)} and gate, {batch}x{channels}x{high}x{high}": (
            [nhwc(batch, channels, high, high)],
            squeeze_excite(channels, window, stride, reduced),
        )
        for batch in (1, 32)
        for channels, high, window, stride, reduced in (
            *((32, 112, 3, 1, 8), (240, 28, 5, 1, 10), (1152, 7, 5, 1, 48)),  # of EfficientNet-B0
            *((72, 56, 5, 2, 24), (672, 14, 5, 2, 168)),  # of MobileNetV3
        )
    },
    "attention, 2x8x4096x40": ([rows(2, 8, 4096, 40)] * 3, lambda g, *x: g.add(Attention(0.158), *x)),
    "attention backward, 32x12x197x64": (
        [*[rows(32, 12, 197, 64)] * 5, rows(32, 12, 197, 1, dtype=F32)],
        lambda g, *x: g.insert(AttentionBackward(0.125), x).results,
    ),
    "few filters 7x7, 1x32x256x256": ([nhwc(1, 32, 256, 256)], few_filters(3, 32, 7)),
    "few filters 7x7, 32x32x256x256": ([nhwc(32, 32, 256, 256)], few_filters(3, 32, 7)),
    "few channels 7x7, 32x4x256x256 to 32": ([nhwc(32, 4, 256, 256)], convolution(32, 4, 7)),
    "few channels 7x7/2, 32x4x224x224 to 64": ([nhwc(32, 4, 224, 224)], convolution(64, 4, 7, 2)),
    **{
        f"few channels {'x'.join(map(str, window))}/{stride}, {'x'.join(map(str, shape))} to 64": (
            [TensorType(shape, F16, channels_last(5))],
            of_video(64, window, stride),
        )
        for shape, window, stride in (
            ((8, 3, 16, 112, 112), (3, 7, 7), 2),  # of R3D-18
            ((8, 3, 8, 224, 224), (1, 7, 7), 2),  # of SlowFast
            ((8, 3, 16, 112, 112), (3, 3, 3), 1),  # of C3D
        )
    },
    "few pixels 3x3, 1x256x14x14 to 256": ([nhwc(1, 256, 14, 14)], convolution(256, 256, 3)),
    "few pixels 3x3, 1x512x7x7 to 512": ([nhwc(1, 512, 7, 7)], convolution(512, 512, 3)),
    "few pixels 1x1, 1x2048x7x7 to 512": ([nhwc(1, 2048, 7, 7)], convolution(512, 2048, 1)),
    **{
        f"resident filters, 32x{channels}x{high}x{high} to {filters}": (
            [nhwc(32, channels, high, high)],
            convolution(filters, channels, 3),
        )
        # of HRNet's padded channels, of DenseNet, and of ResNet
        for channels, filters, high in (
            (24, 24, 56),
            (40, 40, 28),
            (72, 72, 14),
            (128, 32, 28),
            (128, 32, 14),
            (64, 64, 56),
        )
    },
    **{
        f"{channels // wide} groups 3x3, 32x{channels}x{high}x{high}": (
            [nhwc(32, channels, high, high)],
            grouped(channels, wide),
        )
        for channels, wide, high in ((128, 4, 56), (256, 8, 28), (512, 16, 14), (1024, 32, 7))  # of ResNeXt-50 32x4d
    },
    "gate, 32x96x56x56": ([nhwc(32, 96, 56, 56), rows(32, 96, 1, 1)], lambda g, x, y: g.add(pw("mul"), x, y)),
    "add, relu, 256x64x56x56": ([nhwc(256, 64, 56, 56)] * 2, residual),
    "lstm, 400x16x512": (
        [rows(400, 16, 2048), rows(1, 2048, 512), rows(1, 16, 512), rows(1, 16, 512)],
        lambda g, *v: g.insert(Recurrent("lstm"), v).results,
    ),
    "linear scan, 1x1536x2048x16": (
        [rows(1, 1536, 2048, 16)] * 2,
        lambda g, a, b: g.add(LinearScan(2), a, b),
    ),
    "running sum, 256x4096 of i64": ([rows(256, 4096, dtype=I64)], lambda g, x: g.add(Cumulate("sum", 1), x)),
    "running sum, 8x24x64x256": ([rows(8, 24, 64, 256, dtype=F32)], lambda g, x: g.add(Cumulate("sum", 3), x)),
    "running sum along dim 2, 4x24x256x64": (
        [rows(4, 24, 256, 64, dtype=F32)],
        lambda g, x: g.add(Cumulate("sum", 2), x),
    ),
    "running sum, 1x1000000": ([rows(1, 1000000, dtype=F32)], lambda g, x: g.add(Cumulate("sum", 1), x)),
    "scatter add, 100000x64 into 10000x64": (
        [rows(10000, 64), rows(100000, dtype=I64), rows(100000, 64)],
        lambda g, *v: g.add(Scatter("add"), *v),
    ),
    "top k, 1000 of 1x76725": ([rows(1, 76725, dtype=F32)], lambda g, x: g.insert(TopK(1000), [x]).results),
    "top k, 1000 of 8x76725": ([rows(8, 76725, dtype=F32)], lambda g, x: g.insert(TopK(1000), [x]).results),
    "suppression of 1000 boxes, 1 image": suppression(1, 1, 1000),
    "suppression of 1000 boxes, 8 images": suppression(8, 1, 1000),
    "suppression of 8400 boxes, 80 classes": suppression(1, 80, 8400),
    "softmax, 4096x1000": ([rows(4096, 1000)], lambda g, x: g.add(Softmax(), x)),
    "softmax, 384x197x197": ([rows(384, 197, 197)], lambda g, x: g.add(Softmax(), x)),
    "layer norm, 6304x768": ([rows(6304, 768), P768, P768], lambda g, *v: g.add(LayerNorm(), *v)),
    "layer norm backward, 6304x768": ([rows(6304, 768)] * 2 + [P768, rows(6304, 768)], backward_of_norm),
    "max pool 3x3/2 backward, 64x64x112x112": (
        [nhwc(64, 64, 56, 56), nhwc(64, 64, 112, 112)],
        lambda g, *v: g.add(pw("relu_backward"), g.add(MaxPoolBackward((3, 3), (2, 2), (1,) * 4, (1, 1)), *v), v[1]),
    ),
    "max pool 3x3/2 with places, 64x64x112x112": (
        [nhwc(64, 64, 112, 112)],
        lambda g, x: g.insert(MaxPoolTrain((3, 3), (2, 2), (1,) * 4, (1, 1)), [x]).results,
    ),
    "max pool 3x3/2 backward at places, 64x64x112x112": (
        [nhwc(64, 64, 56, 56), TensorType((64, 64, 56, 56), DType.U8, channels_last(4))],
        lambda g, *v: g.add(MaxPoolBackward((3, 3), (2, 2), (1,) * 4, (1, 1), image=(112, 112)), *v),
    ),
    "gradient of 64 filters 7x7/2, 64x4x224x224": (
        [nhwc(64, 4, 224, 224), nhwc(64, 64, 112, 112)],
        lambda g, *v: g.add(ConvWgrad((7, 7), (2, 2), (3,) * 4, (1, 1)), *v),
    ),
    "instance norm, 1x32x256x256": ([nhwc(1, 32, 256, 256), P32, P32], lambda g, *v: g.add(InstanceNorm(), *v)),
    "instance norm, 32x32x256x256": ([nhwc(32, 32, 256, 256), P32, P32], lambda g, *v: g.add(InstanceNorm(), *v)),
    "group norm, 2x320x64x64": ([nhwc(2, 320, 64, 64), rows(320), rows(320)], lambda g, *v: g.add(GroupNorm(32), *v)),
    "group norm, 8x320x64x64": ([nhwc(8, 320, 64, 64), rows(320), rows(320)], lambda g, *v: g.add(GroupNorm(32), *v)),
    "batch norm, add, relu, 64x256x56x56": batch_norm(64, 256, 56, 56),
    "batch norm, add, relu, 64x64x56x56": batch_norm(64, 64, 56, 56),
    "batch norm, add, relu, 64x2048x7x7": batch_norm(64, 2048, 7, 7),
    "relu and batch norm backward, 64x256x56x56": batch_norm_backward(64, 256, 56, 56),
    "relu and batch norm backward, 64x64x56x56": batch_norm_backward(64, 64, 56, 56),
    "relu and batch norm backward, 64x2048x7x7": batch_norm_backward(64, 2048, 7, 7),
    "image to 4 channels last, 256x3x224x224": ([rows(256, 3, 224, 224, dtype=F32)], image),
    "to rows, 32x256x56x56": ([nhwc(32, 256, 56, 56)], lambda g, x: g.insert(Relayout(()), [x]).result),
    "heads, 32x197x12x64": ([rows(32, 197, 12, 64)], lambda g, x: g.add(Transpose((0, 2, 1, 3)), x)),
    "upsampling by 2, 8x64x128x128": (
        [nhwc(8, 64, 128, 128)],
        lambda g, x: g.add(Resize((8, 64, 256, 256), (1.0, 1.0, 2.0, 2.0), "nearest"), x),
    ),
    "bilinear by 2, 8x64x128x128": (
        [nhwc(8, 64, 128, 128)],
        lambda g, x: g.add(Resize((8, 64, 256, 256), (1.0, 1.0, 2.0, 2.0), "linear"), x),
    ),
    "concat, 32x(256+32)x28x28": ([nhwc(32, 256, 28, 28), nhwc(32, 32, 28, 28)], lambda g, *v: g.add(Concat(1), *v)),
    "concat of a detector's levels, 8x76725x91": (
        [rows(8, 9 * side * side, 91) for side in (80, 40, 20, 10, 5)],
        lambda g, *v: g.add(Concat(1), *v),
    ),
    "embedding, 32x128 of 30522x768": (
        [rows(30522, 768), rows(32, 128, dtype=I64)],
        lambda g, *v: g.add(Gather(0), *v),
    ),
    "f8e4m3 to f16, 4096x14336": ([rows(4096, 14336, dtype=DType.F8E4M3)], lambda g, x: g.add(Cast(F16), x)),
    "f16 to f8e4m3, 4096x14336": ([rows(4096, 14336)], lambda g, x: g.add(Cast(DType.F8E4M3), x)),
    "f8e5m2 to f16, 4096x14336": ([rows(4096, 14336, dtype=DType.F8E5M2)], lambda g, x: g.add(Cast(F16), x)),
    "u4 by 32 to f16, 4096x14336": (
        [rows(4096, 448, 32, dtype=DType.U4), rows(4096, 448, 1)],
        blocks_of_four_bits,
    ),
    "product, residual, 1x14336 to 4096": ([rows(1, 14336), rows(1, 4096)], product(4096)),
    "product, 1x4096 to 6144": ([rows(1, 4096)], product(6144)),
    "gated products, 1x4096 to 14336": ([rows(1, 4096)], gated_products(14336)),
    "product, 16x4096 to 4096": ([rows(16, 4096)], product(4096)),
    "product, 16x14336 to 4096": ([rows(16, 14336)], product(4096)),
    "product, 16x4096 to 14336": ([rows(16, 4096)], product(14336)),
    "4-bit product, 1x14336 to 4096": ([rows(1, 14336)], packed_product(DType.I4, 14336, 4096)),
    "4-bit product, 1x4096 to 14336": ([rows(1, 4096)], packed_product(DType.I4, 4096, 14336)),
    "4-bit product, 1x4096 to 1024": ([rows(1, 4096)], packed_product(DType.I4, 4096, 1024)),
    "4-bit product, 16x4096 to 14336": ([rows(16, 4096)], packed_product(DType.I4, 4096, 14336)),
    "product of int8, 4096x768 to 3072": ([rows(4096, 768, dtype=I8)], product_of_bytes(768, 3072)),
    "8-bit product, 1x4096 to 14336": ([rows(1, 4096)], packed_product(DType.I8, 4096, 14336)),
    "int8 1x1 to 256, residual, 32x64x56x56": (
        [bytes_last(32, 64, 56, 56), bytes_last(32, 256, 56, 56)],
        quantised(256, 64),
    ),
    "int8 1x1 to 64, 32x256x56x56": ([bytes_last(32, 256, 56, 56)], quantised(64, 256)),
    "int8 1x1 to 512, residual, 32x128x28x28": (
        [bytes_last(32, 128, 28, 28), bytes_last(32, 512, 28, 28)],
        quantised(512, 128),
    ),
    "int8 conv 3x3, 256x64x56x56": ([bytes_last(256, 64, 56, 56)], quantised(64, 64, 3)),
    "conv 3x3, 256x64x56x56": ([nhwc(256, 64, 56, 56)], convolution(64, 64, 3)),
    "int8 depthwise 3x3, 32x144x56x56": ([bytes_last(32, 144, 56, 56)], quantised(144, 1, 3)),
    "grid sample, 8x64x128x128": (
        [rows(8, 64, 128, 128), rows(8, 128, 128, 2)],
        lambda g, *v: g.add(GridSample(), *v),
    ),
    "deformable conv 3x3, 4x256x64x64": (
        [nhwc(4, 256, 64, 64), nhwc(4, 18, 64, 64), nhwc(4, 9, 64, 64)],
        deformable(256, 256),
    ),
    "roi align 7x7, 1000 of 1x256x50x68": ([rows(1, 256, 50, 68)], regions),
}
