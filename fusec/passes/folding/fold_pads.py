"""Fold explicit padding into the padding of the convolution or pooling that follows, and slices into that before them.

Zeros fold into a convolution, and into an average that counts its padding. Minus infinity folds into a maximum; so do
zeros where the padded value is never negative. Results of a convolution that a slice leaves out need no padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fusec.ir import Graph, Node, Value
from fusec.ops import FORWARD_CONVOLUTIONS, AvgPool, MaxPool, Pad, Slice, pw
from fusec.passes.base import RulePass
from fusec.passes.rewriting.rewriter import NoMatch, local, single_use
from fusec.passes.rewriting.value_facts import never_negative


def _spatial_padding(node: Node) -> tuple[Value, Pad, tuple[int, ...]]:
    """Return (x, pad, spatial pads) of the Pad that only this node uses.

    Raises NoMatch if it does not pad spatial dims with a constant.
    """
    padded = node.operands[0]
    pad = padded.node.op if padded.node is not None else None
    if padded.node is None or not isinstance(pad, Pad):
        raise NoMatch("not padded", padded)
    rank = padded.type.rank
    if pad.mode != "constant" or any(pad.pads[i] for i in (0, 1, rank, rank + 1)):
        raise NoMatch("not spatial constant padding", padded)
    if not single_use(padded):
        raise NoMatch("the padded tensor is used elsewhere too", padded)
    return padded.node.operands[0], pad, (*pad.pads[2:rank], *pad.pads[rank + 2 :])


def _sum(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


@local("conv", "conv_flipped", equation="conv(pad(x, p, 0), w, pads=q) = conv(x, w, pads=p+q)")
def _pad_into_conv(graph: Graph, node: Node) -> Value | None:
    x, pad, pads = _spatial_padding(node)
    if pad.value != 0 or not isinstance(node.op, FORWARD_CONVOLUTIONS):
        raise NoMatch("not padded with zeros", node.operands[0])
    wider = replace(node.op, pads=_sum(node.op.pads, pads))
    return graph.add(wider, x, node.operands[1], before=node)


@local("avg_pool", equation="avg_pool(pad(x, p, 0), pads=q) = avg_pool(x, pads=p+q, count_include_pad)")
def _pad_into_average(graph: Graph, node: Node) -> Value | None:
    x, pad, pads = _spatial_padding(node)
    op = node.op
    if not isinstance(op, AvgPool) or pad.value != 0:
        raise NoMatch("not padded with zeros", node.operands[0])
    if any(op.pads) and not op.count_include_pad:
        raise NoMatch("its own padding is not counted", node.result)
    both = _sum(op.pads, pads)
    _require_small(op, both)
    wider = replace(op, pads=both, count_include_pad=True)
    return graph.add(wider, x, before=node)


@local("max_pool", equation="max_pool(pad(x, p, -inf), pads=q) = max_pool(x, pads=p+q), or pad 0 if x >= 0")
def _pad_into_maximum(graph: Graph, node: Node) -> Value | None:
    x, pad, pads = _spatial_padding(node)
    op = node.op
    if not isinstance(op, MaxPool):
        return None
    both = _sum(op.pads, pads)
    _require_small(op, both)
    if pad.value != -math.inf:
        if pad.value != 0 or not never_negative(x):
            raise NoMatch("not padded with minus infinity", node.operands[0])
        if any(d != 1 for d in op.dilations):
            raise NoMatch("a dilated window may contain only padding", node.result)
        if any(op.pads):  # its own padding is minus infinity: a window of that and zeros alone gives 0
            raise NoMatch("padded twice, with zeros and with minus infinity", node.result)
    wider = replace(op, pads=both)
    return graph.add(wider, x, before=node)


@local("slice", equation="slice(conv(x, w, pads=p) + b) = conv(x, w, pads=p-q) + b, q for the results left out")
def _slice_into_conv(graph: Graph, node: Node) -> Value | None:
    """Drop results at the ends of an image, as where an even window pads by half, or a causal one pads both ends."""
    cut, total = node.op, node.operands[0]
    bias, convolved = _without_bias(total)
    conv = convolved.node
    if not isinstance(cut, Slice) or conv is None or not isinstance(conv.op, FORWARD_CONVOLUTIONS):
        raise NoMatch("no slice of a convolution", total)
    if not single_use(total) or not single_use(convolved):
        raise NoMatch("used elsewhere too", total)
    full, part = convolved.type.shape, node.result.type.shape
    if set(cut.steps) != {1} or part[:2] != full[:2]:
        raise NoMatch("it leaves out images, channels, or what is between others", node.result)
    before = [start * stride for start, stride in zip(cut.starts[2:], conv.op.strides, strict=True)]
    after = [(f - p) * s - b for f, p, s, b in zip(full[2:], part[2:], conv.op.strides, before, strict=True)]
    pads = tuple(pad - less for pad, less in zip(conv.op.pads, (*before, *after), strict=True))
    if min(pads) < 0:
        raise NoMatch("it leaves out more than results of padding", node.result)
    smaller = graph.insert(replace(conv.op, pads=pads), conv.operands, before=node, origin=conv.origin).result
    if bias is None:
        return smaller
    return graph.add(pw("add"), smaller, bias, before=node)


def _without_bias(total: Value) -> tuple[Value | None, Value]:
    """Split off a constant that is added to each channel; None without one."""
    if total.node is None or total.node.op.name != "add":
        return None, total
    for bias, rest in (total.node.operands, reversed(total.node.operands)):
        shape = (1,) * (total.type.rank - bias.type.rank) + bias.type.shape
        if bias.literal is not None and not any(size != 1 for dim, size in enumerate(shape) if dim != 1):
            return bias, rest
    return None, total


def _require_small(op: AvgPool | MaxPool, pads: Sequence[int]) -> None:
    """Check that a pool's pads are smaller than its window, and that it counts no windows by ceil_mode.

    Raises NoMatch otherwise, because ceil_mode counts windows from where padding starts.
    """
    if op.ceil_mode:
        raise NoMatch("with ceil_mode the number of windows would change")
    reach = [d * (k - 1) + 1 for k, d in zip(op.window, op.dilations, strict=True)]
    if any(p >= r for p, r in zip(pads, reach * 2, strict=True)):
        raise NoMatch("the padding is as large as the window")


class FoldPads(RulePass):
    """Fold explicit padding into the convolution or pooling that follows, and slices into that before them."""

    name = "fold_pads"
    rules = (_pad_into_conv, _pad_into_average, _pad_into_maximum, _slice_into_conv)
