"""Generate products of many rows of 8-bit integers, which tensor cores bound, with their epilogue.

A block has 128 rows and up to 256 columns. Four warps copy both operands into stages of shared memory, and eight
multiply (wgmma), each four with half the rows. Sums are in registers, where the epilogue takes them. So copies of the
next tile go on meanwhile. A multiprocessor has one block, which handles one tile after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.byte_code import BYTE_PRODUCT, ByteCode
from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import Arguments, Kernel, Launch, by_value, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import Space, can_generate
from fusec.gpu.kernels.convolution.product_step import ProductStep, match_product
from fusec.ir import DType, Node, TensorType, Value
from fusec.ops import Conv, MatMul
from fusec.schedule.program import inputs_of

ROWS, PART, OWN, GROUP = 128, 128, 16, 64  # of a tile, of its depth; a thread's neighbours, of so many columns
THREADS = 384
CLUSTERS = (2, 1)
STAGES = {256: 4, 192: 5, 128: 6}  # by columns of a tile
MIN_ROWS = 64  # a bound of what is tried; tuning times the kernel on each GPU
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
    sources = [DenseSource(step, outputs, figures, columns, cluster) for columns in tiles for cluster in CLUSTERS]
    return with_variants(Kernel(name, (source.launch(),)) for source in sources)


def _fits(step: ProductStep, outputs: Sequence[Value]) -> bool:
    """Tell if rows are contiguous, and of whole parts, in all that the step reads and writes."""
    if step.x.dtype is not DType.I8 or step.prologue or any(v not in step.results for v in outputs):
        return False
    if step.rows < MIN_ROWS or step.depth % PART or step.columns % GROUP or any(size != 1 for size in step.steps):
        return False
    if max(step.x.size, step.y.size, step.weights.size) >= 1 << 31:
        return False
    types = [v.type for v in (*inputs_of(step.epilogue), *outputs) if v is not step.product.result]
    return step.is_linear([step.x]) and step.is_linear([*types, step.y], step.y)


@dataclass(frozen=True, eq=False)
class DenseSource:
    """The launch of a product.

    columns: of a tile.
    cluster: blocks with different rows that send each other columns.
    """

    step: ProductStep
    outputs: Sequence[Value]
    figures: GpuFigures
    columns: int
    cluster: int

    @property
    def across(self) -> int:
        """Tiles that share rows."""
        return self.step.columns // self.columns

    @property
    def tiles(self) -> int:
        """Tiles of a cluster."""
        return ceil_div(self.step.rows, ROWS * self.cluster) * self.across

    @property
    def stage_bytes(self) -> int:
        return (ROWS + self.columns) * PART

    @property
    def weights(self) -> TensorType:
        """The weights by tiles and parts, and each of these by octets, then columns in the order of sums of a thread.

        A thread has two neighbours from each of eight products of eight columns.
        """
        step, w = self.step, self.step.product.operands[1].type
        columns = (self.across, self.columns // GROUP, 4, 8, 2)
        depth = (step.depth // PART, PART // OWN, OWN)
        if isinstance(step.product.op, Conv):
            return TensorType((*columns, *depth), w.dtype, (0, 5, 6, 1, 3, 2, 4, 7))
        return TensorType((*depth, *columns), w.dtype, (3, 0, 1, 4, 6, 5, 7, 2))

    def launch(self) -> Launch:
        """Return the launch: one block for each multiprocessor, or for each tile where these are fewer."""
        step, arguments, stages = self.step, Arguments(), STAGES[self.columns]
        blocks = min(self.figures.processors // self.cluster, self.tiles)
        cuda = _CUDA.bind(
            ROWS=by_value(step.rows),
            BLOCKS=by_value(blocks),
            CLUSTER=self.cluster,
            ACROSS=self.across,
            COLUMNS=self.columns,
            COLUMN_BYTES=self.columns * PART,
            DEPTH=step.depth,
            PARTS=step.depth // PART,
            EARLY=min(stages, step.depth // PART),
            STAGES=stages,
            STAGE_BYTES=self.stage_bytes,
            IMAGE=arguments.read(step.product.operands[0]),
            WEIGHTS=arguments.read(step.product.operands[1], self.weights),
            PRODUCT=f"ENTRY_{self.columns}_of_bytes",
        )
        codes = [[self._epilogue(f"row{half}", group, arguments) for half in (0, 1)] for group in self._groups]
        cuda = cuda.bind(BEGIN=arguments.begin(), COPY_COLUMNS=cuda("copy_columns"))
        groups: list[str] = []
        for group, (row0, row1) in enumerate(codes):
            groups += cuda("group", COLUMN=f"column{group}", GROUP=group, STORE_ROW0=row0, STORE_ROW1=row1)
        leave = [f"blocks_meet<{self.cluster}>();"] if self.cluster > 1 else []
        lines = cuda("kernel", COPY=cuda("copy"), MULTIPLY=cuda("multiply", GROUPS=groups), LEAVE=leave)
        launch = arguments.launch(
            "dense_bytes",
            lines,
            blocks * self.cluster,
            THREADS,
            preamble=[_RING, *wgmma.product_of_bytes(self.columns)],
            resident=1,
            cluster=self.cluster,
        )
        return replace(
            launch,
            resident_bytes=stages * (self.stage_bytes + 16) + 1024,
            architecture=wgmma.ARCHITECTURE,
            dependent=True,
        )

    @property
    def _groups(self) -> range:
        """The groups of a tile's columns, of which a thread has OWN neighbours each."""
        return range(self.columns // GROUP)

    def _epilogue(self, row: str, group: int, arguments: Arguments) -> list[str]:
        """Return the code that finishes and stores a thread's neighbours in a row."""
        step = self.step
        names = tuple(
            f"column{group}" if d == step.along else row if d == step.row_dims[-1] else None for d in range(step.y.rank)
        )
        code = ByteCode(Space(step.y.shape, names, step.along, OWN), arguments, f"{row}_{group}_")
        total = f"sums[{group * 8} + j / 2][{int(row[-1]) * 2} + j % 2]"
        code.define_bounded(step.product.result, total, float(step.depth * BYTE_PRODUCT))
        code.compute(step.epilogue, self.outputs)
        return code.lines()
