"""Generate depthwise convolution with rolling sums: row after row of the image, each loaded once.

A thread computes a strip of columns. It adds a row of the image to all rows of results whose windows contain it.
Filters and unfinished sums stay in registers, and the next row is loaded while one is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import c_bool, cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, ceil_div, compute_type
from fusec.gpu.kernels.codegen.pointwise_code import Space
from fusec.ir import Node
from fusec.ops import Conv
from fusec.system.dataclass import dataclass

MIN_TAPS = 25  # of windows whose rows of results share enough loads; strips are as fast for fewer
MAX_STRIDE = 2
REGISTERS = 150  # for filters, sums and pixels; a thread has 255
CUDA = cuda_template(__package__, "rolling_sums.cuh")


@dataclass(frozen=True, eq=False)
class RollingSums:
    """The loop of a thread over the image's rows, for `strip` columns of one channel.

    band: rows of results of a thread.
    """

    conv: Node
    strip: int
    band: int

    @property
    def op(self) -> Conv:
        assert isinstance(self.conv.op, Conv)
        return self.conv.op

    @property
    def window(self) -> tuple[int, int]:
        """Rows and columns of the window."""
        rows, columns = self.conv.operands[1].type.shape[2:]
        return rows, columns

    @property
    def open(self) -> int:
        """Rows of results that a row of the image adds to."""
        return ceil_div(self.window[0], self.op.strides[0])

    @property
    def columns_read(self) -> int:
        """Columns of the image under a strip."""
        return (self.strip - 1) * self.op.strides[1] + self.window[1]

    @property
    def fits(self) -> bool:
        """Tell if filters, sums, and two steps' pixels fit into registers."""
        rows, columns = self.window
        pixels = 2 * self.op.strides[0] * self.columns_read
        return rows * columns + self.open * self.strip + pixels <= REGISTERS

    @property
    def result(self) -> str:
        """The complete result of column `s`, in C."""
        return f"acc[{self.open - 1}][s]"

    def lines(self, arguments: Arguments, epilogue: Sequence[str]) -> list[str]:
        """Generate the loop. The C variables `c0`, `c1`, `band`, `strip` and `weight` must be there.

        epilogue: statements for the result of column `s`.
        """
        x, y, op, (rows, columns) = self.conv.operands[0].type, self.conv.result.type, self.op, self.window
        cuda = CUDA.bind(
            TYPE=compute_type(y.dtype),
            STORED=C_TYPES[x.dtype],
            STRIP=self.strip,
            ROW_STRIDE=op.strides[0],
            STRIDE=op.strides[1],
            WIDTH_READ=self.columns_read,
            OPEN=self.open,
            BAND=self.band,
            IMAGE_ROWS=x.shape[2],
            IMAGE_COLUMNS=x.shape[3],
            ROW_STEP=x.strides[2],
            COLUMN_STEP=x.strides[3],
        )
        return cuda(
            "loop",
            PAD_TOP=op.pads[0],
            PAD_LEFT=op.pads[1],
            IMAGE=arguments.read(self.conv.operands[0]),
            AT=Space(x.shape, ("c0", "c1", None, None)).offset(x),
            FIRST=min(op.pads[0] // op.strides[0], self.open - 1),  # the rows before it are padding
            LOAD_FIRST=cuda("load_rows", STEP="first", WANTED="true"),
            LOAD_NEXT=cuda("load_rows", STEP="step + 1", WANTED=f"step < {self.band + self.open - 2}"),
            TAP_ROWS=rows,
            TAPS=columns,
            ROW="c2",
            HEIGHT=y.shape[2],
            COLUMN="c3",
            STRIPS_FIT=c_bool(y.shape[3] % self.strip == 0),
            WIDTH=y.shape[3],
            EPILOGUE=epilogue,
        )


def can_roll(conv: Node) -> bool:
    """Tell if a depthwise convolution can have rolling sums: channels are innermost, and sums are float32."""
    (x, w), y, op = (v.type for v in conv.operands), conv.result.type, conv.op
    if not isinstance(op, Conv) or y.rank != 4 or compute_type(y.dtype) != "float" or not y.dtype.is_float:
        return False
    if op.dilations != (1, 1) or max(op.strides) > MAX_STRIDE or x.strides[1] != 1 or y.strides[1] != 1:
        return False
    return w.shape[2] > 1 and w.shape[2] * w.shape[3] >= MIN_TAPS
