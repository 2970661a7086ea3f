"""Generate convolution of an image of up to four channels.

Tensor cores take channels by sixteens, and cuDNN leaves most of them idle. Here four taps of four channels are one step
of a product. A thread reads its operand from the image in shared memory, eight bytes a tap. Filters stay in registers,
and a thread gets neighbouring results. An image in rows is as good as one with its channels last, because neighbouring
threads load neighbouring pixels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fusec.gpu.kernels.codegen.byte_code import ByteCode
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, by_value, ceil_div, with_variants
from fusec.gpu.kernels.codegen.mma_tiles import COLUMNS, PIXELS, can_follow
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, split_index, stride_along
from fusec.ir import Node, TensorType, Value, channels_last
from fusec.ops import Conv, Pad

CHANNELS = 4  # those of the image, and zeros
TAPS = 4  # of one step
MOST_STEPS = 16  # because the filters of a warp need 8 registers a step
MOST_FILTERS = 128
WARPS = 4  # of a block, at least
BANKS = 16  # of shared memory, eight bytes each
REGISTERS = 65536  # of a multiprocessor of every GPU that fusec knows
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
_CUDA = cuda_template(__package__, "few_channels.cuh")


@dataclass(frozen=True)
class _FewChannelsSource:
    """A convolution with its prologue and epilogue, and the tile of results that a block computes."""

    prologue: Sequence[Node]
    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    figures: GpuFigures
    rows: int = 0
    columns: int = 0

    @property
    def op(self) -> Conv:
        assert isinstance(self.conv.op, Conv)
        return self.conv.op

    @property
    def source(self) -> Value:
        """The value that is read: the image, before a pad to four channels that is part of this kernel."""
        return self.prologue[0].operands[0] if self.prologue else self.conv.operands[0]

    @property
    def taps(self) -> int:
        return math.prod(self.conv.operands[1].type.shape[2:])

    @property
    def steps(self) -> int:
        return ceil_div(self.taps, TAPS)

    @property
    def wide(self) -> int:
        """Columns of a warp's product, by eights."""
        return 4 if self.conv.result.type.shape[1] % 32 == 0 else 2

    @property
    def groups(self) -> int:
        """Warps that share the filters."""
        return self.conv.result.type.shape[1] // (self.wide * COLUMNS)

    @property
    def warps(self) -> int:
        return self.groups * ceil_div(WARPS, self.groups)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the image that a tile of results reads."""
        sizes = zip((self.rows, self.columns), self._window, self.op.strides, self.op.dilations, strict=True)
        high, across = ((size - 1) * stride + (k - 1) * dilation + 1 for size, k, stride, dilation in sizes)
        return high, across

    @cached_property
    def pitch(self) -> int:
        """Pixels from one row of the tile to the next in shared memory; some of them may be unused.

        With this pitch the taps of a step are in different banks, also where they cross the end of a row of the window.
        """
        stride, (down, right), across = self.op.strides[1], self.op.dilations, self.tile[1]
        taps = [divmod(k if k < self.taps else 0, self._window[1]) for k in range(self.steps * TAPS)]

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
    def _in_words(self) -> bool:
        """Tell if two words contain a pixel of three contiguous numbers.

        The last word must end where the image does.
        """
        type, kind = self.source.type, self.conv.operands[0].type.dtype
        if not isinstance(self.prologue[0].op, Pad) or type.dtype is not kind or type.within or type.size % 2:
            return False
        return type.shape[1] == 3 and type.order == channels_last(4)

    @property
    def _window(self) -> tuple[int, ...]:
        return self.conv.operands[1].type.shape[2:]

    @property
    def blocks(self) -> int:
        """Tiles of results."""
        n, _, high, across = self.conv.result.type.shape
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
        return self.figures.processors * self.resident

    @property
    def cost(self) -> float:
        """Estimate the time, which orders the tiles: rounds of tiles, times the work of a tile."""
        image = math.prod(self.tile) / LOADED
        split = 1.0 if self.columns % PIXELS == 0 else SPLIT
        return ceil_div(self.blocks, self.slots) * (self.rows * self.columns * split + image + BEGUN)

    def sized(self, rows: int, columns: int) -> _FewChannelsSource:
        """Return the source with tiles of about that size, which divide the image evenly."""
        _, _, high, across = self.conv.result.type.shape
        return replace(self, rows=min(rows, high), columns=ceil_div(across, ceil_div(across, columns)))

    def kernel(self) -> Kernel:
        conv, y, arguments = self.conv, self.conv.result, Arguments()
        _, _, out_high, out_across = y.type.shape
        (high, across), (pad_top, pad_left) = self.tile, self.op.pads[:2]
        pixels, each = self.rows * self.columns, self.warps // self.groups
        cuda = _CUDA.bind(
            TYPE=C_TYPES[conv.operands[0].type.dtype],
            STEPS=self.steps,
            TAPS=self.taps,
            LAST_TAPS=self.taps - (self.steps - 1) * TAPS,
            WINDOW_COLUMNS=self._window[1],
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
        filters = self._load_filters(cuda, arguments)
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
            TOP=f"(int)down * {self.rows * self.op.strides[0]} - {pad_top}",
            LEFT=f"(int)right * {self.columns * self.op.strides[1]} - {pad_left}",
            LOAD_FILTERS=filters,
            BATCH=self.batch,
            HIGH=high,
            ACROSS=across,
            IMAGE_ROWS=conv.operands[0].type.shape[2],
            IMAGE_COLUMNS=conv.operands[0].type.shape[3],
            LOAD_PIXEL=self._load_pixel(cuda, arguments),
            TURNS=ceil_div(pixels, PIXELS * each),
            PIXEL_WARPS=each,
            STRIDE_ROWS=self.op.strides[0],
            STRIDE_COLUMNS=self.op.strides[1],
            RESULT_ROWS=out_high,
            RESULT_COLUMNS=out_across,
            EPILOGUE=self._epilogue(arguments),
        )
        nodes = (*self.prologue, conv, *self.rest)
        name = "+".join("few_channels" if node is conv else node.op.name for node in nodes)
        launch = arguments.launch("few_channels", lines, grid, self.warps * 32, resident=self.resident)
        return Kernel(name, (launch,))

    def _load_filters(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        w = self.conv.operands[1]
        stored = w.type if w.literal is None else w.type.with_order(channels_last(4))
        filter_stride, channel_stride, row_stride, column_stride = stored.strides
        steps = (filter_stride, row_stride, column_stride)
        return cuda(
            "load_filters",
            FILTERS=arguments.read(w, stored),
            OFFSET_ROWS=self.op.dilations[0] * self.pitch,
            OFFSET_COLUMNS=self.op.dilations[1],
            CONTIGUOUS=c_bool(channel_stride == 1 and not any(step % CHANNELS for step in steps)),
            FILTER_STRIDE=filter_stride,
            CHANNEL_STRIDE=channel_stride,
            ROW_STRIDE=row_stride,
            COLUMN_STRIDE=column_stride,
        )

    def _load_pixel(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        """Load the pixel at a row and column of the image."""
        source, names = self.source, ("c0", None, "(u32)row", "(u32)column")
        if self._in_words if self.prologue else _is_packed(source.type):
            at = Space(source.type.shape, names).offset(source.type)
            return cuda("load_words" if self.prologue else "load_pixel", IMAGE=arguments.read(source), AT=at)
        code = PointwiseCode(Space(source.type.shape, ("c0", "c1", *names[2:])), arguments, "p")
        if not self.prologue:
            code.get(source)
            code.body.append(f"pixel.v[c1] = {code.as_stored(source)};")
        for node in self.prologue:
            if isinstance(node.op, Pad):
                value = node.operands[0]
                code.get(value)
                code.body.append(f"pixel.v[c1] = {code.as_stored(value)};")
                break
            code.apply(node)
        return cuda("load_channels", CHANNELS=source.type.shape[1], PROLOGUE=code.lines())

    def _epilogue(self, arguments: Arguments) -> list[str]:
        y = self.conv.result
        code = ByteCode(Space(y.type.shape, ("c0", "c1", "c2", "c3"), 1, self.wide), arguments, rounds=True)
        code.define(y, "acc[h / 2][j / 2][j % 2 * 2 + h % 2]")
        code.compute(self.rest, self.outputs)
        return code.lines()


def few_channels(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a convolution of four channels with its epilogue; None for other steps.

    The fourth channel may be added by a pad before it.
    """
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, Conv)), None)
    if at is None:
        return None
    prologue, conv, rest = nodes[:at], nodes[at], nodes[at + 1 :]
    op, (x, w), y = conv.op, conv.operands, conv.result
    assert isinstance(op, Conv)
    if x.type.rank != 4 or x.type.dtype not in HALVES or op.groups != 1 or x.type.shape[1] != CHANNELS:
        return None
    if w.type.dtype is not x.type.dtype or y.type.shape[1] % 16 or y.type.shape[1] > MOST_FILTERS or not y.type.size:
        return None
    if not all(map(can_follow, rest)) or any(v.type.shape != y.type.shape for v in outputs):
        return None
    if not _reads(prologue, rest, x):
        return None
    source = _FewChannelsSource(tuple(prologue), conv, tuple(rest), tuple(outputs), figures)
    if source.steps > MOST_STEPS or not _stores(source):
        return None
    values = (x, w, y, source.source, *outputs, *(v for node in rest for v in node.operands))
    if max(v.type.span for v in values) >= 1 << 31:
        return None
    sized = (source.sized(*size) for size in SIZES)
    fit = [s for s in sized if s.tile[0] * s.pitch * CHANNELS * x.type.dtype.itemsize <= figures.static_bytes]
    by_size = {(s.rows, s.columns): s for s in fit}
    sources = sorted(by_size.values(), key=lambda s: s.cost)[:VARIANTS]
    return with_variants(source.kernel() for source in sources)


def _reads(prologue: Sequence[Node], rest: Sequence[Node], x: Value) -> bool:
    """Tell if the prologue is pointwise ops and then a pad by a fourth channel, which only the convolution reads."""
    made = {v for node in prologue for v in node.results}
    if any(v in made for node in rest for v in node.operands):
        return False
    pads = [node for node in prologue if isinstance(node.op, Pad)]
    if not prologue:
        return True
    if len(pads) != 1 or not all(can_follow(node) for node in prologue if node not in pads):
        return False
    (pad,) = pads
    op, (source,), at = pad.op, pad.operands, list(prologue).index(pad)
    assert isinstance(op, Pad)
    if op.pads != (0, 0, 0, 0, 0, CHANNELS - source.type.shape[1], 0, 0) or (op.mode, op.value) != ("constant", 0.0):
        return False
    if any(node.op.name != "relayout" for node in prologue[at + 1 :]) or x not in made:
        return False
    return all(v.type.shape == source.type.shape for node in prologue[:at] for v in node.results)


def _is_packed(type: TensorType) -> bool:
    """Tell if one load moves the channels of a pixel."""
    return type.strides[1] == 1 and all(type.strides[d] % CHANNELS == 0 for d in (0, 2, 3))


def _stores(source: _FewChannelsSource) -> bool:
    """Tell if one store can move a thread's results, or if they are stored one by one."""
    own = source.wide
    values = (*source.outputs, *(v for node in source.rest for v in node.operands))
    types = [v.type for v in values if v.type.size != 1]
    return all(stride_along(t, 4, 1) != 1 or all(stride_along(t, 4, d) % own == 0 for d in (0, 2, 3)) for t in types)
