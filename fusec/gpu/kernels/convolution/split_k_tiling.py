"""Describe how split-K tiles a convolution among blocks and threads; `split_k` chooses the numbers."""

from __future__ import annotations

from fusec.ir import Node, TensorType
from fusec.ops import Conv
from fusec.system.dataclass import dataclass

PACK = 8  # neighbours of a pixel, filter or result that a thread handles
DEPTH = 32  # channels that four threads handle
ROWS, COLUMNS = 16, 8  # of a warp's product: filters, pixels


@dataclass(frozen=True)
class SplitKTiling:
    """Shares of a convolution among blocks and warps.

    high, wide: pixels of a block; `wide` is a multiple of eight.
    filters: filters of a block.
    splits: parts of the channels, each for other blocks.
    deep, across: warps of a block that share taps and channels, and filters.
    clusters: a cluster of blocks merges the parts; otherwise scratch memory does.
    """

    high: int
    wide: int
    filters: int
    splits: int
    deep: int
    across: int
    clusters: bool

    @property
    def pixels(self) -> int:
        return self.high * self.wide

    @property
    def tiles(self) -> int:
        """Products of a warp along the pixels."""
        return self.pixels // COLUMNS

    @property
    def threads(self) -> int:
        return 32 * self.deep * self.across

    @property
    def rows(self) -> int:
        """Products of a warp along the filters."""
        return self.filters // self.across // ROWS


@dataclass(frozen=True)
class Along:
    """The pixels that a tile reads along a dim of the image.

    For result `i` of a tile and tap `k`, pixel `i * apart + k * dilation` of `count` is read. Pixels are `stride`
    apart in the image.
    """

    count: int
    apart: int
    dilation: int
    stride: int


def along(op: Conv, dim: int, window: int, tile: int) -> Along:
    """Return the pixels that a tile reads. A window of one skips the pixels in between."""
    stride, dilation = op.strides[dim], op.dilations[dim]
    if window == 1:
        return Along(tile, 1, 0, stride)
    return Along((tile - 1) * stride + (window - 1) * dilation + 1, stride, dilation, 1)


def is_flat(conv: Node) -> bool:
    """Tell if a convolution is a product of pixels by a matrix, in whichever image the pixels are."""
    op, (x, w) = conv.op, conv.operands
    assert isinstance(op, Conv)
    plain = op.strides == (1, 1) and not any(op.pads) and w.type.shape[2:] == (1, 1)
    return plain and not x.type.within


def fragments(w: TensorType, splits: int) -> TensorType:
    """Return the weights in the order in which threads multiply them.

    The order is: 16 filters, part of the channels, tap, 32 channels; the numbers of a thread are contiguous.
    """
    filters, channels, high, wide = w.shape
    shape = (filters // ROWS, 2, 8, splits, channels // DEPTH // splits, 4, 2, 2, 2, high, wide)
    return TensorType(shape, w.dtype, (0, 3, 9, 10, 4, 6, 2, 5, 7, 1, 8))
