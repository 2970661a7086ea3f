"""Convolution over few pixels: a handful of blocks would each go through all taps and channels, one after the other.

Here channels are shared out among blocks, too, until there is one for each processor, and their sums put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.kernel import HALVES, Kernel, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import PROCESSORS, follows
from fusec.gpu.kernels.convolution.split_k_source import FewPixelsSource
from fusec.gpu.kernels.convolution.split_k_tiling import COLUMNS, DEPTH, PACK, ROWS, Shares, along, is_flat
from fusec.gpu.kernels.convolution.thin_product import thin_product
from fusec.ir import Node, Value
from fusec.ops import Conv

MOST_PIXELS = 4096
MOST_STEPS = 20  # of a warp: all are written out
MOST_BLOCKS = 4 * PROCESSORS  # with more, cuDNN's engines are busy, too
MOST_SPLITS = 8  # blocks of a cluster
WAYS = ((32, 32, 4, 1), (16, 32, 4, 1), (16, 64, 4, 2))  # a block's pixels, filters, and warps that share each work
SHARED_BYTES = 200 << 10


def few_pixels(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """The kernel for a convolution over few pixels, and pointwise ops over its result; None if the step is no such
    thing."""
    conv, rest = nodes[0], nodes[1:]
    if not isinstance(conv.op, Conv) or not all(map(follows, rest)) or not _fits(conv):
        return None
    y = conv.result
    if any(v.type.shape != y.type.shape for v in (*outputs, *(v for node in rest for v in node.results))):
        return None
    sources = [FewPixelsSource(conv, rest, outputs, way) for way in ways(conv)]
    fit = [
        s for s in sources if s.own_steps <= MOST_STEPS and s.resident_bytes <= SHARED_BYTES and s.grid <= MOST_BLOCKS
    ]
    kernels = [source.kernel() for source in fit]
    if not kernels:
        return None
    thin = thin_product(nodes, outputs)
    kernels += [] if thin is None else [replace(thin, others=()), *thin.others]
    return replace(kernels[0], others=tuple(kernels[1:]))


def _fits(conv: Node) -> bool:
    """Whether channels are read by octets, of an image of few pixels."""
    op, (x, w), y = conv.op, conv.operands, conv.result
    assert isinstance(op, Conv)
    if x.type.rank != 4 or op.groups != 1 or x.type.dtype not in HALVES or w.type.dtype is not x.type.dtype:
        return False
    n, filters, high, wide = y.type.shape
    if not y.type.size or n * high * wide > MOST_PIXELS or filters % ROWS or w.literal is None:
        return False
    if max(v.type.span for v in (x, w, y)) >= 1 << 31:
        return False
    others = (stride for dim, stride in enumerate(x.type.strides) if dim != 1)
    return x.type.shape[1] % DEPTH == 0 and x.type.strides[1] == 1 and not any(stride % PACK for stride in others)


def ways(conv: Node) -> list[Shares]:
    """What is likely to be fast, the likeliest that any GPU can run first."""
    found = [_shared(conv, *way) for way in WAYS]
    return list(dict.fromkeys([found[0], *(replace(way, clusters=way.splits > 1) for way in found)]))


def _shared(conv: Node, pixels: int, filters: int, deep: int, across: int) -> Shares:
    """In blocks of so many pixels, filters and warps, channels in so many parts that each processor has one."""
    high, wide = _tile(conv, pixels)
    (n, all, down, right), channels = conv.result.type.shape, conv.operands[1].type.shape[1]
    if is_flat(conv):
        n, down, right = 1, 1, n * down * right
    blocks = n * ceil_div(down, high) * ceil_div(right, wide) * ceil_div(all, filters)
    room = max(1, PROCESSORS // blocks)
    splits = max(n for n in range(1, min(MOST_SPLITS, room) + 1) if channels // DEPTH % n == 0)
    return Shares(high, wide, filters, splits, deep, across, False)


def _tile(conv: Node, pixels: int) -> tuple[int, int]:
    """Rows and columns of at most so many pixels of a block: few blocks, which read few pixels."""
    op, w, (n, _, high, wide) = conv.op, conv.operands[1], conv.result.type.shape
    assert isinstance(op, Conv)
    if is_flat(conv):
        return 1, min(pixels, ceil_div(n * high * wide, COLUMNS) * COLUMNS)
    window = w.type.shape[2:]

    def tiles() -> Iterator[tuple[int, int, int, int]]:
        for columns in range(COLUMNS, pixels + 1, COLUMNS):
            down, right = ceil_div(high, pixels // columns), ceil_div(wide, columns)
            rows = ceil_div(high, down)
            read = along(op, 0, window[0], rows).count * along(op, 1, window[1], columns).count
            yield down * right, read, rows, columns

    return min(tiles())[2:]
