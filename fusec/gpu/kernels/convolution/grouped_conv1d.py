"""Generate grouped convolutions along one dim with many taps, by products of warpgroups (Hopper).

An example is the positional convolution of wav2vec 2.0: 128 taps, and 48 channels in each of 16 groups. cuDNN's engines
for groups leave most of a GPU idle there. Here a block computes neighbouring positions of one group. Their image is in
shared memory, octet by octet of channels. The operand of each tap is then the same image, shifted by 16 bytes. Filters
are stored in the order of use, and pass through a ring in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import (
    C_TYPES,
    HALVES,
    Arguments,
    Kernel,
    Launch,
    ceil_div,
    with_variants,
)
from fusec.gpu.kernels.codegen.mma_tiles import can_follow
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, moves_packs, split_index
from fusec.ir import Node, TensorType, Value
from fusec.ops import Conv
from fusec.system.dataclass import dataclass

OCTET, OCTET_BYTES = 8, 16  # channels of one row of a tile
DEPTH = 16  # channels of a product
MOST_FILTERS = 128  # of a group, because a thread sums half as many
MIN_TAPS = 8  # a bound of what is tried; tuning times the kernel
GROUPS = (4, 3, 2)  # warpgroups of a block, of the variants
POSITIONS = 64  # of a warpgroup
AHEAD = 3  # stages of filters that are copied ahead
SLOTS = AHEAD + 2  # products of the stage before may still read theirs
STAGE_BYTES = 20 << 10  # of filters, at most
_CUDA = cuda_template(__package__, "grouped_conv1d.cuh")


@dataclass(frozen=True, eq=False)
class _Source:
    """A convolution, its epilogue, and what is stored.

    groups: warpgroups of a block.
    """

    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    groups: int

    @property
    def op(self) -> Conv:
        assert isinstance(self.conv.op, Conv)
        return self.conv.op

    @property
    def filters(self) -> int:
        """Filters of a group."""
        return self.conv.operands[1].type.shape[0] // self.op.groups

    @property
    def octets(self) -> int:
        return self.conv.operands[1].type.shape[1] // OCTET

    @property
    def taps(self) -> int:
        return self.conv.operands[1].type.shape[2]

    @property
    def own(self) -> int:
        """Neighbouring results of a thread."""
        return next(own for own in (8, 4, 2) if self.filters % (4 * own) == 0)

    @property
    def positions(self) -> int:
        """Positions of a block."""
        return self.groups * POSITIONS

    @property
    def rows(self) -> int:
        """Positions of the image that a block reads."""
        return self.positions + (self.taps - 1) * self.op.dilations[0]

    @property
    def plane(self) -> int:
        """Bytes of an octet of channels of the image."""
        return self.rows * OCTET_BYTES

    @property
    def tap_bytes(self) -> int:
        return self.octets * self.filters * OCTET_BYTES

    @property
    def stage_taps(self) -> int:
        """Taps that are copied together."""
        most = max(1, STAGE_BYTES // self.tap_bytes)
        return max(n for n in range(1, most + 1) if self.taps % n == 0)

    @property
    def resident_bytes(self) -> int:
        return self.octets * self.plane + SLOTS * self.stage_taps * self.tap_bytes

    def launch(self) -> Launch:
        arguments, (x, w), y = Arguments(), self.conv.operands, self.conv.result
        stored = _in_order_of_use(w.type, self.op.groups, self.own)
        image, filters = arguments.read(x), arguments.read(w, stored)
        tiles, threads = ceil_div(y.type.shape[2], self.positions), 128 * self.groups
        code = PointwiseCode(Space(y.type.shape, ("c0", "c1", "c2"), 1, self.own), arguments, rounds=False)
        code.define(y, f"acc[part * {self.own // 2}u + j / 2][h * 2u + j % 2]")
        code.compute(self.rest, self.outputs)
        epilogue = code.lines()
        cuda = _CUDA.bind(
            TYPE=C_TYPES[x.type.dtype],
            THREADS=threads,
            AHEAD=AHEAD,
            SLOTS=SLOTS,
            STAGES=self.taps // self.stage_taps,
            STAGE_TAPS=self.stage_taps,
            STAGE_BYTES=self.stage_taps * self.tap_bytes,
        )
        blocks = [("c0", x.type.shape[0]), ("tile", tiles), ("group", self.op.groups)]
        lines = cuda(
            "kernel",
            BLOCK_COORDINATES=split_index("block", blocks),
            IMAGE_BYTES=self.octets * self.plane,
            FILTERS=filters,
            TAPS=self.taps,
            TAP_NUMBERS=self.tap_bytes // x.type.dtype.itemsize,
            BEGIN=arguments.begin(),
            ROWS=self.rows,
            OCTETS=self.octets,
            POSITIONS=self.positions,
            PAD=self.op.pads[0],
            LENGTH=x.type.shape[2],
            IMAGE_POINTER=image,
            STRIDE_N=x.type.strides[0],
            STRIDE_L=x.type.strides[2],
            PLANE=self.plane,
            COPY_STAGE=cuda("copy_stage"),
            COLUMN_OCTETS=self.filters // OCTET,
            SHIFT=self.op.dilations[0] * OCTET_BYTES,
            PRODUCTS=list(self._products()),
            RESULTS=y.type.shape[2],
            PARTS=self.filters // (4 * self.own),
            PART_FILTERS=4 * self.own,
            GROUP_FILTERS=self.filters,
            OWN=self.own,
            EPILOGUE=epilogue,
        )
        functions = wgmma.product_of_tiles(C_TYPES[x.type.dtype], self.filters)
        grid = x.type.shape[0] * tiles * self.op.groups
        launch = arguments.launch("grouped_conv1d", lines, grid, threads, preamble=functions, resident=1)
        bound = {"resident_bytes": self.resident_bytes, "architecture": wgmma.ARCHITECTURE, "dependent": True}
        return replace(launch, **bound)

    def _products(self) -> Iterator[str]:
        """Generate the products of a stage, 16 channels of a tap at a time."""
        lead = self.filters * OCTET_BYTES
        for tap in range(self.stage_taps):
            for octet in range(0, self.octets, DEPTH // OCTET):
                image = f"rows, {octet * self.plane + tap * self.op.dilations[0] * OCTET_BYTES}u, {self.plane}u"
                filters = f"taps, {tap * self.tap_bytes + octet * lead}u, {lead}u"
                onto = "(int)(now > 0u)" if tap == octet == 0 else "1"
                yield f"ENTRY_{self.filters}_of_tiles(acc, {image}, {filters}, {onto});"


def grouped_conv1d(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a grouped convolution along one dim and its epilogue; None for other steps."""
    conv, rest = nodes[0], nodes[1:]
    if not isinstance(conv.op, Conv) or not all(map(can_follow, rest)) or not figures.has(wgmma.ARCHITECTURE):
        return None
    y = conv.result
    if not _fits(conv) or any(v.type.shape != y.type.shape for v in (*outputs, *(node.result for node in rest))):
        return None
    sources = [_Source(conv, rest, outputs, groups) for groups in GROUPS]
    fit = [s for s in sources if s.resident_bytes <= figures.dynamic_bytes and moves_packs(y, rest, outputs, s.own)]
    fit.sort(key=lambda source: ceil_div(y.type.shape[2], source.positions) * source.positions)
    name = "+".join(node.op.name for node in nodes)
    return with_variants(Kernel(name, (source.launch(),)) for source in fit)


def _fits(conv: Node) -> bool:
    """Tell if a convolution has groups of channels that products take, and many taps."""
    op, (x, w), y = conv.op, conv.operands, conv.result
    assert isinstance(op, Conv)
    if x.type.rank != 3 or op.groups == 1 or op.strides != (1,) or w.literal is None:
        return False
    if x.type.dtype not in HALVES or w.type.dtype is not x.type.dtype or not y.type.size:
        return False
    filters, (_, channels, taps) = w.type.shape[0] // op.groups, w.type.shape
    if channels % DEPTH or filters % OCTET or filters > MOST_FILTERS or taps < MIN_TAPS:
        return False
    far = max(v.type.span for v in (x, w, y)) >= 1 << 31
    return not far and x.type.strides[1] == 1 and not any(x.type.strides[d] % OCTET for d in (0, 2))


def _in_order_of_use(w: TensorType, groups: int, own: int) -> TensorType:
    """Return the filters as products read them, such that a thread gets `own` neighbouring results.

    The order is: group, tap, octet of channels, filter, channel.
    """
    filters, channels, taps = w.shape
    shape = (groups, filters // groups // (4 * own), 4, own // 2, 2, channels // OCTET, OCTET, taps)
    return TensorType(shape, w.dtype, (0, 7, 5, 1, 3, 2, 4, 6))
