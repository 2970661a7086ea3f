"""Pad the channels of images with zeros: three become four, because tensor cores take channels in fours.

benchmarks/models/ablation.py measures the gain for the first layer of ResNet-50 in 16 bits. Channels of 8-bit integers
become a multiple of eight, because cuDNN sums other counts wrongly (docs/hazards.md) and would not be asked. So do the
columns of products by constant weights, which cuDNN refuses otherwise, and the filters of a detector's head in 16 bits.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from fusec.ir import HALVES, Array, DType, Graph, Node, TensorType, Value
from fusec.ops import Conv, ConvWgrad, MatMul, Pad, Reshape, Slice, Transpose, pw
from fusec.passes.base import RulePass
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import NoMatch, local, single_use

WIDER = Pad((0, 0, 0, 0, 0, 1, 0, 0))
INTEGERS_AT_ONCE = FILTERS_AT_ONCE = 8
# Of an image, because the kernel that adds the channel costs a launch. Images of models are larger, whatever the GPU.
_ENOUGH_ELEMENTS = 1 << 16
_ENOUGH_TAPS = 128  # of a channel, in all filters: fewer gain less than the kernel costs that leaves out the padding


@local("conv", equation="conv(x, w) = conv(pad(x), pad(w)), channels padded from 3 to 4 with zeros")
def _fourth_channel(graph: Graph, node: Node) -> Value | None:
    x, w = node.operands
    op, literal = node.op, w.literal
    if not isinstance(op, Conv) or not _is_image(x, op.groups):
        raise NoMatch("no image of three channels", x)
    if not _pays(x, w.type.shape[2:]):
        raise NoMatch("too small an image to gain from it", x)
    if literal is None and not _overlap_of(w.type.shape[2:], op.strides):
        raise NoMatch("the filters are not constant, and patches are a matrix product's", w)
    wide = graph.insert(WIDER, [x], before=node).result
    if literal is None:  # a parameter that is state, for example: a small tensor is padded with each call
        filters = graph.insert(WIDER, [w], before=node).result
        return graph.add(op, wide, filters, before=node)

    type = TensorType((w.type.shape[0], 4, *w.type.shape[2:]), w.type.dtype)
    filters = derive(graph, node, type, (literal,), partial(_padded, count=w.type.shape[0], channels=4), literal)
    return graph.add(op, wide, filters, before=node)


@recorded
def _padded(filters: Array, count: int, channels: int) -> Array:
    more = count - filters.shape[0], channels - filters.shape[1]
    return np.pad(filters, [(0, more[dim] if dim < 2 else 0) for dim in range(filters.ndim)])


@local(
    "conv",
    equation="conv(x, w) = conv(pad(x), pad(w))[:, :K] of integers, channels and filters padded to multiples of 8",
)
def _integer_channels(graph: Graph, node: Node) -> Value | None:
    """Pad images and filters of 8-bit integers; a convolution that cuDNN refuses would run without a kernel."""
    x, w = node.operands
    op, literal, (count, channels) = node.op, w.literal, w.type.shape[:2]
    assert isinstance(op, Conv)
    if x.type.dtype is not DType.I8 or op.groups != 1 or not (count % INTEGERS_AT_ONCE or channels % INTEGERS_AT_ONCE):
        raise NoMatch("no integers whose channels or filters are no multiple of 8", x)
    if literal is None:
        raise NoMatch("the filters are not constant", w)
    more = -channels % INTEGERS_AT_ONCE
    if more:
        ends = tuple(more if dim == 1 else 0 for dim in range(x.type.rank))
        x = graph.insert(Pad(((0,) * x.type.rank) + ends), [x], before=node).result
    every = count + -count % INTEGERS_AT_ONCE
    type = TensorType((every, channels + more, *w.type.shape[2:]), w.type.dtype)
    w = derive(graph, node, type, (literal,), partial(_padded, count=every, channels=channels + more), literal)
    if every == count:
        return graph.add(op, x, w, before=node)
    shape = node.result.type.shape
    return graph.add(Slice((0,) * len(shape), shape, (1,) * len(shape)), graph.add(op, x, w, before=node), before=node)


@local(
    "matmul",
    equation="matmul(x, w) = matmul(pad(x), pad(w))[..., :N] of integers, depth and columns padded to multiples of 8",
)
def _integer_columns(graph: Graph, node: Node) -> Value | None:
    """Pad a product of 8-bit integers by a constant matrix, such as the last layer of a classifier of ten classes."""
    x, w = node.operands
    literal = w.literal
    if x.type.dtype is not DType.I8 or literal is None or w.type.rank != 2:
        raise NoMatch("no integers by a constant matrix", x)
    depth, columns = w.type.shape
    more, wider = -depth % INTEGERS_AT_ONCE, -columns % INTEGERS_AT_ONCE
    if not (more or wider) or 0 in node.result.type.shape:
        raise NoMatch("no depth or columns that are no multiple of 8", w)
    if more:
        x = graph.insert(Pad((*(0,) * x.type.rank, *(0,) * (x.type.rank - 1), more)), [x], before=node).result
    type = TensorType((depth + more, columns + wider), w.type.dtype)
    w = derive(graph, node, type, (literal,), partial(_padded, count=depth + more, channels=columns + wider), literal)
    product = graph.add(MatMul(), x, w, before=node)
    if not wider:
        return product
    shape = node.result.type.shape
    return graph.add(Slice((0,) * len(shape), shape, (1,) * len(shape)), product, before=node)


@local(
    "add",
    equation="conv(x, w) + b = (conv(x, pad(w)) + pad(b))[:, :K] in 16 bits, filters padded to a multiple of 8",
)
def _aligned_filters(graph: Graph, node: Node) -> Value | None:
    """Pad the filters of a detector's head, such as 819 for 9 anchors and 91 classes, which cuDNN runs slowly.

    A kernel leaves out the padding. This pays for large windows or many filters only.
    """
    product, bias = node.operands
    conv = product.node
    if conv is None or not isinstance(conv.op, Conv):
        raise NoMatch("no bias of a convolution", product)
    x, w = conv.operands
    count = w.type.shape[0]
    if w.type.dtype not in HALVES or conv.op.groups != 1 or not count % FILTERS_AT_ONCE:
        raise NoMatch("no filters of 16 bits whose number is no multiple of 8", w)
    if count * math.prod(w.type.shape[2:]) < _ENOUGH_TAPS:
        raise NoMatch("too few or small filters to gain from it", w)
    if w.literal is None or bias.literal is None or bias.type.shape[-3:] != (count, 1, 1) or bias.type.rank > 4:
        raise NoMatch("filters or bias are not constant, or have another shape", bias)
    if not single_use(product) or not _ends_in_rows(node.result):
        raise NoMatch("used elsewhere too, or no head of a detector, whose results become rows", product)
    every = count + -count % FILTERS_AT_ONCE
    type = TensorType((every, *w.type.shape[1:]), w.type.dtype)
    filters = derive(graph, node, type, (w.literal,), partial(_padded, count=every, channels=type.shape[1]), w.literal)
    type = TensorType((every, 1, 1), bias.type.dtype)
    more = derive(graph, node, type, (bias.literal,), partial(_padded_bias, count=every), bias.literal)
    product = graph.insert(conv.op, (x, filters), before=node, origin=conv.origin).result
    wide = graph.insert(pw("add"), (product, more), before=node, origin=node.origin).result
    shape = node.result.type.shape
    return graph.add(Slice((0,) * len(shape), shape, (1,) * len(shape)), wide, before=node)


def _ends_in_rows(value: Value) -> bool:
    """Tell if views alone read a value. Other ops would run within the convolution's step if nothing were padded."""
    return bool(value.users) and all(isinstance(user.op, (Reshape, Transpose)) for user in value.users)


@recorded
def _padded_bias(bias: Array, count: int) -> Array:
    return np.pad(bias.reshape(-1, 1, 1), [(0, count - bias.size), (0, 0), (0, 0)])


@local("conv_wgrad", equation="conv_wgrad(x, dy) = conv_wgrad(pad(x), dy)[:, :3], channels padded from 3 to 4")
def _fourth_gradient(graph: Graph, node: Node) -> Value | None:
    x, dy = node.operands
    op, shape = node.op, node.result.type.shape
    if not isinstance(op, ConvWgrad) or not _is_image(x, op.groups):
        raise NoMatch("no image of three channels", x)
    if not _pays(x, op.window) or not _overlap_of(op.window, op.strides):
        raise NoMatch("too small an image to gain from it", x)
    wide = graph.insert(WIDER, [x], before=node).result
    filters = graph.insert(op, [wide, dy], before=node).result
    return graph.add(Slice((0,) * 4, shape, (1,) * 4), filters, before=node)


def _is_image(x: Value, groups: int) -> bool:
    return x.type.rank == 4 and x.type.shape[1] == 3 and groups == 1


def _overlap_of(window: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell if windows overlap, as measured for ResNets; the pass `patch_embedding` handles the others."""
    return any(k > s for k, s in zip(window, strides, strict=True))


def _pays(x: Value, window: tuple[int, ...]) -> bool:
    narrow = x.type.dtype in HALVES
    return narrow and x.type.size >= _ENOUGH_ELEMENTS and math.prod(window) > 1


class PadChannels(RulePass):
    """Pad channels from three to four; those of integers, columns and filters of heads to multiples of eight."""

    name = "pad_channels"
    rules = (_fourth_channel, _integer_channels, _integer_columns, _aligned_filters, _fourth_gradient)
