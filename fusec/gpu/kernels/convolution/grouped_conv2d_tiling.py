"""Split a grouped convolution of images into tiles, and lay out its shared memory.

There are as many blocks as run at the same time. Each loads the filters of up to 64 channels once, and visits tiles of
8 x 8 results. While it multiplies a tile, the image of its next tile is copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import ceil_div
from fusec.ir import Node
from fusec.ops import Conv

OCTET, OCTET_BYTES = 8, 16  # channels of one row of a tile
DEPTH = 16  # channels of a product
SIDE = 8  # rows and columns of a tile of results, which one warpgroup computes
MOST_CHANNELS = 64  # of a block
MOST_WARPGROUPS = 6  # of a multiprocessor, because of the registers of their threads
RESERVED_BYTES = 1024  # of shared memory, for each block


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
    def run(self) -> int:
        """Pixels of a row of a tile's image that are a stride apart, and contiguous in shared memory."""
        return SIDE + (self.window[1] - 1) // self.op.strides[1]

    @property
    def pitch(self) -> int:
        """Pixels from one row of a tile's image to the next."""
        return self.op.strides[1] * self.run

    @property
    def places(self) -> int:
        """Pixels of a tile's image."""
        return ((SIDE - 1) * self.op.strides[0] + self.window[0]) * self.pitch

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
    def buffers(self) -> int:
        """Images of each warpgroup in shared memory: one where no block has two steps."""
        return 1 if self.steps <= self._room(1) else 2

    @property
    def blocks(self) -> int:
        """Blocks that have the same channels. All have about the same number of steps."""
        return ceil_div(self.steps, ceil_div(self.steps, self._room(self.buffers)))

    @property
    def resident_bytes(self) -> int:
        return self._bytes(self.buffers)

    @property
    def resident_blocks(self) -> int:
        """Blocks of a multiprocessor at the same time."""
        return self._resident_blocks(self.buffers)

    def _bytes(self, buffers: int) -> int:
        return self.filter_bytes + buffers * self.warpgroups * self.image_bytes

    def _resident_blocks(self, buffers: int) -> int:
        room = (self.figures.shared_bytes + RESERVED_BYTES) // (self._bytes(buffers) + RESERVED_BYTES)
        return max(1, min(room, MOST_WARPGROUPS // self.warpgroups))

    def _room(self, buffers: int) -> int:
        """Return how many blocks that have the same channels run at the same time."""
        return max(1, self.figures.processors * self._resident_blocks(buffers) // self.sides)
