"""Generate the kernel of thin products of 8-bit integers whose rows stay in registers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusec.gpu.kernels.codegen.byte_code import BYTE_PRODUCT, SMALL, START, ByteCode
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, Arguments, Launch, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import Space, split_index, strides_from
from fusec.gpu.kernels.convolution.product_step import ProductStep
from fusec.ir import DType, Value
from fusec.schedule.program import inputs_of

ROWS, WARPS = 16, BLOCK // 32
ROW_REGISTERS = 64  # of a thread, for what it reads of its two rows
MAX_RESULTS = 64  # of a thread in a row, because the groups of columns are unrolled
RESIDENT = 2  # blocks of a multiprocessor, which bounds the registers of a thread to 128
WAVES = (2, 4)  # blocks to aim at for each multiprocessor
MAX_WIDTHS = 3
_CUDA = cuda_template(__package__, "thin_product.cuh")


@dataclass(frozen=True, eq=False)
class BytesSource:
    """The launch of a product of bytes.

    own: neighbours of a result that a thread handles.
    width: groups of columns of a block, each of `4 * own` columns.
    waves: blocks to aim at for each multiprocessor.
    """

    step: ProductStep
    outputs: Sequence[Value]
    figures: GpuFigures
    own: int
    width: int
    waves: int

    @property
    def group(self) -> int:
        return 4 * self.own

    @property
    def depths(self) -> int:
        return ceil_div(self.step.depth, self.step.chunk)

    @property
    def start(self) -> int:
        """The number that sums begin with, so that they become floats with less work."""
        return START if self.step.depth * BYTE_PRODUCT <= SMALL else 0

    def launch(self) -> Launch:
        step, width, arguments = self.step, self.width, Arguments()
        across, tiles = ceil_div(step.columns, width * self.group), ceil_div(step.rows, ROWS * WARPS)
        turns = ceil_div(tiles, max(1, min(tiles, self.waves * self.figures.processors // across)))
        down = ceil_div(tiles, turns)
        cuda = _CUDA.bind(
            WORDS=step.words,
            PACK=step.pack,
            THREADS=BLOCK,
            ROWS=step.rows,
            DEPTH=step.depth,
            COLUMNS=step.columns,
            DEPTHS=self.depths,
            WEIGHTS=width * (self.own // 2) * self.depths * 32,
            OWN=self.own,
            PAIRS=self.own // 2,
            GROUP=self.group,
            BEGIN=self.start,
        )
        type = step.weights
        dims = (0, 1) if step.along == 1 and type.rank > 2 else (type.rank - 1, type.rank - 2)
        pointer, (stride, inner) = arguments.read(step.product.operands[1], type), (type.strides[d] for d in dims)
        assert inner == 1, "weights are stored as products take them"
        x, image = step.product.operands[0], arguments.read(step.product.operands[0])
        early, groups = self._groups(cuda, arguments)
        lines = cuda(
            "kernel_of_bytes",
            ACROSS=across,
            DOWN=down,
            TURNS=turns,
            TILES=tiles,
            BLOCK_COLUMNS=width * self.group,
            LAST_ROW=step.rows - 1,
            LOAD_BYTE_WEIGHTS=cuda("load_byte_weights", POINTER=pointer, STRIDE=stride),
            COLUMN_INDICES=list(self._column_indices(cuda)),
            ROW0_COORDINATES=self._row_coordinates(0),
            ROW1_COORDINATES=self._row_coordinates(1),
            IS_WHOLE=c_bool(step.depth % step.chunk == 0),
            IMAGE=image,
            AT0=self._row(0, "k", step.steps).offset(x.type),
            AT1=self._row(1, "k", step.steps).offset(x.type),
            EARLY=early,
            GROUPS=groups,
        )
        return arguments.launch("thin_product", lines, across * down, resident=RESIDENT)

    def _column_indices(self, cuda: CudaTemplate) -> Iterator[str]:
        partial = c_bool(self.step.columns % (self.width * self.group) != 0)
        for n in range(self.width):
            yield from cuda("column_index", NUMBER=n, LIVE=f"live{n}", INDEX=f"o{n}", IS_PARTIAL=partial)

    def _groups(self, cuda: CudaTemplate, arguments: Arguments) -> tuple[list[str], list[str]]:
        """Return the loads of bytes that results are computed with, and the groups of columns."""
        step, early, groups = self.step, list[str](), list[str]()
        fit = c_bool(step.rows % (ROWS * WARPS) == 0)
        for n in range(self.width):
            rows: list[list[str]] = []
            for half in range(2):
                code = ByteCode(self._row(half, f"o{n}"), arguments, f"y{half}_{n}_")
                total = f"acc[j / 2][{2 * half} + j % 2]"
                if self.start:
                    total = f"(i32)((u32){total} - {self.start}u)"
                code.define_bounded(step.product.result, total, float(step.depth * BYTE_PRODUCT))
                code.compute(step.epilogue, self.outputs)
                early += code.early
                code.early = []
                cuda_row = cuda.bind(LIVE=f"live{n}", ROWS_FIT=fit, OFFSET=half * ROWS // 2)
                rows.append(cuda_row("store_group_row", EPILOGUE=code.lines()))
            groups += cuda("multiply_group", NUMBER=n, STORE_ROW0=rows[0], STORE_ROW1=rows[1])
        return early, groups

    def _row_coordinates(self, half: int) -> list[str]:
        step = self.step
        sizes = [(f"r{half}_{d}", step.y.shape[d]) for d in range(step.y.rank) if d != step.along]
        return split_index(f"row{half}", sizes)

    def _row(self, half: int, index: str, steps: Sequence[int] = ()) -> Space:
        """Return the space of a thread's neighbours in a row: of the result, or with `steps` of the first operand."""
        step = self.step
        rows = [f"r{half}_{d}" for d in range(step.y.rank)]
        if steps:
            rows = [row if size == 1 else f"({row} * {size}u)" for row, size in zip(rows, steps, strict=True)]
        names = [row if d != step.along else index for d, row in enumerate(rows)]
        return Space((step.x if steps else step.y).shape, tuple(names), step.along, self.own)


def bytes_sources(step: ProductStep, outputs: Sequence[Value], figures: GpuFigures) -> list[BytesSource]:
    """Return the variants of a product of bytes; none if a row does not fit into registers."""
    depths = ceil_div(step.depth, step.chunk)
    if step.x.dtype is not DType.I8 or 2 * step.words * depths > ROW_REGISTERS:
        return []
    sources: list[BytesSource] = []
    for own in (16, 8):
        if not _can_own(step, own, outputs):
            continue
        group = 4 * own
        groups = ceil_div(step.columns, group)
        room = figures.static_bytes // (group * depths * step.chunk)
        most = min(groups, MAX_RESULTS // own, room)
        widths = sorted(range(1, most + 1), key=lambda n: (ceil_div(groups, n) * n, -n))[:MAX_WIDTHS]
        sources += [BytesSource(step, outputs, figures, own, n, w) for n in widths for w in WAVES]
    return sources


def _can_own(step: ProductStep, own: int, outputs: Sequence[Value]) -> bool:
    """Tell if a thread can load and store so many neighbours of a result."""
    if step.columns % own:
        return False
    types = [v.type for v in (*inputs_of(step.epilogue), *outputs) if v.type.size != 1 and v is not step.product.result]
    steps = (strides_from(type, step.y.rank, step.along) for type in types)
    return all(first != 1 or all(s % own == 0 for s in others) for first, *others in steps)
