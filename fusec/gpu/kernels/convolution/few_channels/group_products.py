"""Generate convolution of an image of up to four channels by products of warpgroups, which Hopper has.

Pixels are the first operand of a product, and filters the second one. Both are in shared memory. A thread then has
neighbouring results of a pixel, which it stores without exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.cuda_template import c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import REGISTERS
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Kernel, by_value, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import split_index
from fusec.gpu.kernels.convolution.few_channels.few_channels_step import FewChannels
from fusec.gpu.kernels.convolution.few_channels.image_tile import (
    OCTET,
    PAIR,
    RESERVED,
    THREADS,
    ImageTile,
    TilePlace,
    can_share_windows,
)
from fusec.system.dataclass import dataclass

SUMS = 64  # of a thread, at most
TURNS = 4  # pairs of pixels that a thread loads before it stores them, at most
WORKING = 48  # registers of a thread, without its sums
_CUDA = cuda_template(__package__, "group_products.cuh")


@dataclass(frozen=True)
class _GroupProducts:
    """The tile of results of a block, whose columns are computed side by side."""

    tile: ImageTile

    @property
    def step(self) -> FewChannels:
        return self.tile.step

    @property
    def own(self) -> int:
        """Neighbouring results of a thread."""
        return 8 if self.step.filters % 32 == 0 else 4

    @property
    def filter_bytes(self) -> int:
        return self.tile.count * self.step.filters * PAIR

    @property
    def shared_bytes(self) -> int:
        return self.filter_bytes + 2 * self.tile.nbytes

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor, because of registers and shared memory."""
        sums = self.tile.columns * self.step.filters // 2
        by_memory = (self.step.figures.shared_bytes + RESERVED) // (self.shared_bytes + RESERVED)
        return max(1, min(REGISTERS // (THREADS * (WORKING + sums)), by_memory))

    def kernel(self) -> Kernel:
        """Return the kernel."""
        tile, step, arguments = self.tile, self.step, Arguments()
        count, _, high, across = step.conv.result.type.shape
        down, right = ceil_div(high, OCTET), ceil_div(across, OCTET * tile.columns)
        grid = min(count * down * right, step.figures.processors * self.resident)
        dims = [("c0", count), ("down", down), ("right", right)]
        cuda = _CUDA.bind(
            TYPE=C_TYPES[step.conv.operands[0].type.dtype],
            THREADS=THREADS,
            OCTETS=tile.columns,
            OWN=self.own,
            PART_FILTERS=4 * self.own,
        )
        place = TilePlace(split_index("block", dims), f"(int)down * {OCTET}", f"(int)right * {OCTET * tile.columns}")
        *first, (request, deliver) = (tile.load(arguments, place, section) for section in tile.sections(TURNS))
        filters = cuda.bind(
            PAIRS=tile.count,
            ROW_PAIRS=tile.pairs,
            COUNT=step.filters,
            FIRST_FILTER="0u",
            ROW_AT=step.row_at(f"pair / {tile.pairs}u"),
            HALF=self.own // 2,
            WINDOW_COLUMNS=step.window[1],
            NO_TAPS=f"{tile.no_taps}u",
        )
        load_filters = step.load_filters(filters, arguments)
        store_results = cuda(
            "store_results",
            OWN_COORDINATES=split_index("now", dims),
            ROWS_FIT=c_bool(high % OCTET == 0),
            COLUMNS_FIT=c_bool(across % (OCTET * tile.columns) == 0),
            RESULT_ROWS=high,
            RESULT_COLUMNS=across,
            PARTS=step.filters // (4 * self.own),
            EPILOGUE=step.epilogue(arguments, self.own, f"acc[o][part * {self.own // 2}u + j / 2][h * 2u + j % 2]"),
        )
        lines = cuda(
            "kernel",
            TILES=by_value(count * down * right),
            BLOCKS=by_value(grid),
            FILTER_BYTES=self.filter_bytes,
            IMAGE_BYTES=tile.nbytes,
            FILTER_OCTETS=step.filters // OCTET,
            LOADED=tile.loaded(TURNS),
            LOAD_FIRST=[line for each in first for part in each for line in part],
            REQUEST=request,
            DELIVER=deliver,
            LOAD_FILTERS=load_filters,
            PRODUCTS=list(self._products()),
            STORE_RESULTS=store_results,
        )
        functions = wgmma.product_of_tiles(C_TYPES[step.conv.operands[0].type.dtype], step.filters, tile.stride)
        launch = arguments.launch("few_channels", lines, grid, THREADS, preamble=functions, resident=self.resident)
        launch = replace(launch, resident_bytes=self.shared_bytes, architecture=wgmma.ARCHITECTURE)
        return Kernel(step.name, (launch,))

    def _products(self) -> Iterator[str]:
        """Generate the products of a tile, two pairs of taps at a time."""
        lead, count = self.step.filters * PAIR, self.step.filters
        for pair in range(0, self.tile.count, 2):
            first, second = self.tile.place(pair), self.tile.place(pair + 1)
            for octet in range(self.tile.columns):
                image = f"own + {first + octet * OCTET * PAIR}, 0u, {second - first}u"
                filters = f"filters + {pair * lead}, 0u, {lead}u"
                yield f"ENTRY_{count}_of_tiles(acc[{octet}], {image}, {filters}, {int(pair > 0)});"


def group_products(step: FewChannels) -> Kernel | None:
    """Return the kernel of a step; None for windows that products cannot share, and for another GPU."""
    if not step.figures.has(wgmma.ARCHITECTURE) or not can_share_windows(step):
        return None
    across = ceil_div(step.conv.result.type.shape[3], OCTET)
    most = max(1, SUMS // (step.filters // 2))
    tile = ImageTile(step, min(range(most, 0, -1), key=lambda n: ceil_div(across, n) * n))
    source = _GroupProducts(tile)
    if not step.stores(source.own) or source.shared_bytes > step.figures.dynamic_bytes:
        return None
    return source.kernel()
