"""Lay a tile of an image and of its convolution's loss out in shared memory, as the gradient of the filters reads them.

Two neighbouring pixels of four channels are 16 bytes. Windows begin two pixels apart, so that products read overlapping
windows from one copy of the image. The loss has one row for each warpgroup of a block.
"""

from __future__ import annotations

from fusec.gpu.kernels.codegen.kernel import ceil_div
from fusec.gpu.kernels.convolution.few_channels.image_tile import OCTET, PAIR
from fusec.ir import Node, TensorType
from fusec.ops import ConvWgrad
from fusec.system.dataclass import dataclass

FILTERS = 64  # of a pixel of the loss, at most
GROUPS = 2  # warpgroups of a block
PITCH = FILTERS * 2 + 16  # bytes of a pixel of the loss; eight neighbours are in different banks


@dataclass(frozen=True)
class GradientTile:
    """A gradient of filters, and the tile that a block reads at a time.

    count: tiles that are in shared memory at the same time.
    """

    node: Node
    count: int

    @property
    def op(self) -> ConvWgrad:
        assert isinstance(self.node.op, ConvWgrad)
        return self.node.op

    @property
    def image(self) -> TensorType:
        return self.node.operands[0].type

    @property
    def loss(self) -> TensorType:
        return self.node.operands[1].type

    @property
    def no_taps(self) -> int:
        """Taps before the first one: with them, windows begin at an even pixel."""
        return self.op.pads[1] % 2

    @property
    def pairs(self) -> int:
        """Pairs of taps of a row of the window."""
        return ceil_div(self.op.window[1] + self.no_taps, 2)

    @property
    def depths(self) -> int:
        """Products of a row, each over 16 pixels."""
        return ceil_div(self.loss.shape[3], 2 * OCTET)

    @property
    def is_odd(self) -> bool:
        """Tell if the last product of a row has pixels for half its depth."""
        return self.loss.shape[3] // OCTET % 2 == 1

    @property
    def used(self) -> int:
        """Pairs of pixels that a row of windows reads."""
        return self.loss.shape[3] + self.pairs - 1

    @property
    def places(self) -> int:
        """Pairs of pixels in a row of shared memory; with zeros for half the depth of a product."""
        return self.used + (OCTET + self.pairs - 1) * self.is_odd

    @property
    def high(self) -> int:
        """Rows of the image in a tile."""
        return (GROUPS - 1) * self.op.strides[0] + (self.op.window[0] - 1) * self.op.dilations[0] + 1

    @property
    def image_bytes(self) -> int:
        return self.high * self.places * PAIR

    @property
    def loss_bytes(self) -> int:
        """Bytes of a row of the loss."""
        return self.depths * 2 * OCTET * PITCH

    @property
    def nbytes(self) -> int:
        return self.image_bytes + GROUPS * self.loss_bytes

    @property
    def resident_bytes(self) -> int:
        """Shared memory of a block: its tiles, later the sums of a warpgroup."""
        return max(self.count * self.nbytes, 4 * 128 * self.sums)

    @property
    def sums(self) -> int:
        """Sums of a thread."""
        return self.pairs * self.op.window[0] * 4

    @property
    def down(self) -> int:
        """Tiles of an image."""
        return ceil_div(self.loss.shape[2], GROUPS)
