"""Split a grouped convolution of images into tiles, and lay out its shared memory.

A multiprocessor has one block, which loads the filters of up to 64 channels once and visits tiles of 8 x 8 results.
While it multiplies a tile, the image of its next tile is copied.
"""

from __future__ import annotations

import math

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import ceil_div
from fusec.ir import Node
from fusec.ops import Conv
from fusec.system.dataclass import dataclass

OCTET, OCTET_BYTES = 8, 16  # channels of one row of a tile
DEPTH = 16  # channels of a product
SIDE = 8  # rows and columns of a tile of results, which one warpgroup computes
MOST_CHANNELS = 64  # of a block
WARPGROUPS = (1, 2, 4)  # of a block


@dataclass(frozen=True)
class GroupedTiling:
    """The tiles of a grouped convolution.

    warpgroups: warpgroups of a block. Each computes other tiles, and they share filters.
    """

    conv: Node
    figures: GpuFigures
    warpgroups: int

    @property
    def op(self) -> Conv:
        assert isinstance(self.conv.op, Conv)
        return self.conv.op

    @property
    def all_channels(self) -> int:
        return self.conv.result.type.shape[1]

    @property
    def group_channels(self) -> int:
        return self.conv.operands[1].type.shape[1]

    @property
    def window(self) -> tuple[int, ...]:
        return self.conv.operands[1].type.shape[2:]

    @property
    def taps(self) -> int:
        return math.prod(self.window)

    @property
    def bundle(self) -> int:
        """Channels of a product, of one group or several."""
        return math.lcm(DEPTH, self.group_channels)

    @property
    def channels(self) -> int:
        """Channels of a block. The last block of a pixel may have fewer."""
        counts = range(MOST_CHANNELS // self.bundle * self.bundle, 0, -self.bundle)
        return min(counts, key=lambda n: ceil_div(self.all_channels, n) * (n + DEPTH))

    @property
    def sides(self) -> int:
        """Blocks that share pixels."""
        return ceil_div(self.all_channels, self.channels)

    @property
    def own(self) -> int:
        """Neighbouring results of a thread."""
        return 8 if self.bundle % 32 == 0 else 4

    @property
    def pitch(self) -> int:
        """Pixels of a row of a tile's image."""
        return SIDE + self.window[1] - 1

    @property
    def places(self) -> int:
        """Pixels of a tile's image."""
        return (SIDE + self.window[0] - 1) * self.pitch

    @property
    def plane(self) -> int:
        """Bytes from one octet of channels to the next. An odd number of places spreads octets over all banks."""
        return (self.places | 1) * OCTET_BYTES

    @property
    def image_bytes(self) -> int:
        """Bytes of a tile's image."""
        return self.channels // OCTET * self.plane

    @property
    def lead(self) -> int:
        """Bytes from one octet of channels of filters to the next. Half a row of banks spreads two octets over all."""
        return self.bundle * OCTET_BYTES + 64

    @property
    def filter_bytes(self) -> int:
        return self.taps * self.channels // OCTET * self.lead

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of an image, down and across."""
        _, _, high, wide = self.conv.result.type.shape
        return ceil_div(high, SIDE), ceil_div(wide, SIDE)

    @property
    def tiles(self) -> int:
        return self.conv.result.type.shape[0] * math.prod(self.grid)

    @property
    def steps(self) -> int:
        """Steps of all blocks that have the same channels. In a step, each warpgroup computes a tile."""
        return ceil_div(self.tiles, self.warpgroups)

    @property
    def room(self) -> int:
        """Blocks that have the same channels and run at the same time."""
        return max(1, self.figures.processors // self.sides)

    @property
    def buffers(self) -> int:
        """Images of each warpgroup in shared memory: one where no block has two steps."""
        return 1 if self.steps <= self.room else 2

    @property
    def blocks(self) -> int:
        """Blocks that have the same channels. All have about the same number of steps."""
        return ceil_div(self.steps, ceil_div(self.steps, self.room))

    @property
    def resident_bytes(self) -> int:
        return self.filter_bytes + self.buffers * self.warpgroups * self.image_bytes


def tiling_of(conv: Node, figures: GpuFigures) -> GroupedTiling | None:
    """Return the tiling with the fewest warpgroups whose blocks have one step each; else, with the most.

    It is None if filters do not fit in shared memory. More warpgroups share what one multiprocessor loads of filters.
    """
    tilings = [GroupedTiling(conv, figures, warpgroups) for warpgroups in WARPGROUPS]
    fit = [t for t in tilings if t.resident_bytes <= figures.dynamic_bytes]
    return next((t for t in fit if t.buffers == 1), fit[-1]) if fit else None
