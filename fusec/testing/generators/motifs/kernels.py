"""Draw steps that fusec runs as its own kernels: one motif for each family of `fusec.gpu.kernels.FAMILIES`.

Random graphs rarely have the sizes and layouts that most kernel families need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fusec.ir import HALVES, DType, TensorType, Value, channels_last
from fusec.ops import (
    Attention,
    AttentionBackward,
    AttentionTrain,
    Cast,
    Conv,
    ConvWgrad,
    Cumulate,
    InstanceNorm,
    LayerNormBackward,
    MatMul,
    MaxPool,
    Pad,
    Reduce,
    Reshape,
    RmsNorm,
    Rotary,
    Scatter,
    Slice,
    TopK,
    Transpose,
    pw,
)
from fusec.ops.matmul import INTEGERS
from fusec.testing.generators.graph_builder import Draw, RandomGraph, Shape, Unfit
from fusec.testing.generators.motifs.layers import ACTIVATIONS, epilogue, pointwise_sequence
from fusec.testing.generators.operations import DRAWS
from fusec.testing.generators.operations.pointwise import draw_pointwise
from fusec.testing.generators.operations.products import multiply_packed

MOST_ELEMENTS = 1 << 17  # of a value: products with resident weights have at least 256 rows of 256 numbers


def attention_forward(b: RandomGraph) -> None:
    """Draw attention of up to 64 features, with shared heads, a causal mask, a bias, and transposes around it."""
    batch, heads, features = b.pick([1, 2]), b.pick([1, 2, 4]), b.pick([8, 16, 40, 64, 24])
    groups, rows, keys = b.pick([g for g in (heads, 1, 2) if heads % g == 0]), b.pick(_ROWS), b.pick(_ROWS)
    dtype, transposed = _half(b), b.chance(40)

    def operand(count: int, length: int) -> Value:
        if not transposed:
            return b.input(TensorType((batch, count, length, features), dtype))
        return b.add(Transpose((0, 2, 1, 3)), b.input(TensorType((batch, length, count, features), dtype)))

    q, k, v = operand(heads, rows), operand(groups, keys), operand(groups, keys)
    bias = [b.input(TensorType((b.pick([1, batch]), b.pick([1, heads]), rows, keys), dtype))] * b.chance(40)
    y = b.add(Attention(b.pick([0.25, 1.0, 0.125]), b.chance(50), guarded=b.chance(20)), q, k, v, *bias)
    if b.chance(40):
        b.add(Reshape((batch, rows, heads * features)), b.add(Transpose((0, 2, 1, 3)), y))


_ROWS = (5, 16, 17, 1, 33, 40)


def attention_backward(b: RandomGraph) -> None:
    """Draw the gradients of attention of up to 64 features in fp16, from the results of its forward op."""
    heads, features = (b.pick([1, 2]), b.pick([1, 2])), b.pick([16, 32, 48, 64])
    rows, keys, ordered = b.pick(_ROWS), b.pick(_ROWS), b.chance(20)
    q, k, v = (b.input(TensorType((*heads, length, features), DType.F16)) for length in (rows, keys, keys))
    scale = b.pick([0.25, 0.125])
    y, sums = b.insert(AttentionTrain(scale), q, k, v).results
    b.insert(AttentionBackward(scale, ordered=ordered), b.input(y.type), q, k, v, y, sums)


def multi_tensor(b: RandomGraph) -> None:
    """Draw the same update of several parameters, with one rate for all and a gradient for each."""
    rate = b.input(TensorType((), DType.F32)) if b.chance(60) else b.constant((), DType.F32)
    kinds = [b.pick(["add", "mul", "sub", "max"]) for _ in range(b.between(1, 3))]
    halves = b.chance(30)
    for _ in range(b.between(2, 3)):
        shape = tuple(b.pick([3, 8, 5, 17, 33]) for _ in range(b.between(1, 2)))
        weight = b.input(TensorType(shape, DType.F32))
        gradient = b.constant(shape, DType.F32) if len(b.graph.inputs) > 5 else b.input(weight.type)
        y = b.insert(pw("mul"), gradient, rate).result
        for kind in kinds:
            y = b.insert(pw(kind), weight, y).result
        if halves:
            b.add(Cast(DType.F16), y)


def instance_norm(b: RandomGraph) -> None:
    """Draw an instance norm of a channels-last image, pointwise ops, and sometimes a pool of the result."""
    x = _image(b, b.pick([8, 16, 4, 32]), _side(b), _side(b))
    y = b.add(InstanceNorm(b.pick([1e-5, 1e-2])), x, *(b.constant((x.type.shape[1],), x.type.dtype) for _ in range(2)))
    for _ in range(b.below(3)):
        y = draw_pointwise(b, b.pick(ACTIVATIONS), y)
    if b.chance(30) and min(y.type.shape[2:]) > 1:
        b.add(MaxPool((2, 2), (2, 2), (0, 0, 0, 0), (1, 1)), y)


def layer_norm_backward(b: RandomGraph) -> None:
    """Draw the gradients of a layer or RMS norm, and sometimes an addend and the sum over rows (a bias's gradient)."""
    features = b.pick([8, 16, 3, 33, 64, 129])
    type = TensorType((*(b.pick([2, 3, 5]) for _ in range(b.between(1, 2))), features), b.dtype)
    dy, x = b.input(type), b.input(type)
    op = LayerNormBackward(-1, b.pick([1e-5, 1e-2]), b.chance(60))
    dx = b.insert(op, dy, x, b.constant((features,), b.dtype)).results[0]
    if b.chance(50):
        dx = b.pointwise("add", dx, b.input(type))
    if b.chance(30):
        b.add(Reduce("sum", tuple(range(type.rank - 1)), False), dx)


def pool_forward(b: RandomGraph) -> None:
    """Draw a pool over an image of any layout, with pointwise ops after it."""
    _about(b, _image(b, b.pick([8, 3, 16, 4]), _side(b), _side(b)), b.pick(["max_pool", "avg_pool"]))


def max_pool_backward(b: RandomGraph) -> None:
    """Draw the gradient of a max pool, with pointwise ops after it."""
    DRAWS["max_pool_backward"](b)
    epilogue(b, b.values[-1], 2)


def depthwise(b: RandomGraph) -> None:
    """Draw a depthwise convolution, pointwise ops, and sometimes the mean of each channel."""
    channels = b.pick([8, 16, 4, 3, 5])
    y = epilogue(b, _convolved(b, _image(b, channels, _side(b), _side(b)), channels, channels), 2)
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
    b.dtype = _half(b)
    x = _image(b, b.pick([32, 64, 96]), b.pick([4, 1, 7, 5]), b.pick([4, 3, 7, 9]))
    epilogue(b, _convolved(b, x, b.pick([16, 32, 48])), 3)


def thin_product(b: RandomGraph) -> None:
    """Draw a product of at least 512 rows with few weights, with pointwise ops before and after it, or of integers."""
    b.dtype = _half(b)
    dtype, pack = (DType.I8, 16) if b.chance(30) else (b.dtype, 8)
    depth, columns = b.pick([1, 2, 3]) * pack, b.pick([8, 16, 24])
    is_matrix = b.chance(50)
    if is_matrix:
        x = b.input(TensorType(b.pick([(512, depth), (530, depth), (2, 260, depth)]), dtype))
    else:
        x = _image(b, depth, b.pick([16, 17]), 33, dtype)
    if dtype is not DType.I8 and b.chance(50):
        x = draw_pointwise(b, b.pick(ACTIVATIONS), x)
    if is_matrix:
        y = b.add(MatMul(), x, b.constant((depth, columns), dtype))
    else:
        strides = (1, 1) if b.chance(70) else (1, b.pick([2, 3]))
        y = b.add(Conv(strides, (0,) * 4, (1, 1), 1), x, b.constant((columns, depth, 1, 1), dtype))
    if dtype is DType.I8:
        b.add(Cast(b.dtype), epilogue(b, _scaled(b, y), 2))
    else:
        epilogue(b, y, 2)


def dense_bytes(b: RandomGraph) -> None:
    """Draw a product of 64 to 128 rows of 8-bit integers, with pointwise ops after it."""
    b.dtype = _half(b)
    rows = b.pick([(64,), (2, 50), (128,)])
    y = b.add(MatMul(), b.input(TensorType((*rows, 128), DType.I8)), b.constant((128, 128), DType.I8))
    b.add(Cast(b.dtype), epilogue(b, _scaled(b, y), 2))


def resident_weights(b: RandomGraph) -> None:
    """Draw a 1x1 convolution of 272 pixels of 8-bit integers, with pointwise ops after it."""
    b.dtype = _half(b)
    channels = b.pick([256, 288])
    x = b.input(TensorType((1, channels, 16, 17), DType.I8, channels_last(4)))
    y = b.add(Conv((1, 1), (0,) * 4, (1, 1), 1), x, b.constant((128, channels, 1, 1), DType.I8))
    epilogue(b, b.add(Cast(b.dtype), _scaled(b, y)), 2)


def few_channels(b: RandomGraph) -> None:
    """Draw a convolution of an image of four channels, of which the last can be padding, or of a video."""
    b.dtype = _half(b)
    if b.chance(30):
        sizes, k = (b.between(1, 4), b.between(3, 12), b.between(3, 12)), b.pick([3, 2])
        x = b.input(TensorType((b.pick([1, 2]), b.pick([3, 4]), *sizes), b.dtype, channels_last(5)))
        op = Conv((1, b.pick([1, 2]), b.pick([1, 2])), (0, k // 2, b.pick([0, 1])) * 2, (1, 1, 1), 1)
        w = b.constant((b.pick([16, 32, 48]), x.type.shape[1], 1, 4 - k % 2, k), b.dtype)
        epilogue(b, b.add(op, x, w), 3)
        return
    x = _image(b, b.pick([4, 3]), _side(b), _side(b))
    if x.type.shape[1] == 3:
        x = b.add(Pad((0, 0, 0, 0, 0, 1, 0, 0), "constant", 0.0), x)
    epilogue(b, _convolved(b, x, b.pick([16, 32, 48])), 3)


def filter_gradient(b: RandomGraph) -> None:
    """Draw the gradient of filters over four channels, of which the last can be sliced off, from windows two apart."""
    b.dtype = _half(b)
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
    b.dtype = _half(b)
    groups, taps = b.pick([2, 3]), b.pick([8, 9, 16])
    channels, filters, length = 16 * groups * b.pick([1, 2]), 8 * groups * b.pick([1, 2]), b.between(taps, 40)
    x = b.input(TensorType((b.pick([1, 2]), channels, length), b.dtype, channels_last(3)))
    left = b.between(0, taps - 1)
    op = Conv((1,), (left, taps - 1 - left), (b.pick([1, 2]),), groups)
    y = b.add(op, x, b.constant((filters, channels // groups, taps), b.dtype))
    epilogue(b, y, 2)


def grouped_conv2d(b: RandomGraph) -> None:
    """Draw a grouped convolution of images that moves by one pixel, with ops after it."""
    b.dtype = _half(b)
    channels, wide = b.pick([(32, 4), (16, 8), (48, 16), (64, 32)])
    k = b.pick([3, 2])
    x = b.input(TensorType((b.pick([1, 2]), channels, b.between(3, 12), b.between(3, 12)), b.dtype, channels_last(4)))
    op = Conv((1, 1), (1, b.pick([0, 1])) * 2, (1, 1), channels // wide)
    epilogue(b, b.add(op, x, b.constant((channels, wide, k, 3), b.dtype)), 2)


def few_filters(b: RandomGraph) -> None:
    """Draw a convolution of up to eight filters over an image of sixteen channels or more."""
    b.dtype = _half(b)
    x = _image(b, b.pick([16, 48]), _side(b), _side(b))
    epilogue(b, _convolved(b, x, b.pick([3, 1, 4, 8]), stride=1), 3)


def resident_filters(b: RandomGraph) -> None:
    """Draw a convolution of 3 x 3 of at least 256 pixels with few channels, or of integers, with ops after it."""
    b.dtype = _half(b)
    dtype, channels = (DType.I8, 32) if b.chance(50) else (b.dtype, b.pick([16, 48]))
    x = b.input(TensorType((1, channels, 16, b.pick([16, 17])), dtype, channels_last(4)))
    y = b.add(Conv((1, 1), (1,) * 4, (1, 1), 1), x, b.constant((64, channels, 3, 3), dtype))
    if dtype is DType.I8:
        y = b.add(Cast(b.dtype), _scaled(b, y))
    epilogue(b, y, 2)


def few_rows(b: RandomGraph) -> None:
    """Draw one or two products of at most four rows with constant weights, with pointwise ops after them."""
    rows = b.pick([(1,), (2,), (4,), (1, 1), (2, 2)])
    _products_of_rows(b, rows, b.pick([64, 128, 264, 520]), b.pick([8, 24, 33]))


def streamed_weights(b: RandomGraph) -> None:
    """Draw one or two products of 2 to 32 rows with constant weights, with pointwise ops after them."""
    rows = b.pick([(3,), (8,), (16,), (1, 9), (4, 4), (31,)])
    _products_of_rows(b, rows, b.pick([64, 96, 256, 512]), b.pick([16, 48, 128]))


def _products_of_rows(b: RandomGraph, rows: tuple[int, ...], depth: int, columns: int) -> None:
    b.dtype = _half(b)
    x = b.input(TensorType((*rows, depth), b.dtype))
    if b.chance(40):
        x = b.add(RmsNorm(-1, 1e-3), x, b.constant((depth,), b.dtype))
    y = b.add(MatMul(), x, b.constant((depth, columns), b.dtype))
    if b.chance(50):
        gate = draw_pointwise(b, b.pick(ACTIVATIONS), y)
        y = b.pointwise("mul", gate, b.add(MatMul(), x, b.constant((depth, columns), b.dtype)))
    epilogue(b, y, 3)


def packed_product(b: RandomGraph) -> None:
    """Draw a product of at most 16 rows with weights of 4 or 8 bits, with a norm before and pointwise ops after it."""
    b.dtype = _half(b)
    depth, rows = b.pick([64, 128, 192, 1024]), b.pick([(1,), (2,), (5,), (16,), (1, 1), (3, 3)])
    x = b.input(TensorType((*rows, depth), b.dtype))
    if depth == 1024 and b.chance(70):
        x = b.add(RmsNorm(-1), x, b.fresh(TensorType((depth,), b.dtype)))
    epilogue(b, multiply_packed(b, x, b.pick([16, 32, 48]), b.pick([16, 32, 64, depth])), 3)


def integer_product(b: RandomGraph) -> None:
    """Draw a matrix product of integers, and a sum with the result."""
    dtype, (rows, depth, columns) = b.pick((*INTEGERS, DType.I8)), (b.pick([1, 3, 8, 17]) for _ in range(3))
    batch = b.pick([(), (2,), (1, 3)])
    other = b.pick([batch, ()])
    y = b.add(
        MatMul(),
        b.input(TensorType((*batch, rows, depth), dtype)),
        b.fresh(TensorType((*other, depth, columns), dtype)),
    )
    if b.chance(50):
        b.pointwise(b.pick(["add", "mul", "max"]), y, b.constant(b.broadcast_shape(y.type.shape), y.type.dtype))


def rotary(b: RandomGraph) -> None:
    """Draw a rotary embedding, sometimes of a transposed tensor, and pointwise ops after it."""
    rows, features = b.pick([3, 8, 1, 5]), b.pick([8, 16, 6, 2, 32])
    x = b.input(TensorType((b.pick([1, 2]), rows, b.pick([1, 3]), features), b.dtype))
    if b.chance(60):
        x = b.add(Transpose((0, 2, 1, 3)), x)
    angles = [b.fresh(TensorType((x.type.shape[2], features), b.dtype)) for _ in range(2)]
    y = b.add(Rotary(), x, *angles)
    if b.chance(40):
        draw_pointwise(b, b.pick(ACTIVATIONS), y)


def write_rows(b: RandomGraph) -> None:
    """Draw writes of rows at the same indices, some of them a part of a rotary embedding."""
    count, features, places = b.pick([2, 1, 4]), b.pick([8, 6, 16, 2]), b.pick([5, 9])
    at = [i - places if b.chance(20) else i for i in list(b.permutation(places))[:count]]
    indices = b.graph.constant(np.array(at, b.pick([DType.I64, DType.I32]).numpy))
    first = b.below(3)
    heads = b.input(TensorType((1, first + count, 1, features), b.dtype))
    angles = [b.fresh(TensorType((1, 1, 1, features), b.dtype)) for _ in range(2)]
    y = b.add(Rotary(), heads, *angles)
    if b.chance(30):
        b.add(Rotary(), b.input(TensorType((1, 3, 1, features), b.dtype)), *angles)
    part = b.add(Slice((0, first, 0, 0), (1, count, 1, features), (1,) * 4), y)
    rows = [b.add(Reshape((count, features)), part), b.fresh(TensorType((count, features), b.dtype))]
    for new in rows[b.below(2) :]:
        b.add(Scatter(), b.input(TensorType((places, features), b.dtype)), indices, new)


def cached_attention(b: RandomGraph) -> None:
    """Draw attention of one query over a cache into which the same step writes a row of each sequence."""
    batch, groups, sharers, features = b.pick([1, 2]), b.pick([1, 2]), b.pick([4, 1, 3]), b.pick([16, 64, 32])
    keys, dtype, rows = b.pick([9, 64, 130]), _half(b), batch * groups
    at = np.array([i * keys + b.below(keys) for i in range(rows)], DType.I64.numpy)
    indices, shape = b.graph.constant(at), (batch, groups * sharers, 1, features)
    q, k, v = (b.input(TensorType(s, dtype)) for s in (shape, (batch, groups, 1, features), (rows, features)))
    if b.chance(70):
        angles = [b.fresh(TensorType((1, 1, 1, features), dtype)) for _ in range(2)]
        q, k = (b.add(Rotary(), x, *angles) for x in (q, k))
    new = [b.add(Reshape((rows, features)), k), v]
    caches = [b.input(TensorType((rows * keys, features), dtype)) for _ in range(2)]
    written = [b.add(Scatter(), cache, indices, each) for cache, each in zip(caches, new, strict=True)]
    views = [b.add(Reshape((batch, groups, keys, features)), each) for each in written]
    bias = [b.input(TensorType((b.pick([1, batch]), 1, 1, keys), dtype))] if b.chance(70) else []
    b.add(Attention(b.pick([0.25, 0.125]), hides=b.chance(30)), q, *views, *bias)


def arg_max(b: RandomGraph) -> None:
    """Draw the place of the largest element of long rows."""
    rows, size = b.pick([1, 3]), b.pick([1024, 2050, 5000])
    x = b.input(TensorType((rows, size), b.pick([DType.F16, DType.F32, DType.BF16])))
    is_largest = b.add(pw("cmp_ge"), x, b.add(Reduce("max", (1,), True), x))
    places, last = (b.graph.constant(np.asarray(v, np.int32)) for v in (np.arange(size)[None], size - 1))
    least = b.add(Reduce("min", (1,), b.chance(50)), b.add(pw("where"), is_largest, places, last))
    if b.chance(50):
        b.add(Cast(DType.I64), least)


def pointwise(b: RandomGraph) -> None:
    """Draw a sequence of pointwise ops."""
    with b.focused(b.input(TensorType(b.shape(1, 4), b.dtype))):
        pointwise_sequence(b)


def row_reduction(b: RandomGraph) -> None:
    """Draw a norm, a softmax or a reduction of rows of many lengths, with pointwise ops after it."""
    type = TensorType((b.pick([3, 1, 8]), b.pick([8, 33, 5, 128, 300])), b.dtype)
    _about(b, b.input(type), b.pick(["softmax", "layer_norm", "rms_norm", "reduce"]))


def batch_norm(b: RandomGraph) -> None:
    """Draw a batch norm of training or its gradients, in any layout, with pointwise ops after it."""
    x = _image(b, b.pick([4, 8, 3, 17]), _side(b), _side(b))
    _about(b, x, b.pick(["batch_norm_train", "batch_norm_backward", "channel_sums", "batch_norm_by_sums"]))


def gather_resize(b: RandomGraph) -> None:
    """Draw a resize, a gather or a pad, with pointwise ops after it."""
    _about(b, _image(b, b.pick([4, 8, 3]), b.pick([3, 4, 5]), b.pick([3, 4, 6])), b.pick(["resize", "gather", "pad"]))


def grid_sample(b: RandomGraph) -> None:
    """Draw an image that is read between its pixels, with pointwise ops after it."""
    _about(b, _image(b, b.pick([4, 8, 3]), _side(b), _side(b)), "grid_sample")


def roi_align(b: RandomGraph) -> None:
    """Draw the regions of an image, with pointwise ops after them."""
    _about(b, _image(b, b.pick([4, 8, 3]), _side(b), _side(b)), b.pick(["roi_align", "roi_pool"]))


def top_k(b: RandomGraph) -> None:
    """Draw the largest or smallest elements of rows, of which some are equal."""
    size = b.pick([7, 64, 300])
    x = b.input(TensorType((b.pick([1, 3, 5]), size), b.pick([DType.I32, DType.I16, DType.I8])))
    b.insert(TopK(1 + b.below(size), -1, b.chance(60)), x)


def non_max_suppression(b: RandomGraph) -> None:
    """Draw the boxes of some classes that do not overlap better ones."""
    b.input(TensorType((b.pick([1, 2, 4]), b.pick([5, 64, 90, 1100])), DType.I32))
    DRAWS["non_max_suppression"](b)


def all_finite(b: RandomGraph) -> None:
    """Draw a test for NaN and infinities in several tensors."""
    for shape in ((b.pick([5, 33, 300]),), (b.pick([2, 3]), b.pick([4, 129]))):
        b.input(TensorType(shape, b.pick([DType.F32, DType.F16, DType.BF16])))
    DRAWS["all_finite"](b)


def recurrent(b: RandomGraph) -> None:
    """Draw a layer of LSTM, GRU or RNN."""
    DRAWS["recurrent"](b)


def linear_scan(b: RandomGraph) -> None:
    """Draw a linear recurrence, of fewer steps than a thread loads together or of more."""
    x = b.input(TensorType((b.pick([2, 1]), b.pick([3, 8, 17, 1]), b.pick([4, 1, 33])), b.dtype))
    with b.focused(x):
        DRAWS["linear_scan"](b)


def cumulate(b: RandomGraph) -> None:
    """Draw a running sum or product between pointwise ops: of a line for a thread, for some threads, or in parts."""
    size = b.pick([3, 8, 70, 300, 1100, 1])
    x = b.input(TensorType((b.pick([2, 1]), size, b.pick([1, 1, 3])), b.dtype))
    kind = b.pick(["sum", "sum", "prod"])
    low, high = (-1.0, 1.0) if kind == "sum" else (0.9, 1.0)
    x = b.bounded(x, low, high) if kind == "prod" or b.chance(50) else x
    epilogue(b, b.add(Cumulate(kind, 1), x), 2)


def scatter(b: RandomGraph) -> None:
    """Draw a scatter of more rows than one thread compares, or of a few. Indices repeat only where they may."""
    count, width = b.pick([3, 17, 300, 1100]), b.pick([1, 1, 3])
    kind = b.pick(["none", "add", "mul", "max", "min"] if count < 100 else ["none", "add", "max", "min"])
    places = b.pick([5, 40]) if kind != "none" else 2 * count
    x = b.bounded(b.input(TensorType((places, width), b.dtype)), -1.0, 1.0)
    at = list(b.permutation(places))[:count] if kind == "none" else [b.below(places) for _ in range(count)]
    indices = b.graph.constant(np.array([i - places if b.chance(20) else i for i in at], np.int64))
    updates = b.bounded(b.fresh(TensorType((count, width), b.dtype)), -1.0, 1.0)
    b.add(Scatter(kind), x, indices, updates)


def _about(b: RandomGraph, x: Value, name: str) -> None:
    """Draw an op of the registry with a value as its operand, and pointwise ops after it."""
    with b.focused(x):
        DRAWS[name](b)
    node = b.values[-1].node
    if node is None or not node.results[0].type.dtype.is_float:
        raise Unfit("no float result for pointwise ops")
    epilogue(b, node.results[0], 2)


def _scaled(b: RandomGraph, sums: Value) -> Value:
    """Multiply the sums of an integer product by a scale."""
    return b.pointwise("mul", b.add(Cast(DType.F32), sums), b.constant((), DType.F32, "positive"))


def _half(b: RandomGraph) -> DType:
    return b.dtype if b.dtype in HALVES else b.pick(HALVES)


def _side(b: RandomGraph) -> int:
    return b.pick([4, 8, 5, 3, 11, 16])


def _image(b: RandomGraph, count: int, high: int, wide: int, dtype: DType | None = None) -> Value:
    """Add an input of one or two images, mostly channels last."""
    shape = (b.pick([1, 2]), count, high, wide)
    return b.input(TensorType(shape, dtype or b.dtype, channels_last(4) if b.chance(80) else ()))


def _convolved(b: RandomGraph, x: Value, filters: int, groups: int = 1, stride: int = 0) -> Value:
    """Add a convolution whose window fits the image, with constant filters."""
    sizes: Sequence[int] = x.type.shape[2:]
    kernel = tuple(b.pick([k for k in (3, 1, 2, 5) if k <= size]) for size in sizes)
    strides = tuple(stride or b.pick([1, 1, 2]) for _ in sizes)
    pads = tuple(b.below(k // 2 + 1) for k in kernel)
    shape: Shape = (filters, x.type.shape[1] // groups, *kernel)
    return b.add(Conv(strides, (*pads, *pads), (1, 1), groups), x, b.constant(shape, x.type.dtype))


KERNELS: Mapping[str, Draw] = {
    draw.__name__: draw
    for draw in (
        *(
            attention_forward,
            attention_backward,
            multi_tensor,
            pointwise,
            instance_norm,
            row_reduction,
            batch_norm,
            layer_norm_backward,
            pool_forward,
            max_pool_backward,
            depthwise,
        ),
        *(
            squeeze_excite,
            split_k,
            thin_product,
            dense_bytes,
            resident_weights,
            resident_filters,
            few_rows,
            streamed_weights,
            few_channels,
            filter_gradient,
            grouped_conv1d,
            grouped_conv2d,
            few_filters,
            gather_resize,
            grid_sample,
            roi_align,
            integer_product,
            packed_product,
            rotary,
            write_rows,
            cached_attention,
            arg_max,
            all_finite,
            non_max_suppression,
            top_k,
            recurrent,
            linear_scan,
            cumulate,
            scatter,
        ),
    )
}
