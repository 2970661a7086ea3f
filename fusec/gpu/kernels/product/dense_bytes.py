"""Generate products of many rows of 8-bit integers, which tensor cores bound, with their epilogue.

A block has tiles of 128 rows. Four warps copy operands into stages of shared memory, and two groups of four warps
multiply (wgmma). Sums are in registers, where the epilogue takes them, so copies of the next tile go on meanwhile.
Either both groups share a tile, each with half the rows, or they alternate: one group multiplies its tile while the
other one runs the epilogue of the tile before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.byte_code import BYTE_PRODUCT, ByteCode
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import Arguments, Kernel, Launch, by_value, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import Space, can_generate
from fusec.gpu.kernels.convolution.product_step import ProductStep, match_product
from fusec.ir import DType, Node, TensorType, Value
from fusec.ops import Conv, MatMul
from fusec.schedule.program import inputs_of

ROWS, PART, OCTET = 128, 128, 16  # of a tile, of its depth in a stage, bytes that a thread copies
LANES = 4  # threads that share a row of a warp's product
THREADS = 384
STAGES = {256: 4, 192: 5, 128: 6}  # by columns of a tile
WIDE = (256, 192)  # read rows less often than 128, which is for columns that neither divides
ALTERNATING = (192, 128)  # columns of a tile whose sums fit into the registers of one group
MIN_ROWS = 16  # a bound of what is tried; tuning times the kernel on each GPU
_CUDA = cuda_template(__package__, "dense_bytes.cuh")
_RING = resources.files("fusec.gpu.kernels.product").joinpath("stage_ring.cuh").read_text(encoding="utf-8")


def dense_bytes(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of such a product with pointwise ops after it; None for other steps."""
    products = [node for node in nodes if isinstance(node.op, (Conv, MatMul))]
    if len(products) != 1 or not figures.has(wgmma.ARCHITECTURE):
        return None
    if not all(can_generate(node) or node is products[0] for node in nodes):
        return None
    step = match_product(nodes, products[0])
    if step is None or not _fits(step, outputs):
        return None
    name = "+".join(node.op.name for node in nodes)
    tiles = [columns for columns in STAGES if step.columns % columns == 0]
    sources = [DenseSource(step, outputs, figures, columns) for columns in [n for n in tiles if n in WIDE] or tiles]
    alone = [DenseSource(step, outputs, figures, columns, True) for columns in tiles if columns in ALTERNATING]
    sources += [source for source in alone if source.tiles > figures.processors]
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
    """The launch of a product.

    columns: of a tile.
    alternates: each group of warps has a tile for itself, and multiplies while the other one stores.
    """

    step: ProductStep
    outputs: Sequence[Value]
    figures: GpuFigures
    columns: int
    alternates: bool = False

    @property
    def bands(self) -> int:
        """64 rows each, which a group of warps has of a tile."""
        return 2 if self.alternates else 1

    @property
    def own(self) -> int:
        """Neighbours of a result that a thread stores: 16 bytes, so that four threads fill sectors of the cache."""
        return 16 if all(value.type.dtype.itemsize == 1 for value in self.outputs) else 8

    @property
    def across(self) -> int:
        """Tiles that share rows."""
        return self.step.columns // self.columns

    @property
    def tiles(self) -> int:
        return ceil_div(self.step.rows, ROWS) * self.across

    @property
    def weights(self) -> TensorType:
        """The weights by tiles and parts, and each of these by octets, then columns in the order of sums of a thread.

        A thread has two neighbours from each product of eight columns.
        """
        step, w = self.step, self.step.product.operands[1].type
        columns = (self.across, self.columns // (LANES * self.own), LANES, self.own // 2, 2)
        depth = (step.depth // PART, PART // OCTET, OCTET)
        if isinstance(step.product.op, Conv):
            return TensorType((*columns, *depth), w.dtype, (0, 5, 6, 1, 3, 2, 4, 7))
        return TensorType((*depth, *columns), w.dtype, (3, 0, 1, 4, 6, 5, 7, 2))

    def launch(self) -> Launch:
        """Return the launch: one block for each multiprocessor, or for each tile where these are fewer."""
        step, arguments, stages = self.step, Arguments(), STAGES[self.columns]
        blocks, stage_bytes = min(self.figures.processors, self.tiles), (ROWS + self.columns) * PART
        cuda = _CUDA.bind(
            ROWS=by_value(step.rows),
            BLOCKS=by_value(blocks),
            BANDS=self.bands,
            READERS=8 // self.bands,
            ACROSS=self.across,
            COLUMNS=self.columns,
            COLUMN_BYTES=self.columns * PART,
            OWN=self.own,
            DEPTH=step.depth,
            PARTS=step.depth // PART,
            EARLY=min(stages, step.depth // PART),
            STAGES=stages,
            STAGE_BYTES=stage_bytes,
            IMAGE=arguments.read(step.product.operands[0]),
            WEIGHTS=arguments.read(step.product.operands[1], self.weights),
            PRODUCT=f"ENTRY_{self.columns}_of_bytes",
        )
        stores = list(self._stores(cuda, arguments))
        cuda = cuda.bind(BEGIN=arguments.begin(), COPY_COLUMNS=cuda("copy_columns"), SKIP_A_TILE=cuda("skip_a_tile"))
        lines = cuda("kernel", COPY=cuda("copy"), MULTIPLY=cuda("multiply", STORES=stores))
        preamble = [_RING, *wgmma.product_of_bytes(self.columns)]
        launch = arguments.launch("dense_bytes", lines, blocks, THREADS, preamble=preamble, resident=1)
        nbytes = stages * (stage_bytes + 16) + 16 + 1024
        return replace(launch, resident_bytes=nbytes, architecture=wgmma.ARCHITECTURE, dependent=True)

    def _stores(self, cuda: CudaTemplate, arguments: Arguments) -> Iterator[str]:
        """Finish and store a thread's neighbours, those of each row and group of columns."""
        groups = range(self.columns // (LANES * self.own))
        for band, group, half in itertools.product(range(self.bands), groups, (0, 1)):
            row, column = f"row{band}_{group}_{half}", f"column{band}_{group}_{half}"
            sums = f"sums[{band}][{group * self.own // 2} + j / 2][{half * 2} + j % 2]"
            yield from cuda(
                "store",
                ROW=row,
                ROW_PLACE=band * 64 + half * 8,
                COLUMN=column,
                COLUMN_PLACE=group * LANES * self.own,
                EPILOGUE=self._epilogue(row, column, sums, arguments),
            )

    def _epilogue(self, row: str, column: str, sums: str, arguments: Arguments) -> list[str]:
        step, inner = self.step, self.step.inner
        names = tuple(column if d == step.along else row if d == inner else None for d in range(step.y.rank))
        code = ByteCode(Space(step.y.shape, names, step.along, self.own), arguments, f"y_{row}_")
        code.define_bounded(step.product.result, sums, float(step.depth * BYTE_PRODUCT))
        code.compute(step.epilogue, self.outputs)
        return code.lines()
