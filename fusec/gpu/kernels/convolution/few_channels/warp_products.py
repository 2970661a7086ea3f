"""Generate convolution of an image of up to four channels by products of warps.

Tensor cores take channels by sixteens, and cuDNN leaves most of them idle. Here four taps of four channels are one step
of a product. A thread reads its operand from the image in shared memory, eight bytes a tap. Filters stay in registers,
and a thread gets neighbouring results. An image in rows is as good as one with its channels last, because neighbouring
threads load neighbouring pixels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from fusec.gpu.kernels.codegen.cuda_template import c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import REGISTERS
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Kernel, by_value, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import COLUMNS, PIXELS
from fusec.gpu.kernels.codegen.pointwise_code import split_index
from fusec.gpu.kernels.convolution.few_channels.few_channels_step import CHANNELS, FewChannels
from fusec.system.dataclass import dataclass

TAPS = 4  # of one step
MOST_STEPS = 16  # because the filters of a warp need 8 registers a step
WARPS = 4  # of a block, at least
BANKS = 16  # of shared memory, eight bytes each
WORKING = 64  # registers of a thread, without those of its filters
SIZES = (
    (8, 128),
    (4, 128),
    (2, 128),
    (4, 64),
    (8, 64),
    (16, 64),
    (2, 64),
)  # rows and columns of a tile of results, about
BEGUN = 128  # results that cost as much as the start of a tile: an estimate
LOADED = 8  # pixels that are loaded while one result is computed, for all filters: an estimate
SPLIT = 1.15  # times the work where a warp's pixels are not in one row: an estimate
BATCH = 6  # pixels that a thread loads before it stores them, at most
VARIANTS = 2  # sizes of tiles that are timed; all others are worth under 1 % of a model (leave_one_out.json)
_CUDA = cuda_template(__package__, "warp_products.cuh")


@dataclass(frozen=True)
class _WarpProducts:
    """A step and the tile of results that a block computes."""

    step: FewChannels
    rows: int = 0
    columns: int = 0

    @property
    def steps(self) -> int:
        return ceil_div(self.step.taps, TAPS)

    @property
    def wide(self) -> int:
        """Columns of a warp's product, by eights."""
        return 4 if self.step.filters % 32 == 0 else 2

    @property
    def groups(self) -> int:
        """Warps that share the filters."""
        return self.step.filters // (self.wide * COLUMNS)

    @property
    def warps(self) -> int:
        return self.groups * ceil_div(WARPS, self.groups)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the image that a tile of results reads."""
        sizes = zip(
            (self.rows, self.columns), self.step.window, self.step.op.strides, self.step.op.dilations, strict=True
        )
        high, across = ((size - 1) * stride + (k - 1) * dilation + 1 for size, k, stride, dilation in sizes)
        return high, across

    @cached_property
    def pitch(self) -> int:
        """Pixels from one row of the tile to the next in shared memory; some of them may be unused.

        With this pitch the taps of a step are in different banks, also where they cross the end of a row of the window.
        """
        stride, (down, right), across = self.step.op.strides[1], self.step.op.dilations, self.tile[1]
        taps = [divmod(k if k < self.step.taps else 0, self.step.window[1]) for k in range(self.steps * TAPS)]

        def turns(pitch: int) -> int:
            """Count the turns of all reads, half a warp at a time."""
            total = 0
            for first in range(0, len(taps), TAPS):
                own = [a * down * pitch + b * right for a, b in taps[first : first + TAPS]]
                places = {at + pixel * stride for at in own for pixel in range(PIXELS // 4)}
                total += max(Counter(place % BANKS for place in places).values())
            return total

        return min(range(across, across + BANKS), key=turns)

    @property
    def blocks(self) -> int:
        """Tiles of results."""
        n, _, high, across = self.step.conv.result.type.shape
        return n * ceil_div(high, self.rows) * ceil_div(across, self.columns)

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor, because of registers."""
        return max(1, REGISTERS // (self.warps * 32 * (2 * self.steps * self.wide + WORKING)))

    @property
    def batch(self) -> int:
        """Pixels of the image that a thread loads before it stores them: equally many each time."""
        turns = ceil_div(math.prod(self.tile), self.warps * 32)
        return ceil_div(turns, ceil_div(turns, BATCH))

    @property
    def slots(self) -> int:
        """Blocks that run at the same time."""
        return self.step.figures.processors * self.resident

    @property
    def cost(self) -> float:
        """Estimate the time, which orders the tiles: rounds of tiles, times the work of a tile."""
        image = math.prod(self.tile) / LOADED
        split = 1.0 if self.columns % PIXELS == 0 else SPLIT
        return ceil_div(self.blocks, self.slots) * (self.rows * self.columns * split + image + BEGUN)

    def sized(self, rows: int, columns: int) -> _WarpProducts:
        """Return the source with tiles of about that size, which divide the image evenly."""
        _, _, high, across = self.step.conv.result.type.shape
        return replace(self, rows=min(rows, high), columns=ceil_div(across, ceil_div(across, columns)))

    def kernel(self) -> Kernel:
        """Return the kernel."""
        conv, y, arguments = self.step.conv, self.step.conv.result, Arguments()
        _, _, out_high, out_across = y.type.shape
        (high, across), (pad_top, pad_left) = self.tile, self.step.op.pads[:2]
        pixels, each = self.rows * self.columns, self.warps // self.groups
        cuda = _CUDA.bind(
            TYPE=C_TYPES[conv.operands[0].type.dtype],
            STEPS=self.steps,
            TAPS=self.step.taps,
            LAST_TAPS=self.step.taps - (self.steps - 1) * TAPS,
            WINDOW_COLUMNS=self.step.window[1],
            WIDE=self.wide,
            OWN=self.wide,
            TILES_OF_FILTERS=self.wide // 2,
            GROUPS=self.groups,
            GROUP_FILTERS=self.wide * COLUMNS,
            PITCH=self.pitch,
            THREADS=self.warps * 32,
            ROWS=self.rows,
            COLUMNS=self.columns,
            PIXELS=pixels,
        )
        offsets = {"OFFSET_ROWS": self.step.op.dilations[0] * self.pitch, "OFFSET_COLUMNS": self.step.op.dilations[1]}
        filters = self.step.load_filters(cuda.bind(**offsets), arguments)
        blocks = [("c0", y.type.shape[0]), ("down", ceil_div(out_high, self.rows))]
        grid = min(self.blocks, self.slots)
        lines = cuda(
            "kernel",
            TILES=by_value(self.blocks),
            BLOCKS=by_value(grid),
            SHARE_ROW=c_bool(self.columns % PIXELS == 0),
            PIXELS_FIT=c_bool(pixels % (PIXELS * each) == 0),
            ROWS_FIT=c_bool(out_high % self.rows == 0),
            COLUMNS_FIT=c_bool(out_across % self.columns == 0),
            BLOCK_COORDINATES=split_index("block", [*blocks, ("right", ceil_div(out_across, self.columns))]),
            TILE_PIXELS=high * self.pitch,
            TOP=f"(int)down * {self.rows * self.step.op.strides[0]} - {pad_top}",
            LEFT=f"(int)right * {self.columns * self.step.op.strides[1]} - {pad_left}",
            LOAD_FILTERS=filters,
            BATCH=self.batch,
            HIGH=high,
            ACROSS=across,
            IMAGE_ROWS=conv.operands[0].type.shape[2],
            IMAGE_COLUMNS=conv.operands[0].type.shape[3],
            LOAD_PIXEL=self.step.load_pixel(arguments),
            TURNS=ceil_div(pixels, PIXELS * each),
            PIXEL_WARPS=each,
            STRIDE_ROWS=self.step.op.strides[0],
            STRIDE_COLUMNS=self.step.op.strides[1],
            RESULT_ROWS=out_high,
            RESULT_COLUMNS=out_across,
            EPILOGUE=self.step.epilogue(arguments, self.wide, "acc[h / 2][j / 2][j % 2 * 2 + h % 2]"),
        )
        launch = arguments.launch("few_channels", lines, grid, self.warps * 32, resident=self.resident)
        return Kernel(self.step.name, (launch,))


def warp_products(step: FewChannels) -> Iterator[Kernel]:
    """Generate the kernels of a step, whose tiles differ in size."""
    source = _WarpProducts(step)
    if source.steps > MOST_STEPS or not step.stores(source.wide):
        return
    most = step.figures.static_bytes // (CHANNELS * step.conv.operands[0].type.dtype.itemsize)
    sized = (source.sized(*size) for size in SIZES)
    by_size = {(s.rows, s.columns): s for s in sized if s.tile[0] * s.pitch <= most}
    yield from (s.kernel() for s in sorted(by_size.values(), key=lambda s: s.cost)[:VARIANTS])
