"""Pad images of three channels with a fourth of zeros, because tensor cores take channels in fours.

benchmarks/choices.py measures the gain for the first layer of ResNet-50 in 16 bits. For 8-bit integers, cuDNN offers
more plans of four channels than of three; that gain was not measured.
"""

from __future__ import annotations

import math

import numpy as np

from fusec.ir import HALVES, Array, DType, Graph, Node, TensorType, Value
from fusec.ops import Conv, ConvWgrad, Pad, Slice
from fusec.passes.base import RulePass
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import NoMatch, local

WIDER = Pad((0, 0, 0, 0, 0, 1, 0, 0))
_ENOUGH_ELEMENTS = 1 << 16  # of an image, because the kernel that adds the channel costs a launch


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
    filters = derive(graph, node, type, (literal,), _padded, literal)
    return graph.add(op, wide, filters, before=node)


def _padded(filters: Array) -> Array:
    return np.pad(filters, ((0, 0), (0, 1), (0, 0), (0, 0)))


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
    """Return True if windows overlap, as measured for ResNets; the pass `patch_embedding` handles the others."""
    return any(k > s for k, s in zip(window, strides, strict=True))


def _pays(x: Value, window: tuple[int, ...]) -> bool:
    narrow = x.type.dtype in (*HALVES, DType.I8)
    return narrow and x.type.size >= _ENOUGH_ELEMENTS and math.prod(window) > 1


class PadChannels(RulePass):
    """Pad channels from three to four."""

    name = "pad_channels"
    rules = (_fourth_channel, _fourth_gradient)
