"""Copy rows of an image of three channels to shared memory ahead, and store them as a tile of four channels later.

Asynchronous copies need no registers while they are under way, so that they can begin one tile earlier than loads.
"""

from __future__ import annotations

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.kernel import Arguments, ceil_div
from fusec.gpu.kernels.convolution.few_channels.image_tile import THREADS, ImageTile, TilePlace
from fusec.system.dataclass import dataclass

PIECE = 16  # bytes of a copy
PIXEL_BYTES = 6
_CUDA = cuda_template(__package__, "staged_rows.cuh")


@dataclass(frozen=True)
class StagedRows:
    """A tile of an image whose rows are copied as they are stored."""

    tile: ImageTile

    @property
    def is_possible(self) -> bool:
        """Tell if the image has three contiguous channels, and rows of whole copies."""
        source, left = self.tile.step.source.type, self.tile.step.op.pads[1] + self.tile.no_taps
        return self.tile.step.in_words and left % 2 == 0 and source.shape[3] * PIXEL_BYTES % PIECE == 0

    @property
    def pieces(self) -> int:
        """Copies of a row, which may begin up to twelve bytes before the tile."""
        return ceil_div(PIECE - 4 + 2 * PIXEL_BYTES * self.tile.places, PIECE)

    @property
    def nbytes(self) -> int:
        """Shared memory of the rows of a tile."""
        return self.tile.high * self.pieces * PIECE

    def copy(self, arguments: Arguments, place: TilePlace) -> list[str]:
        """Return the code that begins to copy the rows of tile `block` to `rows`."""
        source = self.tile.step.source
        count = self.tile.high * self.pieces
        return self._cuda(place)(
            "copy",
            TURNS=ceil_div(count, THREADS),
            COUNT=count,
            ROW_BYTES=source.type.shape[3] * PIXEL_BYTES,
            IMAGE=arguments.read(source),
            IMAGE_START=f"c0 * {source.type.strides[0]}u",
            ROW_STEP=f"{source.type.strides[2]}u",
            IMAGE_ROWS=source.type.shape[2],
        )

    def unpack(self, place: TilePlace, section: range) -> list[str]:
        """Return the code that stores a section of the pixels of tile `block` in `image`."""
        return self._cuda(place)("unpack", FIRST=section.start, TURNS=len(section), **self.tile.layout)

    def _cuda(self, place: TilePlace) -> CudaTemplate:
        return _CUDA.bind(
            THREADS=THREADS,
            PIECES=self.pieces,
            PIXEL_BYTES=PIXEL_BYTES,
            BLOCK_COORDINATES=place.coordinates,
            TOP=self.tile.first_row(place),
            LEFT=self.tile.first_column(place),
        )
