"""Generate grouped convolutions of images, as in ResNeXt, by products of warpgroups (Hopper).

Tensor cores multiply 16 channels together. Smaller groups are bundled to 16 channels, and filters get zeros for the
channels of other groups. A result that is NaN is then computed again from its own group, which may have no infinity. An
image is in shared memory, octet by octet of channels. The operand of each tap is then the same image, shifted by a row
or by 16 bytes. A warpgroup computes 8 x 8 pixels, and then those of its next tile, whose image is copied meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.cuda_template import Filling, c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, Launch, by_value
from fusec.gpu.kernels.codegen.mma_tiles import can_follow
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, moves_packs, split_index
from fusec.gpu.kernels.convolution.grouped_conv2d_tiling import (
    DEPTH,
    MOST_CHANNELS,
    OCTET,
    OCTET_BYTES,
    GroupedTiling,
    tiling_of,
)
from fusec.ir import Node, Value
from fusec.ops import Conv
from fusec.system.dataclass import dataclass

MOST_TAPS = 25  # because all are unrolled
BUNDLED = (4, 8, 24)  # channels of a group, of which several are multiplied together
TAPS_FIRST = (2, 3, 0, 1)  # the memory order of filters, whose loads are then contiguous
_CUDA = cuda_template(__package__, "grouped_conv2d.cuh")


@dataclass(frozen=True, eq=False)
class _Source:
    """A convolution, its epilogue, and what is stored."""

    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    tiling: GroupedTiling

    def launch(self) -> Launch:
        t, arguments, (x, w), y = self.tiling, Arguments(), self.conv.operands, self.conv.result
        filters, kind = arguments.read(w, w.type.with_order(TAPS_FIRST)), C_TYPES[x.type.dtype]
        copy = _CUDA.bind(**self._numbers())("copy_image", IMAGE_POINTER=arguments.read(x))
        epilogue = self._epilogue(arguments)
        cuda = _CUDA.bind(**self._numbers(), COPY_IMAGE=copy)
        is_bundled, bundles, octets = t.group_channels < t.bundle, t.channels // t.bundle, t.bundle // OCTET
        order = [("tap", t.taps), ("bundle", bundles), ("high", octets // 2), ("pair", t.bundle // 2)]
        lines = cuda(
            "kernel",
            FILTER_COORDINATES=split_index("i", [*order, ("low", 2), ("odd", 2)]),
            COPY_FILTER=cuda("copy_half_filter" if t.group_channels < OCTET else "copy_filter", FILTERS=filters),
            FILTERS=filters,
            BEGIN=arguments.begin(),
            COPY_NEXT=cuda("copy_next") if t.buffers > 1 else [],
            PRODUCTS=list(self._products()),
            OWN_GROUP=cuda("own_group") if is_bundled else [],
            RESULT_ROWS=y.type.shape[2],
            RESULT_COLUMNS=y.type.shape[3],
            PARTS=t.bundle // (4 * t.own),
            EPILOGUE=epilogue,
        )
        functions = wgmma.product_of_tiles(kind, t.bundle, t.pitch * OCTET_BYTES)
        grid, threads = t.sides * t.blocks, 128 * t.warpgroups
        launch = arguments.launch("grouped_conv2d", lines, grid, threads, preamble=functions, resident=1)
        bound = {"resident_bytes": t.resident_bytes, "architecture": wgmma.ARCHITECTURE, "dependent": True}
        return replace(launch, **bound)

    def _numbers(self) -> dict[str, Filling]:
        """Return the numbers of several fragments."""
        t, (x, _) = self.tiling, self.conv.operands
        down, across = t.grid
        return {
            "TYPE": C_TYPES[x.type.dtype],
            "THREADS": 128 * t.warpgroups,
            "WARPGROUPS": t.warpgroups,
            "SIDES": t.sides,
            "TILES": by_value(t.tiles),
            "STEPS": by_value(t.steps),
            "BLOCKS": by_value(t.blocks),
            "TILE_COORDINATES": split_index("tile", [("c0", x.type.shape[0]), ("down", down), ("right", across)]),
            "TAPS": t.taps,
            "WINDOW_COLUMNS": t.window[1],
            "BUNDLES": t.channels // t.bundle,
            "BUNDLE": t.bundle,
            "OCTETS": t.bundle // OCTET,
            "CHANNELS": t.channels,
            "ALL_CHANNELS": t.all_channels,
            "ALL_FULL": c_bool(t.all_channels % t.channels == 0),
            "GROUP_CHANNELS": t.group_channels,
            "HALF": t.own // 2,
            "OWN": t.own,
            "PART_FILTERS": 4 * t.own,
            "FILTER_BYTES": t.filter_bytes,
            "OWN_SUMS": t.channels // 2,
            "LEAD": t.lead,
            "IMAGE_BYTES": t.image_bytes,
            "PLACES": t.places,
            "PITCH": t.pitch,
            "PLANE": t.plane,
            "PAD_TOP": t.op.pads[0],
            "PAD_LEFT": t.op.pads[1],
            "ROWS": x.type.shape[2],
            "COLUMNS": x.type.shape[3],
            "STRIDE_N": x.type.strides[0],
            "STRIDE_H": x.type.strides[2],
            "STRIDE_W": x.type.strides[3],
        }

    def _epilogue(self, arguments: Arguments) -> list[str]:
        y, own = self.conv.result, self.tiling.own
        code = PointwiseCode(Space(y.type.shape, ("c0", "c1", "c2", "c3"), 1, own), arguments, rounds=False)
        code.define(y, f"acc[bundle][part * {own // 2}u + j / 2][h * 2u + j % 2]")
        code.compute(self.rest, self.outputs)
        return code.lines()

    def _products(self) -> Iterator[str]:
        """Generate the products of all taps, 16 channels at a time."""
        t = self.tiling
        octets, bundles = t.bundle // OCTET, t.channels // t.bundle
        for tap in range(t.taps):
            shift = (tap // t.window[1] * t.pitch + tap % t.window[1]) * OCTET_BYTES
            for bundle in range(bundles):
                for octet in range(0, octets, DEPTH // OCTET):
                    image = f"own, {(bundle * octets + octet) * t.plane + shift}u, {t.plane}u"
                    filters = f"filters, {((tap * bundles + bundle) * octets + octet) * t.lead}u, {t.lead}u"
                    onto = int(tap > 0 or octet > 0)
                    yield f"ENTRY_{t.bundle}_of_tiles(acc[{bundle}], {image}, {filters}, {onto});"


def grouped_conv2d(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a grouped convolution of images and its epilogue; None for other steps."""
    conv, rest = nodes[0], nodes[1:]
    if not isinstance(conv.op, Conv) or not all(map(can_follow, rest)) or not figures.has(wgmma.ARCHITECTURE):
        return None
    y = conv.result
    if not _fits(conv) or any(v.type.shape != y.type.shape for v in (*outputs, *(node.result for node in rest))):
        return None
    tiling = tiling_of(conv, figures)
    if tiling is None or not moves_packs(y, rest, outputs, tiling.own):
        return None
    launch = _Source(conv, rest, outputs, tiling).launch()
    return Kernel("+".join(node.op.name for node in nodes), (launch,))


def _fits(conv: Node) -> bool:
    """Tell if a convolution has groups of channels that can be bundled for products."""
    op, (x, w), y = conv.op, conv.operands, conv.result
    assert isinstance(op, Conv)
    if x.type.rank != 4 or op.groups == 1 or {*op.strides, *op.dilations} != {1} or w.literal is None:
        return False
    if x.type.dtype not in HALVES or w.type.dtype is not x.type.dtype or not y.type.size:
        return False
    count, channels, *window = w.type.shape
    is_bundled = channels in BUNDLED and count % OCTET == 0
    if count != x.type.shape[1] or not (is_bundled or channels % DEPTH == 0) or channels > MOST_CHANNELS:
        return False
    if not 1 < math.prod(window) <= MOST_TAPS or max(v.type.span for v in (x, w, y)) >= 1 << 31:
        return False
    return x.type.strides[1] == 1 and not any(x.type.strides[d] % OCTET for d in (0, 2, 3))
