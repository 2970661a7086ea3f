"""How a convolution over few pixels is shared out among blocks and threads: see `split_k`."""

from __future__ import annotations

from dataclasses import dataclass

from fusec.ir import Node, TensorType
from fusec.ops import Conv

PACK = 8  # neighbours of a pixel, or filter, or result, that a thread has
DEPTH = 32  # channels that four threads have so
ROWS, COLUMNS = 16, 8  # of a warp's product: filters, pixels


@dataclass(frozen=True)
class Shares:
    """How a convolution is shared out. A block has `high` x `wide` pixels (of these octets), `filters`, and one of
    `splits` parts of the channels; `deep` of its warps share taps and channels, `across` of them filters. Sums of the
    parts are put together by a cluster of blocks, or through scratch memory (`clusters`)."""

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
        """Products of a warp side by side."""
        return self.pixels // COLUMNS

    @property
    def threads(self) -> int:
        return 32 * self.deep * self.across

    @property
    def rows(self) -> int:
        """Products of a warp one below the other."""
        return self.filters // self.across // ROWS


@dataclass(frozen=True)
class Along:
    """A dim of the image: where the pixels lie that a tile reads. Result `i` of a tile reads, for tap `k`, the one at
    `i * apart + k * dilation` of `count`, each `stride` from the next in the image."""

    count: int
    apart: int
    dilation: int
    stride: int


def along(op: Conv, dim: int, window: int, tile: int) -> Along:
    """Of a tile of that size; a window of one skips what lies between its pixels."""
    stride, dilation = op.strides[dim], op.dilations[dim]
    if window == 1:
        return Along(tile, 1, 0, stride)
    return Along((tile - 1) * stride + (window - 1) * dilation + 1, stride, dilation, 1)


def is_flat(conv: Node) -> bool:
    """Whether a convolution is a product of places by a matrix, whichever way the places lie in images."""
    op, (x, w) = conv.op, conv.operands
    assert isinstance(op, Conv)
    plain = op.strides == (1, 1) and not any(op.pads) and w.type.shape[2:] == (1, 1)
    return plain and not x.type.within


def fragments(w: TensorType, splits: int) -> TensorType:
    """Weights as threads multiply them: of 16 filters, by a part of the channels, a tap, and 32 channels, each thread's
    numbers side by side."""
    filters, channels, high, wide = w.shape
    shape = (filters // ROWS, 2, 8, splits, channels // DEPTH // splits, 4, 2, 2, 2, high, wide)
    return TensorType(shape, w.dtype, (0, 3, 9, 10, 4, 6, 2, 5, 7, 1, 8))
