"""Lay an image out in shared memory such that products of warpgroups, which Hopper has, read overlapping windows.

Two neighbouring pixels of four channels are 16 bytes, a row of the tiles that such a product reads from shared memory.
Results of a row begin 16 bytes apart if their windows begin two pixels apart. Thus products read overlapping windows
from one copy of the image. If windows are one pixel apart, each pixel is stored in two pairs. A product computes 8 x 8
results.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusec.gpu.kernels.codegen.cuda_template import c_bool, cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, ceil_div
from fusec.gpu.kernels.convolution.few_channels.step import FewChannels

OCTET = 8  # rows, and columns, of the results of a product
PAIR = 16  # bytes of two pixels
THREADS = 128
BATCH = 4  # pairs of pixels that a thread loads before it stores them, at most
RESERVED = 1024  # bytes of shared memory of a block that the driver uses
_CUDA = cuda_template(__package__, "image_tile.cuh")


@dataclass(frozen=True)
class ImageTile:
    """A step, and the tile of results that a block computes, in octets."""

    step: FewChannels
    columns: int
    rows: int = 1

    @property
    def pairs(self) -> int:
        """Pairs of taps of a row of the window."""
        return ceil_div(self.step.window[1], 2)

    @property
    def is_odd(self) -> bool:
        """Tell if the last tap of a row has no second one."""
        return self.step.window[1] % 2 == 1

    @property
    def count(self) -> int:
        """Pairs of taps of the window."""
        return self.step.window[0] * self.pairs

    @property
    def after(self) -> int:
        """Places from one pair of taps to the next."""
        return 2 // self.step.op.strides[1]

    @property
    def places(self) -> int:
        """Pairs of pixels in a row of the image."""
        return OCTET * self.columns + self.after * (self.pairs - 1)

    @property
    def pitch(self) -> int:
        """Bytes of a row of the image; if taps are odd, each pair is followed by one with its first pixel alone."""
        return self.places * PAIR * (2 if self.is_odd else 1)

    @property
    def stride(self) -> int:
        """Bytes from the image of one row of results to that of the next."""
        return self.step.op.strides[0] * self.pitch

    @property
    def high(self) -> int:
        """Rows of the image."""
        rows, (window, _) = OCTET * self.rows, self.step.window
        return (rows - 1) * self.step.op.strides[0] + (window - 1) * self.step.op.dilations[0] + 1

    @property
    def nbytes(self) -> int:
        """Shared memory of the image."""
        return self.high * self.pitch

    def place(self, pair: int) -> int:
        """Return the place of a pair of taps in the image, in bytes."""
        row, at = divmod(pair, self.pairs)
        is_alone = self.is_odd and at == self.pairs - 1
        return row * self.step.op.dilations[0] * self.pitch + (at * self.after + is_alone * self.places) * PAIR

    def load(self, arguments: Arguments, coordinates: list[str], top: str, left: str) -> list[str]:
        """Return the code that loads the image of a tile of results.

        coordinates: statements that split the number `block` into coordinates of the tile.
        top, left: the tile's first row and column of results, as C.
        """
        turns, (row_stride, column_stride) = ceil_div(self.high * self.places, THREADS), self.step.op.strides
        _, _, rows, columns = self.step.conv.operands[0].type.shape
        return _CUDA(
            "load_image",
            TYPE=C_TYPES[self.step.conv.operands[0].type.dtype],
            THREADS=THREADS,
            BLOCK_COORDINATES=coordinates,
            TOP=f"({top}) * {row_stride} - {self.step.op.pads[0]}",
            LEFT=f"({left}) * {column_stride} - {self.step.op.pads[1]}",
            HIGH=self.high,
            PLACES=self.places,
            PITCH=self.pitch,
            BATCH=ceil_div(turns, ceil_div(turns, BATCH)),
            STRIDE_COLUMNS=column_stride,
            IMAGE_ROWS=rows,
            IMAGE_COLUMNS=columns,
            IS_ODD=c_bool(self.is_odd),
            LOAD_PIXEL=self.step.load_pixel(arguments),
        )


def can_share_windows(step: FewChannels) -> bool:
    """Tell if products can read overlapping windows, two pairs of taps at a time."""
    pairs = step.window[0] * ceil_div(step.window[1], 2)
    return step.op.strides[1] in (1, 2) and step.op.dilations[1] == 1 and pairs % 2 == 0
