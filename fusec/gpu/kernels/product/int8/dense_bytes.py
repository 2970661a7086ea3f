"""Generate products of many rows of 8-bit integers, which tensor cores bound, with their epilogue.

Four warps copy operands into stages of shared memory, and groups of four warps multiply (wgmma), each with 64 rows of a
tile. Sums are in registers, where the epilogue takes them. So copies of the next tile go on meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.byte_code import BYTE_PRODUCT, ByteCode
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_file, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import Arguments, Kernel, Launch, by_value, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import Space
from fusec.gpu.kernels.product.int8.dense_tiles import PART, THREADS, Tiles, tiles_of
from fusec.gpu.kernels.product.product_step import ProductStep, match_product
from fusec.ir import DType, Node, TensorType, Value
from fusec.ops import Conv
from fusec.schedule.program import inputs_of
from fusec.system.dataclass import dataclass

OCTET = 16  # bytes that a thread copies
LANES = 4  # threads that share a row of a warp's product
REGISTERS_AHEAD = 7  # for each neighbour: two scales, biases and residuals, and their addresses
MIN_ROWS = 16  # a bound of what is tried; tuning times the kernel on each GPU
_CUDA = cuda_template(__package__, "dense_bytes.cuh")
_RING = cuda_file("fusec.gpu.kernels.product", "stage_ring.cuh")


def dense_bytes(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a product of many rows of bytes with pointwise ops after it; None for other steps."""
    step = match_product(nodes) if figures.has(wgmma.ARCHITECTURE) else None
    if step is None or not _fits(step, outputs):
        return None
    name = "+".join(node.op.name for node in nodes)
    sources = (DenseSource(step, outputs, figures, tiles) for tiles in tiles_of(step.rows, step.columns, figures))
    return with_variants(Kernel(name, (source.launch(),)) for source in sources)


def _fits(step: ProductStep, outputs: Sequence[Value]) -> bool:
    """Tell if rows are contiguous, and of whole parts, in all that the step reads and writes."""
    if step.x.dtype is not DType.I8 or step.prologue or any(v not in step.results for v in outputs):
        return False
    if step.rows < MIN_ROWS or step.depth % PART or any(size != 1 for size in step.steps):
        return False
    if max(step.x.size, step.y.size, step.weights.size) >= 1 << 31:
        return False
    types = [v.type for v in (*inputs_of(step.epilogue), *outputs) if v is not step.product.result]
    return step.is_linear([step.x]) and step.is_linear([*types, step.y], step.y)


@dataclass(frozen=True, eq=False)
class DenseSource:
    """The launch of a product."""

    step: ProductStep
    outputs: Sequence[Value]
    figures: GpuFigures
    tiles: Tiles

    @property
    def vector(self) -> int:
        """Neighbours of a result that a thread stores: 16 bytes if registers suffice, so that threads fill sectors."""
        short = all(value.type.dtype.itemsize == 1 for value in self.outputs)
        return 16 if short and self.tiles.free_registers >= 16 * REGISTERS_AHEAD else 8

    @property
    def column_blocks(self) -> int:
        """Tiles that share rows."""
        return self.step.columns // self.tiles.columns

    @property
    def weights(self) -> TensorType:
        """The weights by tiles and parts, and each of these by octets, then columns in the order of sums of a thread.

        A thread has two neighbours from each product of eight columns.
        """
        step, w = self.step, self.step.product.operands[1].type
        columns = (self.column_blocks, self.tiles.columns // (LANES * self.vector), LANES, self.vector // 2, 2)
        depth = (step.depth // PART, PART // OCTET, OCTET)
        if isinstance(step.product.op, Conv):
            return TensorType((*columns, *depth), w.dtype, (0, 5, 6, 1, 3, 2, 4, 7))
        return TensorType((*depth, *columns), w.dtype, (3, 0, 1, 4, 6, 5, 7, 2))

    def launch(self) -> Launch:
        """Return the launch, whose blocks all run at the same time and share the tiles."""
        step, tiles, arguments = self.step, self.tiles, Arguments()
        blocks, few_and_many = tiles.blocks(step.rows, step.columns, self.figures), tiles.registers
        cuda = _CUDA.bind(
            ROWS=by_value(step.rows),
            BLOCKS=by_value(blocks),
            TILE_ROWS=tiles.rows,
            LAST_ROW=tiles.rows - 1,
            ROW_BYTES=tiles.rows * PART,
            TURNS=tiles.rows * PART // OCTET // THREADS,
            MULTIPLYING=tiles.groups * THREADS,
            FEW=few_and_many[0],
            MANY=few_and_many[1],
            READERS=4 * tiles.groups,
            COLUMN_BLOCKS=self.column_blocks,
            COLUMNS=tiles.columns,
            COLUMN_BYTES=tiles.columns * PART,
            VECTOR=self.vector,
            DEPTH=step.depth,
            PARTS=step.depth // PART,
            EARLY=min(tiles.stages, step.depth // PART),
            STAGES=tiles.stages,
            STAGE_BYTES=tiles.stage_bytes,
            IMAGE=arguments.read(step.product.operands[0]),
            WEIGHTS=arguments.read(step.product.operands[1], self.weights),
            PRODUCT=f"ENTRY_{tiles.columns}_of_bytes",
        )
        stores = list(self._stores(cuda, arguments))
        cuda = cuda.bind(BEGIN=arguments.begin(), COPY_COLUMNS=cuda("copy_columns"))
        lines = cuda("kernel", COPY=cuda("copy"), MULTIPLY=cuda("multiply", STORES=stores))
        preamble = [_RING, *wgmma.product_of_bytes(tiles.columns)]
        threads = (tiles.groups + 1) * THREADS
        launch = arguments.launch("dense_bytes", lines, blocks, threads, preamble=preamble, resident=1)
        nbytes = tiles.stages * (tiles.stage_bytes + 16) + 1024
        return replace(launch, resident_bytes=nbytes, architecture=wgmma.ARCHITECTURE, dependent=True)

    def _stores(self, cuda: CudaTemplate, arguments: Arguments) -> Iterator[str]:
        """Finish and store the results of a thread by neighbours. Loads are issued before others are computed."""
        for half in (0, 1):
            names = {"ROW": f"row{half}", "WANTED": f"row{half}_wanted", "IS_THERE": f"row{half}_is_there"}
            yield from cuda("own_row", PLACE=half * 8, **names)
        pieces: list[tuple[list[str], list[str]]] = []
        for group in range(self.tiles.columns // (LANES * self.vector)):
            yield from cuda("own_column", COLUMN=f"column{group}", PLACE=group * LANES * self.vector)
            for half in (0, 1):
                sums = f"sums[{group * self.vector // 2} + j / 2][{half * 2} + j % 2]"
                code = self._epilogue(f"row{half}", f"column{group}", sums, arguments)
                pieces.append((code.loads(), code.after_loads(f"row{half}_is_there")))
        loads, others = zip(*pieces, strict=True)
        ahead = 2 if self.tiles.free_registers >= REGISTERS_AHEAD * self.vector else 0
        yield from itertools.chain(*loads[:ahead])
        for later, lines in itertools.zip_longest(loads[ahead:], others, fillvalue=()):
            yield from later
            yield from lines

    def _epilogue(self, row: str, column: str, sums: str, arguments: Arguments) -> ByteCode:
        step, inner = self.step, self.step.inner
        names = tuple(column if d == step.along else row if d == inner else None for d in range(step.y.rank))
        code = ByteCode(Space(step.y.shape, names, step.along, self.vector), arguments, f"y_{row}_{column}_")
        code.define_bounded(step.product.result, sums, float(step.depth * BYTE_PRODUCT))
        code.compute(step.epilogue, self.outputs)
        return code
