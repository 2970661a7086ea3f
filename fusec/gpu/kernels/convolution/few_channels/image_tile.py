"""Lay an image out in shared memory such that products of warpgroups, which Hopper has, read overlapping windows.

Two neighbouring pixels of four channels are 16 bytes, a row of the tiles that such a product reads from shared memory.
Results of a row begin 16 bytes apart if their windows begin two pixels apart. Thus products read overlapping windows
from one copy of the image. If windows begin one pixel apart, each pixel is stored twice, with each of its
neighbours. A product computes 8 x 8 results.
"""

from __future__ import annotations

from itertools import pairwise

from fusec.gpu.kernels.codegen.cuda_template import c_bool, cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, ceil_div
from fusec.gpu.kernels.convolution.few_channels.few_channels_step import FewChannels
from fusec.system.dataclass import dataclass

OCTET = 8  # rows, and columns, of the results of a product
PAIR = 16  # bytes of two pixels
STRIDE = 2  # pixels from one window to the next
THREADS = 128
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
        """Tell if one tap of a row, the first or the last, has no second one."""
        return self.step.window[1] % 2 == 1

    @property
    def no_taps(self) -> int:
        """Taps before the first one, which make windows begin in an even column: one, or none."""
        return self.step.pads[1] % 2 if self.is_odd else 0

    def loaded(self, most: int) -> str:
        """Return the C declaration of what a thread loads for a section of at most so many places."""
        (raw, count), turns = self.step.raw, max(map(len, self.sections(most)))
        return f"{raw} loaded[{turns}][2][{count}];"

    @property
    def count(self) -> int:
        """Pairs of taps of the window."""
        return self.step.window[0] * self.pairs

    @property
    def places(self) -> int:
        """Pairs of pixels in a row of the image."""
        return OCTET * self.columns + (self.pairs - 1) * self._pair_step

    @property
    def _pair_step(self) -> int:
        """Places in a row from one pair of taps to the next."""
        return 2 // self.step.strides[1]

    @property
    def pitch(self) -> int:
        """Bytes of a row of the image; if taps are odd, it has all pairs once more, with one of their pixels alone."""
        return self.places * PAIR * (2 if self.is_odd else 1)

    @property
    def stride(self) -> int:
        """Bytes from the image of one row of results to that of the next."""
        return self.step.strides[0] * self.pitch

    @property
    def high(self) -> int:
        """Rows of the image."""
        rows, (window, _) = OCTET * self.rows, self.step.window
        return (rows - 1) * self.step.strides[0] + (window - 1) * self.step.dilations[0] + 1

    @property
    def nbytes(self) -> int:
        """Shared memory of the image."""
        return self.high * self.pitch

    def place(self, pair: int) -> int:
        """Return the place of a pair of taps in the image, in bytes."""
        row, at = divmod(pair, self.pairs)
        is_alone = self.is_odd and at == (0 if self.no_taps else self.pairs - 1)
        return row * self.step.dilations[0] * self.pitch + at * self._pair_step * PAIR + self._part(is_alone)

    def _part(self, is_alone: bool) -> int:
        """Return where a row begins, in bytes: pairs of pixels, or pixels alone. Places increase from tap to tap."""
        is_second = is_alone != (self.no_taps > 0)
        return is_second * self.is_odd * self.places * PAIR

    @property
    def turns(self) -> int:
        """Pairs of pixels that a thread loads."""
        return ceil_div(self.high * self.places, THREADS)

    def sections(self, most: int) -> list[range]:
        """Split the pairs that a thread loads into sections of about equal size, of at most so many each."""
        count = ceil_div(self.turns, most)
        ends = [self.turns * i // count for i in range(count + 1)]
        return [range(*pair) for pair in pairwise(ends)]

    def first_row(self, tile: TilePlace) -> str:
        """Return the first row of the image that a tile reads, as C."""
        return f"({tile.top}) * {self.step.strides[0]} - {self.step.pads[0]}"

    def first_column(self, tile: TilePlace) -> str:
        """Return the first column of the image that a tile reads, as C."""
        return f"({tile.left}) * {self.step.strides[1]} - {self.step.pads[1] + self.no_taps}"

    @property
    def layout(self) -> dict[str, int | str]:
        """The holes of code that stores pairs of pixels."""
        return {
            "PAIRS": self.high * self.places,
            "LAST": self.high * self.places - 1,
            "PLACES": self.places,
            "PITCH": self.pitch,
            "IS_ODD": c_bool(self.is_odd),
            "NO_TAP": 0 if self.no_taps else 1,
            "PAIRS_AT": f"{self._part(False)}u",
            "ALONE_AT": f"{self._part(True)}u",
        }

    def load(self, arguments: Arguments, tile: TilePlace, section: range) -> tuple[list[str], list[str]]:
        """Return the code that loads a section of a tile's image into `loaded`, and the code that stores it in `image`.

        The number of the tile is `block`.
        """
        *_, rows, columns = self.step.conv.operands[0].type.shape
        raw, count = self.step.raw
        cuda = _CUDA.bind(
            TYPE=C_TYPES[self.step.conv.operands[0].type.dtype],
            THREADS=THREADS,
            THREAD=tile.thread,
            BLOCK_COORDINATES=tile.coordinates,
            TOP=self.first_row(tile),
            LEFT=self.first_column(tile),
            RAW=raw,
            COUNT=count,
            FIRST=section.start,
            TURNS=len(section),
            STRIDE_COLUMNS=self.step.strides[1],
            IMAGE_ROWS=rows,
            IMAGE_COLUMNS=columns,
            **self.layout,
        )
        at = cuda("at_pixel")
        request = cuda("request", AT_PIXEL=at, REQUEST_PIXEL=self.step.request_pixel(arguments))
        return request, cuda("deliver", AT_PIXEL=at, DELIVER_PIXEL=self.step.deliver_pixel(arguments))


@dataclass(frozen=True)
class TilePlace:
    """The place of a tile among the results, as C.

    coordinates: statements that split the number `block` into coordinates of the tile.
    top, left: the tile's first row and column of results.
    thread: the number of the thread among those that load the tile.
    """

    coordinates: list[str]
    top: str
    left: str
    thread: str = "threadIdx.x"


def can_share_windows(step: FewChannels, strides: tuple[int, ...] = (STRIDE,)) -> bool:
    """Tell if products can read overlapping windows, two pairs of taps at a time.

    strides: pixels from one window to the next that the caller supports.
    """
    pairs = step.window[0] * ceil_div(step.window[1], 2)
    return step.strides[1] in strides and step.dilations[1] == 1 and pairs % 2 == 0
