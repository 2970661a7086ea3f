"""Generate thin products of 8-bit integers: many rows, which stay in registers, with few weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from fusec.gpu.kernels.codegen.byte_code import BYTE_PRODUCT, SMALL, START, ByteCode
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, Arguments, Kernel, Launch, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import Space, move_packs, split_index, strides_from
from fusec.gpu.kernels.product.product_step import ProductStep
from fusec.ir import DType, Value
from fusec.schedule.program import inputs_of
from fusec.system.dataclass import dataclass

ROWS, WARPS = 16, BLOCK // 32
ROW_REGISTERS = 64  # of a thread, for what it reads of its two rows
LANES = 8  # of a warp, that share a row of results
# `vector`, `width`, `waves`, `resident` and `fetches` of the variants for many columns, and for few, in the order of
# proposal: of 20 products of ResNet-50 and MobileNetV2 on an H200, one of the first two that fit was at most
# 2 % slower than the fastest of four.
WIDE = ((8, 2, 2, 2, True), (8, 1, 3, 3, False), (8, 1, 2, 2, True), (16, 1, 2, 2, False))
NARROW = ((8, 1, 2, 2, True), (4, 1, 4, 2, False), (4, 1, 2, 2, False))
MOST = 2  # variants, because each takes long to compile
NARROWEST = (4, 1)  # `vector` and `width`, also for fewer columns
LINE_BYTES = 128  # of the cache
SHORT_DEPTH = 64  # fetching longer rows ahead was slower where nothing else is read with them
FEW_COLUMNS = 192
_CUDA = cuda_template(__package__, "thin_bytes.cuh")


@dataclass(frozen=True, eq=False)
class BytesSource:
    """The launch of a product of bytes.

    vector: neighbours of a result that a thread handles.
    width: groups of columns of a block, each of `8 * vector` columns.
    waves: blocks to aim at for each multiprocessor.
    resident: blocks of a multiprocessor, which bounds the registers of a thread.
    fetches: what the next tile reads is brought to the cache ahead.
    """

    step: ProductStep
    outputs: Sequence[Value]
    figures: GpuFigures
    vector: int
    width: int
    waves: int
    resident: int
    fetches: bool

    @property
    def group(self) -> int:
        return LANES * self.vector

    @property
    def depths(self) -> int:
        return ceil_div(self.step.depth, self.step.chunk)

    @property
    def column_blocks(self) -> int:
        """Blocks that share rows."""
        return ceil_div(self.step.columns, self.width * self.group)

    @property
    def tiles(self) -> int:
        """Turns of all blocks that share columns."""
        return ceil_div(self.step.rows, ROWS * WARPS)

    @property
    def row_blocks(self) -> int:
        """Blocks that share columns."""
        most = max(1, min(self.tiles, self.waves * self.figures.processors // self.column_blocks))
        return ceil_div(self.tiles, ceil_div(self.tiles, most))

    @property
    def start(self) -> int:
        """The number that sums begin with, so that they become floats with less work."""
        return START if self.step.depth * BYTE_PRODUCT <= SMALL else 0

    def launch(self) -> Launch:
        step, width, arguments = self.step, self.width, Arguments()
        cuda = _CUDA.bind(
            COLUMN_BLOCKS=self.column_blocks,
            ROW_BLOCKS=self.row_blocks,
            TILES=self.tiles,
            WORDS=step.words,
            PACK=step.pack,
            THREADS=BLOCK,
            ROWS=step.rows,
            DEPTH=step.depth,
            COLUMNS=step.columns,
            DEPTHS=self.depths,
            HALVES=step.words // 2,
            WEIGHTS=width * (self.vector // 2) * self.depths * (step.words // 2) * 32,
            ROWS_FIT=c_bool(step.rows % (ROWS * WARPS) == 0),
            LAST_ROW=step.rows - 1,
            VECTOR=self.vector,
            PAIRS=self.vector // 2,
            GROUP=self.group,
            BEGIN=self.start,
        )
        type = step.weights
        dims = (0, 1) if step.along == 1 and type.rank > 2 else (type.rank - 1, type.rank - 2)
        pointer, (stride, inner) = arguments.read(step.product.operands[1], type), (type.strides[d] for d in dims)
        assert inner == 1, "weights are stored as products take them"
        image = arguments.read(step.product.operands[0])
        results = self._results(arguments)
        early = [load for code in results.values() for load in code.early]
        for code in results.values():
            code.early = []
        lines = cuda(
            "kernel",
            BLOCK_COLUMNS=width * self.group,
            LOAD_WEIGHTS=cuda("load_weights", POINTER=pointer, STRIDE=stride),
            COLUMN_INDICES=list(self._column_indices(cuda)),
            FETCH_NEXT=list(self._fetched(cuda, arguments)) if self.fetches else [],
            LOAD_ROWS=list(self._rows_read(cuda, image)),
            COORDINATES=list(self._rows_written(cuda)),
            LOAD_EARLY=[f"const {load.type} {load.name} = {load.text};" for load in early],
            GROUPS=self._groups(cuda, results),
        )
        return arguments.launch("thin_product", lines, self.column_blocks * self.row_blocks, resident=self.resident)

    def _column_indices(self, cuda: CudaTemplate) -> Iterator[str]:
        partial = c_bool(self.step.columns % (self.width * self.group) != 0)
        for n in range(self.width):
            yield from cuda("column_index", NUMBER=n, LIVE=f"live{n}", INDEX=f"o{n}", IS_PARTIAL=partial)

    def _fetched(self, cuda: CudaTemplate, arguments: Arguments) -> Iterator[str]:
        """Fetch the rows of the next tile, and what its epilogue reads of the same rows."""
        step, x = self.step, self.step.product.operands[0]
        has_rows = all(size == 1 for size in step.steps) and step.is_linear([x.type])
        if has_rows and (step.residuals or step.depth <= SHORT_DEPTH):
            yield from self._fetch(cuda, arguments, x, ("0u", step.depth))
        for value in step.residuals if self.is_linear else ():
            yield from self._fetch(cuda, arguments, value, ("first", min(self.width * self.group, step.columns)))

    def _fetch(self, cuda: CudaTemplate, arguments: Arguments, value: Value, span: tuple[str, int]) -> list[str]:
        """Fetch a tile of a tensor. `span` is its first column and the number of columns."""
        begin, columns = span
        line = LINE_BYTES // value.type.dtype.itemsize
        return cuda(
            "fetch_next",
            APART=self.row_blocks * ROWS * WARPS,
            LINES=ceil_div(columns, line),
            LINE=line,
            PITCH=value.type.shape[self.step.along],
            POINTER=arguments.read(value),
            BEGIN=begin,
        )

    def _rows_read(self, cuda: CudaTemplate, image: str) -> Iterator[str]:
        """Load a thread's part of two rows of the first operand."""
        step, value = self.step, self.step.product.operands[0]
        linear = all(size == 1 for size in step.steps) and step.is_linear([value.type])
        space = self._space("row", "k", linear, step.steps)
        for n in range(2):
            yield from cuda(
                "row_read",
                NUMBER=n,
                ROW_COORDINATES=[] if linear else self._split("row"),
                IS_WHOLE=c_bool(step.depth % step.chunk == 0),
                IMAGE=image,
                AT=space.offset(value.type),
            )

    def _rows_written(self, cuda: CudaTemplate) -> Iterator[str]:
        """Generate the numbers of the four rows whose results a thread gets."""
        for row in range(4):
            coordinates = [] if self.is_linear else self._split(f"row{row}")
            first = row // 2 * 8 + row % 2
            yield from cuda(
                "row_written", PLACE=f"place{row}", ROW=f"row{row}", FIRST=first, ROW_COORDINATES=coordinates
            )

    def _results(self, arguments: Arguments) -> dict[tuple[int, int], ByteCode]:
        """Return the code of the results of each group of columns in each of a thread's four rows."""
        step, results = self.step, dict[tuple[int, int], ByteCode]()
        for n, row in itertools.product(range(self.width), range(4)):
            code = ByteCode(self._space(f"row{row}", f"o{n}", self.is_linear), arguments, f"y{row}_{n}_")
            total = f"acc[{row // 2}][j / 2][j % 2 * 2 + {row % 2}]"
            if self.start:
                total = f"(i32)((u32){total} - {self.start}u)"
            code.define_bounded(step.product.result, total, float(step.depth * BYTE_PRODUCT))
            code.compute(step.epilogue, self.outputs)
            results[n, row] = code
        return results

    def _groups(self, cuda: CudaTemplate, results: Mapping[tuple[int, int], ByteCode]) -> list[str]:
        """Multiply and store each group of columns."""
        groups: list[str] = []
        for n in range(self.width):
            stores: list[str] = []
            for row in range(4):
                stores += cuda("store", LIVE=f"live{n}", PLACE=f"place{row}", EPILOGUE=results[n, row].lines())
            groups += cuda("group", NUMBER=n, STORES=stores)
        return groups

    @cached_property
    def is_linear(self) -> bool:
        """Tell if the number of a row is enough to find it in all that the epilogue reads and writes."""
        return self.step.is_linear([v.type for v in (*inputs_of(self.step.epilogue), *self.outputs)], self.step.y)

    def _split(self, row: str) -> list[str]:
        return split_index(row, [(f"{row}_{d}", self.step.y.shape[d]) for d in self.step.row_dims])

    def _space(self, row: str, index: str, linear: bool, steps: Sequence[int] = ()) -> Space:
        """Return the space of a thread's neighbours in a row: of the result, or with `steps` of the first operand."""
        step = self.step
        names: list[str | None] = []
        for d in range(step.y.rank):
            if d == step.along:
                names.append(index)
            elif linear:
                names.append(row if d == step.inner else None)
            else:
                names.append(f"({row}_{d} * {steps[d]}u)" if steps and steps[d] != 1 else f"{row}_{d}")
        return Space((step.x if steps else step.y).shape, tuple(names), step.along, self.vector)


def thin_bytes(name: str, step: ProductStep, outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a product of bytes; None if a row does not fit into registers, or arithmetic bounds it."""
    if not step.fits(figures):
        return None
    kernels = [Kernel(name, (source.launch(),)) for source in _sources(step, outputs, figures)]
    return with_variants({kernel.key: kernel for kernel in kernels}.values())


def _sources(step: ProductStep, outputs: Sequence[Value], figures: GpuFigures) -> list[BytesSource]:
    depths = ceil_div(step.depth, step.chunk)
    if step.x.dtype is not DType.I8 or 2 * step.words * depths > ROW_REGISTERS:
        return []
    sources: list[BytesSource] = []
    for vector, width, waves, resident, fetches in WIDE if step.columns > FEW_COLUMNS else NARROW:
        bytes_of_weights = LANES * vector * width * depths * step.chunk
        wasted = step.columns < LANES * vector * width and (vector, width) != NARROWEST
        if _fits_vector(step, vector, outputs) and not wasted and bytes_of_weights <= figures.static_bytes:
            sources.append(BytesSource(step, outputs, figures, vector, width, waves, resident, fetches))
    return sources[:MOST]


def _fits_vector(step: ProductStep, vector: int, outputs: Sequence[Value]) -> bool:
    """Tell if a thread can load and store `vector` neighbours of a result."""
    if step.columns % vector:
        return False
    types = [v.type for v in (*inputs_of(step.epilogue), *outputs) if v.type.size != 1 and v is not step.product.result]
    steps = (strides_from(type, step.y.rank, step.along) for type in types)
    return move_packs(steps, vector)
