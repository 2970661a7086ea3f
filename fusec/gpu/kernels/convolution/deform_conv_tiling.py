"""Split a deformable convolution into tiles, and lay out its shared memory.

A block computes some filters of a group for some neighbouring results. It reads the image once for all its filters, so
that many filters are good, and few where that fills the GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from fusec.gpu.kernels.codegen import mma_tiles
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import HALVES, VECTOR_BYTES, ceil_div, computed_in
from fusec.ir import DType, Node, TensorType
from fusec.ops import DeformConv
from fusec.system.dataclass import dataclass

PIXELS = (64, 32)  # of a block
DEPTH_BYTES = 64  # of the elements of a window that are read together
THREADS = 4  # of a block for each of its pixels; each reads 16 bytes at a time
SUM_BYTES = 256  # of a thread, because all are in registers
OWN = 4  # pixels, and filters, of a thread without tensor cores
LANE_FILTERS = OWN * THREADS * OWN  # that the threads of a pixel have then, a few each
DOWN = (1, 2, 4, 8)  # warps of a block along the filters
MOST_ROWS = 4  # products of a warp, or parts of a thread, along the filters
READ = {True: 256, False: 16}  # filters whose products take as long as reading, with tensor cores or without: estimated
VARIANTS = 3


@dataclass(frozen=True)
class DeformTiling:
    """The tiles of a deformable convolution.

    pixels: results of a filter that a block computes. rows: products of a warp along the filters, or parts of a thread.
    down: warps of a block along the filters, which have as many products along the pixels; 0 without tensor cores.
    """

    conv: Node
    pixels: int
    rows: int
    down: int

    @property
    def op(self) -> DeformConv:
        assert isinstance(self.conv.op, DeformConv)
        return self.conv.op

    @property
    def x(self) -> TensorType:
        return self.conv.operands[0].type

    @property
    def y(self) -> TensorType:
        return self.conv.result.type

    @property
    def group_channels(self) -> int:
        return self.conv.operands[1].type.shape[1]

    @property
    def group_filters(self) -> int:
        return self.y.shape[1] // self.op.groups

    @property
    def offset_channels(self) -> int:
        return self.x.shape[1] // self.op.offset_groups

    @property
    def taps(self) -> int:
        return math.prod(self.conv.operands[1].type.shape[2:])

    @property
    def pack(self) -> int:
        """Elements of 16 bytes."""
        return VECTOR_BYTES // self.x.dtype.itemsize

    @property
    def run(self) -> int:
        """Neighbouring channels that a thread reads at the same place."""
        return math.gcd(self.pack, self.group_channels, self.offset_channels)

    @property
    def depth(self) -> int:
        """Elements of a window that are read together."""
        return DEPTH_BYTES // self.x.dtype.itemsize

    @property
    def chunks(self) -> int:
        return ceil_div(self.group_channels * self.taps, self.depth)

    @property
    def turn_filters(self) -> int:
        """Filters whose sums are in shared memory together."""
        return self.down * mma_tiles.PIXELS or LANE_FILTERS

    @property
    def filters(self) -> int:
        """Filters of a block."""
        return self.rows * self.turn_filters

    @property
    def threads(self) -> int:
        return self.pixels * THREADS

    @property
    def all_pixels(self) -> int:
        return self.y.size // self.y.shape[1]

    @property
    def sides(self) -> int:
        """Blocks that compute the same pixels: all groups, and parts of their filters."""
        return self.op.groups * ceil_div(self.group_filters, self.filters)

    @property
    def grid(self) -> int:
        return ceil_div(self.all_pixels, self.pixels) * self.sides

    @property
    def read_pitch(self) -> int:
        """Numbers from one pixel to the next with tensor cores, else from one element of a window to the next."""
        return (self.depth if self.down else self.pixels) + self.pack

    @property
    def filter_pitch(self) -> int:
        return self.filters + self.pack

    @property
    def read_size(self) -> int:
        return self.read_pitch * (self.pixels if self.down else self.depth)

    @property
    def stage_size(self) -> int:
        """Numbers that are read together: of the image, and filters."""
        return self.read_size + self.filter_pitch * self.depth

    @property
    def sums_pitch(self) -> int:
        """Sums from one filter to the next. An odd number spreads filters over banks."""
        return self.pixels + (1 if self.by_filter else self.pack)

    @property
    def by_filter(self) -> bool:
        """True if neighbouring threads finish neighbouring filters, which are contiguous."""
        return self.y.strides[1] == 1

    @property
    def nbytes(self) -> int:
        """Shared memory of a block: two stages, and later sums."""
        sums = self.turn_filters * self.sums_pitch * computed_in(self.x.dtype).itemsize
        return max(2 * self.stage_size * self.x.dtype.itemsize, sums)

    def cost(self, figures: GpuFigures) -> float:
        """Estimate the time of the multiprocessor that has most blocks."""
        return ceil_div(self.grid, figures.processors) * self.pixels * (READ[self.down > 0] + self.filters)


def tilings(conv: Node, figures: GpuFigures) -> list[DeformTiling]:
    """Return some tilings, the one with the least estimated cost first.

    Of those with the same blocks, only the one with the fewest filters, and loads of a warp, is considered.
    """
    found: dict[tuple[int, int], DeformTiling] = {}
    for tiling in sorted(_possible(conv), key=lambda each: (each.filters, each.rows + each.down)):
        if tiling.nbytes <= figures.dynamic_bytes:
            found.setdefault((tiling.pixels, tiling.sides), tiling)
    return sorted(found.values(), key=lambda each: (each.cost(figures), -each.filters))[:VARIANTS]


def _possible(conv: Node) -> Iterator[DeformTiling]:
    """Yield tilings whose sums fit into registers."""
    dtype = conv.operands[0].type.dtype
    for pixels in PIXELS:
        downs = [d for d in DOWN if d <= pixels * THREADS // 32] if dtype in HALVES else [0]
        for down, rows in itertools.product(downs, range(1, MOST_ROWS + 1)):
            tiling = DeformTiling(conv, pixels, rows, down)
            if tiling.filters * pixels // tiling.threads * computed_in(dtype).itemsize <= SUM_BYTES:
                yield tiling


def takes(dtype: DType) -> bool:
    """Tell if the kernel computes a type."""
    return dtype in (DType.F64, DType.F32, *HALVES)
