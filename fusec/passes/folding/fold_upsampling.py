"""Replace convolutions over nearest-upsampled images by transposed convolutions over the images.

A window over repeated pixels sees few distinct pixels. 3 by 3 taps over pixels repeated twice each way become 2 by 2
taps for each of four results. The upsampled image is never stored.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from fusec.ir import Array, Graph, Node, TensorType, Value
from fusec.ops import Conv, ConvTranspose, Resize
from fusec.passes.base import RulePass
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import NoMatch, local, single_use


def copies(node: Node) -> tuple[int, ...] | None:
    """Return how often a resize repeats each pixel along the spatial dims; None for any other resize."""
    op = node.op
    if not isinstance(op, Resize) or op.mode != "nearest":
        return None
    x, y = node.operands[0].type, node.result.type
    if x.rank < 3 or x.shape[:2] != y.shape[:2]:
        return None
    if any(b % a for a, b in zip(x.shape[2:], y.shape[2:], strict=True)):
        return None
    times = tuple(b // a for a, b in zip(x.shape[2:], y.shape[2:], strict=True))
    found = (op.nearest(np, dim, x.shape[dim]) for dim in range(2, x.rank))
    wanted = (np.arange(n) // k for n, k in zip(y.shape[2:], times, strict=True))
    return times if all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)) else None


@local(
    "conv", equation="conv(resize(x), w) = conv_transpose(x, taps of equal pixels added up), nearest, by whole numbers"
)
def _uncopied(graph: Graph, node: Node) -> Value | None:
    """Replace a convolution of an upsampled image by a transposed convolution of the image, whose filters are sums."""
    copied, w = node.operands
    op, literal = node.op, w.literal
    times = copies(copied.node) if copied.node is not None else None
    if not isinstance(op, Conv) or times is None or copied.node is None or math.prod(times) == 1:
        raise NoMatch("no nearest upsampling by whole numbers", copied)
    if literal is None:
        raise NoMatch("the filters are not constant", w)
    if not single_use(copied):
        raise NoMatch("used elsewhere too", copied)
    n, window = len(times), w.type.shape[2:]
    if op.groups != 1 or set(op.strides) != {1} or set(op.dilations) != {1} or copied.type.dtype.itemsize != 2:
        raise NoMatch("not in 16 bits, or strided, dilated or in groups", node.result)
    pads = tuple(k - 1 - p for k, p in zip(window * 2, op.pads, strict=True))
    if any(p < 0 for p in pads):
        raise NoMatch("the pads are larger than the window", node.result)
    wider = tuple(k + t - 1 for k, t in zip(window, times, strict=True))
    shape = (w.type.shape[1], w.type.shape[0], *wider)
    sums = partial(_window_sums, times=times)
    filters = derive(graph, node, TensorType(shape, w.type.dtype), (literal,), sums, literal)
    transposed = ConvTranspose(times, pads, (1,) * n, (0,) * n)
    x = copied.node.operands[0]
    return graph.add(transposed, x, filters, before=node)


@recorded
def _window_sums(filters: Array, times: tuple[int, ...]) -> Array:
    """Return the filters of the transposed convolution: those of the convolution, reversed, at each shift added up."""
    flipped = np.flip(filters.astype(np.float64), axis=tuple(range(2, filters.ndim))).swapaxes(0, 1)
    window = flipped.shape[2:]
    result = np.zeros((*flipped.shape[:2], *(k + t - 1 for k, t in zip(window, times, strict=True))))
    for shift in np.ndindex(*times):
        place = tuple(slice(s, s + k) for s, k in zip(shift, window, strict=True))
        result[(slice(None), slice(None), *place)] += flipped
    return result


class FoldUpsampling(RulePass):
    """Fold nearest upsampling into convolutions."""

    name = "fold_upsampling"
    rules = (_uncopied,)
