"""Generate convolution with few filters.

cuDNN's tiles are 32 filters wide or more, so 3 filters waste tensor cores. Here the columns of a product are the
filters times the taps along a row, and the products are summed with shifts. A warp reads a row of the image once and
multiplies it by the taps of all rows of results that it contributes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.cuda_template import c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import COLUMNS, PIXELS, can_follow
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, split_index
from fusec.ir import Node, Value
from fusec.ops import Conv
from fusec.system.dataclass import dataclass

MOST_FILTERS = 8
MOST_SUMS = 176  # of a thread, because it has 255 registers on every GPU
TILES, WARPS = (1, 2, 4), (4, 8)
# Estimated costs of reading a row and of starting a block, relative to multiplying a row by all its taps.
READ, BEGUN = 0.4, 2.0
UNROLLED_STEPS = 16  # up to this, all steps are unrolled, and products that no result needs are left out
PADDING = 4  # numbers after a row of sums, so that the sums of a warp are in different banks
SHARED_BYTES = 96 << 10  # of a block, at most; the figures bound it on GPUs that have less
STRIPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CUDA = cuda_template(__package__, "few_filters.cuh")


@dataclass(frozen=True)
class FewFiltersTiling:
    """Shares of a convolution among blocks.

    warps: warps of a block.
    tiles: tiles of 16 pixels of a row that each warp handles.
    strip: rows of results of a block.
    """

    warps: int
    tiles: int
    strip: int

    @property
    def span(self) -> int:
        """Pixels of a row that a block multiplies."""
        return self.warps * self.tiles * PIXELS


def few_filters(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a convolution with at most 8 filters and its epilogue; None for other steps."""
    conv, rest = nodes[0], nodes[1:]
    if not isinstance(conv.op, Conv) or not all(map(can_follow, rest)):
        return None
    (x, w), y = conv.operands, conv.result
    if x.type.rank != 4 or x.type.dtype not in HALVES or conv.op.groups != 1 or conv.op.strides != (1, 1):
        return None
    steps = [stride for d, stride in enumerate(x.type.strides) if d != 1]
    if x.type.strides[1] != 1 or x.type.shape[1] % 16 or any(stride % 8 for stride in steps):
        return None
    if w.type.shape[0] > MOST_FILTERS or w.type.dtype is not x.type.dtype or not y.type.size:
        return None
    if any(v.type.shape != y.type.shape for v in outputs) or max(v.type.span for v in (x, w, y)) >= 1 << 31:
        return None
    tiling = _likely_fastest(conv, figures)
    return None if tiling is None else _FewFiltersSource(conv, rest, outputs, tiling).kernel()


def _likely_fastest(conv: Node, figures: GpuFigures) -> FewFiltersTiling | None:
    """Return the tiling with the least estimated cost; None if registers or shared memory are too small."""
    op, (x, w), y = conv.op, conv.operands, conv.result
    assert isinstance(op, Conv)
    filters, _, high, wide = w.type.shape
    numbers = ceil_div(wide * filters, COLUMNS)
    estimates: list[tuple[float, FewFiltersTiling]] = []
    width, reach = x.type.shape[3], (wide - 1) * op.dilations[1]
    for tiles, warps in ((tiles, warps) for tiles in TILES for warps in WARPS):
        tiling = FewFiltersTiling(warps, tiles, 1)
        if high * numbers * 4 * tiles > MOST_SUMS or not _fits(conv, tiling, figures):
            continue
        if width > tiling.span and tiling.span <= 2 * reach:
            continue
        resident = max(WARPS) // warps  # registers suffice for one block of the larger size
        for strip in STRIPS:
            down = op.dilations[0] * ceil_div(ceil_div(y.type.shape[2], op.dilations[0]), strip)
            turns = ceil_div(x.type.shape[0] * _across(conv, tiling) * down, figures.processors * resident)
            rows = strip + high - 1
            products = strip if rows <= UNROLLED_STEPS else rows
            cost = turns * resident * tiling.span * (READ * rows + products + BEGUN)
            estimates.append((cost, replace(tiling, strip=strip)))
            if down <= op.dilations[0]:
                break
    return min(estimates, key=lambda item: item[0])[1] if estimates else None


def _across(conv: Node, tiling: FewFiltersTiling) -> int:
    """Return the blocks for a row. If one block holds all of it, pixels past its ends are known to be zero."""
    op, x, y = conv.op, conv.operands[0], conv.result
    assert isinstance(op, Conv)
    if x.type.shape[3] <= tiling.span:
        return 1
    return ceil_div(y.type.shape[3], tiling.span - (conv.operands[1].type.shape[3] - 1) * op.dilations[1])


def _fits(conv: Node, tiling: FewFiltersTiling, figures: GpuFigures) -> bool:
    """Tell if shared memory holds the filters, which are static, and the sums of two rows."""
    filters, channels, high, wide = conv.operands[1].type.shape
    numbers = ceil_div(wide * filters, COLUMNS) * COLUMNS
    static = numbers * high * channels * 2
    most = min(SHARED_BYTES, figures.shared_bytes) - 2 * numbers * (tiling.span + PADDING) * 4
    return static <= min(figures.static_bytes, most)


@dataclass(frozen=True)
class _FewFiltersSource:
    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    tiling: FewFiltersTiling

    def kernel(self) -> Kernel:
        conv, tiling, arguments = self.conv, self.tiling, Arguments()
        op, (x, w), y = conv.op, conv.operands, conv.result
        assert isinstance(op, Conv)
        filters, channels, high, wide = w.type.shape
        across, apart = _across(conv, tiling), op.dilations[0]
        strips = ceil_div(ceil_div(y.type.shape[2], apart), tiling.strip)
        taps = w.type if w.literal is None else w.type.with_order((2, 3, 0, 1))
        each = 8 if channels % 32 == 0 else 4  # neighbours of a pixel that a thread reads; four threads share the pixel
        is_whole = x.type.shape[3] <= tiling.span
        numbers, chunks = ceil_div(wide * filters, COLUMNS), channels // (4 * each)
        steps = tiling.strip + high - 1
        is_short = steps <= UNROLLED_STEPS
        image, tap_pointer = arguments.read(x), arguments.read(w, taps)
        cuda = _CUDA.bind(
            TYPE=C_TYPES[x.type.dtype],
            HIGH=high,
            WIDE=wide,
            FILTERS=filters,
            TILES=tiling.tiles,
            NUMBERS=numbers,
            COLUMNS=numbers * COLUMNS,
            CHUNKS=chunks,
            EACH=each,
            WORDS=each // 2,
            THREADS=tiling.warps * 32,
            OUT=y.type.shape[3] if is_whole else tiling.span - (wide - 1) * op.dilations[1],
            DILATION_ROWS=apart,
            COUNT=steps,
            IMAGE=image,
            IMAGE_ROWS=x.type.shape[2],
            IMAGE_COLUMNS=x.type.shape[3],
            BATCH_STRIDE=x.type.strides[0],
            ROW_STRIDE=x.type.strides[2],
            COLUMN_STRIDE=x.type.strides[3],
        )
        code = PointwiseCode(Space(y.type.shape, ("c0", "c1", "c2", "c3")), arguments)
        code.define(y, "total")
        code.compute(self.rest, self.outputs)
        step = cuda(
            "step",
            IS_SHORT=c_bool(is_short),
            STRIP=tiling.strip,
            PITCH=tiling.span + PADDING,
            RESULT_ROWS=y.type.shape[2],
            RESULT_COLUMNS=y.type.shape[3],
            DILATION_COLUMNS=op.dilations[1],
            IS_WHOLE=c_bool(is_whole),
            PAD_WHOLE=op.pads[1] if is_whole else 0,
            SPAN=tiling.span,
            EPILOGUE=code.lines(),
            LAST=each // 2 - 1,
        )
        blocks = [("c0", x.type.shape[0]), ("strip", strips), ("phase", apart), ("part", across)]
        filter_stride, channel_stride, row_stride, column_stride = taps.strides
        lines = cuda(
            "kernel",
            BLOCK_COORDINATES=split_index("block", blocks),
            STRIP_ROWS=tiling.strip * apart,
            PAD_TOP=op.pads[0],
            LEFT="0" if is_whole else f"begin - {op.pads[1]}",
            FILTER_COORDINATES=split_index(
                "i", [("k", high), ("chunk", chunks), ("column", numbers * COLUMNS), ("quarter", 4)]
            ),
            TAP_COLUMNS=wide * filters,
            TAPS=tap_pointer,
            FILTER_STRIDE=filter_stride,
            CHANNEL_STRIDE=channel_stride,
            TAP_ROW_STRIDE=row_stride,
            TAP_COLUMN_STRIDE=column_stride,
            CONTIGUOUS=c_bool(
                channel_stride == 1 and not any(s % each for s in (filter_stride, row_stride, column_stride))
            ),
            STEPS=cuda("short_strip" if is_short else "long_strip", STEP=step),
        )
        name = "+".join(["few_filters", *(node.op.name for node in self.rest)])
        launch = arguments.launch("few_filters", lines, x.type.shape[0] * strips * apart * across, tiling.warps * 32)
        nbytes = 2 * numbers * COLUMNS * (tiling.span + PADDING) * 4
        return Kernel(name, (replace(launch, resident_bytes=nbytes),))
