"""Generate depthwise convolution of 8-bit integers.

An instruction multiplies four bytes of a word and adds the products up. Channels are neighbours in memory, so a thread
first gathers four columns of each channel into a word. Two results next to each other share these words.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.byte_code import BYTE_PRODUCT, SMALL, START, ByteCode
from fusec.gpu.kernels.codegen.cuda_template import c_bool, cuda_template
from fusec.gpu.kernels.codegen.kernel import BLOCK, Arguments, Launch, by_value, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import Space, split_index
from fusec.ir import DType, Node, TensorType, Value
from fusec.ops import Conv
from fusec.system.dataclass import dataclass

MAX_SUMS = 64  # of a thread, because they are in registers
MAX_TAP_WORDS = 48  # of a thread, for the same reason
VARIANTS = 4  # tiles that are timed
_CUDA = cuda_template(__package__, "depthwise_bytes.cuh")


@dataclass(frozen=True)
class BytesTile:
    """Tile that a thread computes: `vector` channels of `rows` x `strip` results."""

    vector: int
    strip: int
    rows: int


@dataclass(frozen=True, eq=False)
class DepthwiseBytes:
    """A depthwise convolution of bytes with its epilogue.

    rest: the epilogue.
    outputs: results of the epilogue that are stored.
    """

    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    tile: BytesTile

    @property
    def op(self) -> Conv:
        assert isinstance(self.conv.op, Conv)
        return self.conv.op

    @property
    def taps(self) -> TensorType:
        """The stored filters: channels are innermost."""
        return self.conv.operands[1].type.with_order((2, 3, 0, 1))

    @property
    def words(self) -> int:
        """Words of a row of taps, for windows that begin at an even or at an odd column."""
        odd = self.op.strides[1] % 2 == 1 and self.tile.strip > 1
        return ceil_div(self.taps.shape[3] + odd, 4)

    @property
    def fits(self) -> bool:
        """Tell if registers hold the sums and the taps of a thread."""
        tile, y = self.tile, self.conv.result.type
        small = tile.vector * tile.rows * tile.strip <= MAX_SUMS
        small = small and self.taps.shape[2] * tile.vector * self.words <= MAX_TAP_WORDS
        return small and tile.rows <= y.shape[2] and tile.strip <= y.shape[3] and y.shape[1] % tile.vector == 0

    def launch(self) -> Launch:
        op, tile, y, x, arguments = self.op, self.tile, self.conv.result.type, self.conv.operands[0], Arguments()
        (n, channels, high, across), (window_rows, window) = y.shape, self.taps.shape[2:]
        strips, bands = ceil_div(across, tile.strip), ceil_div(high, tile.rows)
        threads = n * bands * strips * (channels // tile.vector)
        pairs = (tile.strip - 1) * op.strides[1] // 2 + 2 * self.words
        start = START if window_rows * window * BYTE_PRODUCT <= SMALL else 0
        cuda = _CUDA.bind(
            VECTOR=tile.vector,
            QUADS=tile.vector // 4,
            STRIP=tile.strip,
            ROWS=tile.rows,
            WORDS=self.words,
            PAIRS=pairs,
            COLUMNS=2 * pairs,
            WINDOW_ROWS=window_rows,
            WINDOW_COLUMNS=window,
            STRIDE_ROWS=op.strides[0],
            STRIDE=op.strides[1],
            DILATION=op.dilations[0],
        )
        filters, strides = arguments.read(self.conv.operands[1], self.taps), self.taps.strides
        tap = f"c1 * {strides[0]} + h * {strides[2]} + k * {strides[3]}"
        columns = cuda(
            "load_columns",
            PAD=op.pads[1],
            COLUMNS_READ=(tile.strip - 1) * op.strides[1] + window,
            IMAGE_COLUMNS=x.type.shape[3],
            IMAGE=arguments.read(x),
            AT=Space(x.type.shape, ("c0", "c1", "(u32)p0", "(u32)p1")).offset(x.type),
        )
        lines = cuda(
            "kernel",
            BLOCK=BLOCK,
            COUNT=by_value(threads),
            COORDINATES=split_index(
                "i", [("c0", n), ("band", bands), ("strip", strips), ("pack", channels // tile.vector)]
            ),
            LOAD_FILTERS=cuda("load_filters", FILTERS=filters, AT=tap),
            BEGIN=start,
            HEIGHT=(tile.rows - 1) * op.strides[0] + (window_rows - 1) * op.dilations[0] + 1,
            PAD_ROWS=op.pads[0],
            IMAGE_ROWS=x.type.shape[2],
            LOAD_COLUMNS=columns,
            MULTIPLY=cuda("multiply"),
            ROWS_FIT=c_bool(high % tile.rows == 0),
            STRIPS_FIT=c_bool(across % tile.strip == 0),
            RESULT_ROWS=high,
            RESULT_COLUMNS=across,
            EPILOGUE=self._epilogue(arguments, start),
        )
        return arguments.launch("depthwise", lines, ceil_div(threads, BLOCK))

    def _epilogue(self, arguments: Arguments, start: int) -> list[str]:
        y = self.conv.result
        code = ByteCode(Space(y.type.shape, ("c0", "c1", "c2", "c3"), 1, self.tile.vector), arguments)
        total = f"(i32)((u32)acc[r][s][j] - {start}u)" if start else "acc[r][s][j]"
        code.define_bounded(y, total, float(self.taps.shape[2] * self.taps.shape[3] * BYTE_PRODUCT))
        code.compute(self.rest, self.outputs)
        return code.lines()


def depthwise_bytes(nodes: Sequence[Node], outputs: Sequence[Value], vector: int) -> list[Launch]:
    """Return the launches of a depthwise convolution of bytes, each a variant; none if it is another.

    vector: neighbouring channels that one load or store can move.
    """
    conv, rest = nodes[0], nodes[1:]
    assert isinstance(conv.op, Conv)
    (x, w), op = conv.operands, conv.op
    if x.type.dtype is not DType.I8 or w.type.dtype is not DType.I8 or w.literal is None or x.type.rank != 4:
        return []
    if vector % 4 or op.dilations[1] != 1 or any(s % 4 for d, s in enumerate(x.type.strides) if d != 1):
        return []
    wide = max(1, 4 // op.strides[1])
    tiles = [(4, wide, 2), (8, wide, 1), (4, 2 * wide, 2), (4, wide, 1), (4, 1, 1)]
    sources = [DepthwiseBytes(conv, rest, outputs, BytesTile(*tile)) for tile in tiles if vector % tile[0] == 0]
    return [source.launch() for source in sources if source.fits][:VARIANTS]
