"""Generate grouped convolutions of images, as in ResNeXt, by products of warpgroups (Hopper).

Tensor cores multiply 16 channels together. Smaller groups are bundled to 16 channels, and filters get zeros for the
channels of other groups. A result that is NaN is then computed again from its own group, which may have no infinity. An
image is in shared memory, octet by octet of channels. The operand of each tap is then the same image, shifted by a row
or by 16 bytes. A warpgroup computes 8 x 8 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, Launch, ceil_div, with_variants
from fusec.gpu.kernels.codegen.mma_tiles import can_follow
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, split_index, strides_from
from fusec.ir import Node, Value, channels_last
from fusec.ops import Conv
from fusec.schedule.program import inputs_of

OCTET, OCTET_BYTES = 8, 16  # channels of one row of a tile
DEPTH = 16  # channels of a product
MOST_CHANNELS = 64  # of a block
MOST_TAPS = 25  # because all are unrolled
TILES = ((2, 2), (1, 2), (2, 1), (1, 1))  # warpgroups of a block, down and across, of the variants
MOST_COVERED = 1.5  # times the pixels of the tiles that fit best, of a variant
_CUDA = cuda_template(__package__, "grouped_conv2d.cuh")


@dataclass(frozen=True, eq=False)
class _Source:
    """A convolution, its epilogue, and what is stored.

    down, across: warpgroups of a block.
    """

    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    down: int
    across: int

    @property
    def op(self) -> Conv:
        assert isinstance(self.conv.op, Conv)
        return self.conv.op

    @property
    def window(self) -> tuple[int, ...]:
        return self.conv.operands[1].type.shape[2:]

    @property
    def taps(self) -> int:
        return math.prod(self.window)

    @property
    def bundle(self) -> int:
        """Channels of a product, of one group or several."""
        return max(DEPTH, self.conv.operands[1].type.shape[1])

    @property
    def channels(self) -> int:
        """Channels of a block."""
        counts = range(MOST_CHANNELS // self.bundle * self.bundle, 0, -self.bundle)
        return next(n for n in counts if self.conv.result.type.shape[1] % n == 0)

    @property
    def own(self) -> int:
        """Neighbouring results of a thread."""
        return 8 if self.bundle % 32 == 0 else 4

    @property
    def pitch(self) -> int:
        """Pixels of a row of the image that a block reads."""
        return OCTET * self.across + self.window[1] - 1

    @property
    def places(self) -> int:
        return (OCTET * self.down + self.window[0] - 1) * self.pitch

    @property
    def plane(self) -> int:
        """Bytes from one octet of channels to the next. An odd number of places spreads octets over all banks."""
        return (self.places | 1) * OCTET_BYTES

    @property
    def filter_bytes(self) -> int:
        return self.taps * self.channels * self.bundle * 2

    @property
    def resident_bytes(self) -> int:
        return self.filter_bytes + self.channels // OCTET * self.plane

    @property
    def covered(self) -> tuple[int, int]:
        """Tiles of 8 x 8 pixels that all blocks compute for an image, and pixels that they read."""
        _, _, high, wide = self.conv.result.type.shape
        blocks = ceil_div(high, OCTET * self.down) * ceil_div(wide, OCTET * self.across)
        return blocks * self.down * self.across, blocks * self.places

    def launch(self) -> Launch:
        arguments, (x, w), y = Arguments(), self.conv.operands, self.conv.result
        filters = arguments.read(w, w.type.with_order(channels_last(4)))
        image, kind = arguments.read(x), C_TYPES[x.type.dtype]
        code = PointwiseCode(Space(y.type.shape, ("c0", "c1", "c2", "c3"), 1, self.own), arguments, rounds=False)
        code.define(y, f"acc[bundle][part * {self.own // 2}u + j / 2][h * 2u + j % 2]")
        code.compute(self.rest, self.outputs)
        epilogue = code.lines()
        n, all_channels, high, wide = y.type.shape
        blocks = [
            ("c0", n),
            ("down", ceil_div(high, OCTET * self.down)),
            ("right", ceil_div(wide, OCTET * self.across)),
            ("side", all_channels // self.channels),
        ]
        octets, bundles = self.bundle // OCTET, self.channels // self.bundle
        cuda = _CUDA.bind(
            TYPE=kind,
            TAPS=self.taps,
            BUNDLES=bundles,
            BUNDLE=self.bundle,
            OCTETS=octets,
            GROUP_CHANNELS=w.type.shape[1],
            HALF=self.own // 2,
            OWN=self.own,
            PART_FILTERS=4 * self.own,
            PITCH=self.pitch,
            PLANE=self.plane,
        )
        lines = cuda(
            "kernel",
            THREADS=128 * self.down * self.across,
            BLOCK_COORDINATES=split_index("block", blocks),
            FILTER_BYTES=self.filter_bytes,
            FILTER_COORDINATES=split_index(
                "i", [("tap", self.taps), ("bundle", bundles), ("octet", octets), ("n", self.bundle)]
            ),
            FILTERS=filters,
            PIECE=min(OCTET, w.type.shape[1]),
            BEGIN=arguments.begin(),
            PLACES=self.places,
            HIGH=OCTET * self.down,
            WIDE=OCTET * self.across,
            ACROSS=self.across,
            PAD_TOP=self.op.pads[0],
            PAD_LEFT=self.op.pads[1],
            ROWS=x.type.shape[2],
            COLUMNS=x.type.shape[3],
            STRIDE_N=x.type.strides[0],
            STRIDE_H=x.type.strides[2],
            STRIDE_W=x.type.strides[3],
            IMAGE_POINTER=image,
            CHANNELS=self.channels,
            OWN_OCTETS=octets,
            PRODUCTS=list(self._products()),
            OWN_GROUP=cuda("own_group", WINDOW_COLUMNS=self.window[1]) if w.type.shape[1] < self.bundle else [],
            RESULT_ROWS=high,
            RESULT_COLUMNS=wide,
            PARTS=self.bundle // (4 * self.own),
            EPILOGUE=epilogue,
        )
        functions = wgmma.product_of_tiles(kind, self.bundle, self.pitch * OCTET_BYTES)
        grid, threads = math.prod(size for _, size in blocks), 128 * self.down * self.across
        launch = arguments.launch("grouped_conv2d", lines, grid, threads, preamble=functions, resident=1)
        bound = {"resident_bytes": self.resident_bytes, "architecture": wgmma.ARCHITECTURE, "dependent": True}
        return replace(launch, **bound)

    def _products(self) -> Iterator[str]:
        """Generate the products of all taps, 16 channels at a time."""
        lead, octets = self.bundle * OCTET_BYTES, self.bundle // OCTET
        bundles = self.channels // self.bundle
        for tap in range(self.taps):
            shift = (tap // self.window[1] * self.pitch + tap % self.window[1]) * OCTET_BYTES
            for bundle in range(bundles):
                for octet in range(0, octets, DEPTH // OCTET):
                    image = f"own, {(bundle * octets + octet) * self.plane + shift}u, {self.plane}u"
                    filters = f"filters, {((tap * bundles + bundle) * octets + octet) * lead}u, {lead}u"
                    onto = int(tap > 0 or octet > 0)
                    yield f"ENTRY_{self.bundle}_of_tiles(acc[{bundle}], {image}, {filters}, {onto});"


def grouped_conv2d(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a grouped convolution of images and its epilogue; None for other steps."""
    conv, rest = nodes[0], nodes[1:]
    if not isinstance(conv.op, Conv) or not all(map(can_follow, rest)) or not figures.has(wgmma.ARCHITECTURE):
        return None
    y = conv.result
    if not _fits(conv) or any(v.type.shape != y.type.shape for v in (*outputs, *(node.result for node in rest))):
        return None
    sources = [_Source(conv, rest, outputs, *tile) for tile in TILES]
    fit = [s for s in sources if s.resident_bytes <= figures.dynamic_bytes and _moves_packs(s)]
    fit.sort(key=lambda source: source.covered)
    fit = [s for s in fit if s.covered[0] <= MOST_COVERED * fit[0].covered[0]]
    name = "+".join(node.op.name for node in nodes)
    return with_variants(Kernel(name, (source.launch(),)) for source in fit)


def _fits(conv: Node) -> bool:
    """Tell if a convolution has groups of channels that can be bundled for products."""
    op, (x, w), y = conv.op, conv.operands, conv.result
    assert isinstance(op, Conv)
    if x.type.rank != 4 or op.groups == 1 or {*op.strides, *op.dilations} != {1} or w.literal is None:
        return False
    if x.type.dtype not in HALVES or w.type.dtype is not x.type.dtype or not y.type.size:
        return False
    count, channels, *window = w.type.shape
    is_bundled = channels in (4, 8) and count % DEPTH == 0
    if count != x.type.shape[1] or not (is_bundled or channels % DEPTH == 0) or channels > MOST_CHANNELS:
        return False
    if not 1 < math.prod(window) <= MOST_TAPS or max(v.type.span for v in (x, w, y)) >= 1 << 31:
        return False
    return x.type.strides[1] == 1 and not any(x.type.strides[d] % OCTET for d in (0, 2, 3))


def _moves_packs(source: _Source) -> bool:
    """Tell if one load or store moves the neighbours of a result that a thread handles together."""
    values = (*inputs_of(source.rest), *source.outputs)
    types = [v.type for v in values if v.type.size != 1 and v is not source.conv.result]
    steps = (strides_from(type, 4, 1) for type in types)
    return all(first != 1 or all(s % source.own == 0 for s in others) for first, *others in steps)
