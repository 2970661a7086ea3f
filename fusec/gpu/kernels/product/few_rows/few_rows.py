"""Generate products of at most four rows with constant weights of 16 bits: a decoder's, for one token.

Each weight is read once, so the time is that of its bytes. The threads of a block share the depth. A thread requests 16
bytes of several columns at a time, and those of the next columns before it adds up the sums of these. The launch is
dependent: it requests its first weights, which are constant, while the launch before it still runs. An RMS norm of the
rows is computed by every block, which saves a launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import REGISTERS, GpuFigures
from fusec.gpu.kernels.codegen.kernel import HALVES, Arguments, Kernel, Launch, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, can_generate, split_index
from fusec.gpu.kernels.product.row_norm import (
    MAX_ROWS,
    PACK,
    BlockRows,
    begins_few_rows,
    has_packed_rows,
    is_slice_of_columns,
)
from fusec.ir import Node, TensorType, Value
from fusec.ops import MatMul, RmsNorm, Slice
from fusec.system.dataclass import dataclass

WARPS = (8, 16, 4, 14, 2, 1)  # of a block
WIDTHS = (4, 2, 8, 1)  # columns of a block at a time, of each product
MAX_WORDS, GOOD_WORDS = 112, 72  # of weights and rows in a thread's registers; near the second one most bytes are moved
OTHER_REGISTERS = 40  # of a thread, about
MAX_WASTE = 1.25  # threads and packs for each pack of a row
MAX_VARIANTS = 6
_CUDA = cuda_template(__package__, "few_rows.cuh")


def few_rows(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of one or two such products of the same rows; None for other steps.

    An RMS norm of the rows may be before them, and pointwise ops after them. Slices of columns may be last.
    """
    step = match_rows(nodes, outputs, MAX_ROWS)
    if step is None:
        return None
    name = "+".join(node.op.name for node in nodes)
    sources = (FewRowsSource(step, figures, *tiling) for tiling in _tilings(step.products))
    return with_variants([Kernel(name, (source.launch(),)) for source in sources])


def match_rows(nodes: Sequence[Node], outputs: Sequence[Value], most: int) -> RowsStep | None:
    """Sort the nodes into norm, products, epilogue and slices; None for other nodes, or more rows than `most`."""
    norm = nodes[0] if isinstance(nodes[0].op, RmsNorm) else None
    products = [node for node in nodes if isinstance(node.op, MatMul)]
    slices = [node for node in nodes if is_slice_of_columns(node)]
    epilogue = [node for node in nodes if node not in products and node not in slices and node is not norm]
    if not 1 <= len(products) <= 2 or not all(map(can_generate, epilogue)) or not _are_supported(products, most):
        return None
    if norm is not None and (not begins_few_rows(nodes, most) or norm.result in outputs):
        return None
    results = {v for node in epilogue for v in node.results}
    if results & {v for product in products for v in product.operands} or any(
        v.type.shape != products[0].result.type.shape for v in results
    ):
        return None
    sliced = results | {product.result for product in products}
    if any(node.operands[0] not in sliced or node.result not in outputs for node in slices):
        return None
    if any(node.operands[0] in {n.result for n in slices} for node in epilogue):
        return None
    return RowsStep(norm, products, epilogue, slices, outputs)


def _are_supported(products: Sequence[Node], most: int) -> bool:
    """Tell if the products have few rows, which are the same ones, and constant weights of one shape."""
    x, weights, y = products[0].operands[0], products[0].operands[1].type, products[0].result.type
    for product in products:
        w = product.operands[1]
        if product.operands[0] is not x or w.literal is None or w.type.shape != weights.shape:
            return False
    types = {t.dtype for t in (x.type, weights, y)}
    if len(types) > 1 or x.type.dtype not in HALVES or x.type.rank < 2 or not y.size:
        return False
    depth, columns = weights.shape[-2:]
    is_matrix = weights.size == depth * columns < 1 << 31
    return is_matrix and has_packed_rows(x.type) and x.type.size <= most * depth


def _tilings(products: Sequence[Node]) -> Iterator[tuple[int, int]]:
    """Yield warps and columns of a block, those first that fill the registers best."""
    packs, rows = _depth(products[0]) // PACK, products[0].result.type.size // _columns(products[0])
    found: list[tuple[int, int, int]] = []
    for warps in WARPS:
        each = ceil_div(packs, 32 * warps)
        if 32 * warps * each > MAX_WASTE * packs and warps > 1:
            continue
        words = [(width, 4 * each * (width * len(products) + rows)) for width in WIDTHS]
        found += [(abs(count - GOOD_WORDS), warps, width) for width, count in words if count <= MAX_WORDS]
    for _, warps, width in sorted(found, key=lambda each: each[0])[:MAX_VARIANTS]:
        yield warps, width


def _depth(product: Node) -> int:
    return product.operands[1].type.shape[-2]


def _columns(product: Node) -> int:
    return product.operands[1].type.shape[-1]


@dataclass(frozen=True, eq=False)
class RowsStep:
    """One or two products of the same rows.

    norm: norm of the rows before the products; None without one.
    epilogue: the pointwise ops after the products.
    slices: slices of the columns of results, each stored as a value of its own.
    outputs: the values that are stored.
    """

    norm: Node | None
    products: Sequence[Node]
    epilogue: Sequence[Node]
    slices: Sequence[Node]
    outputs: Sequence[Value]

    @property
    def x(self) -> Value:
        """The rows as they are read."""
        return (self.norm or self.products[0]).operands[0]

    @property
    def y(self) -> TensorType:
        return self.products[0].result.type

    @property
    def rows(self) -> int:
        return self.y.size // self.y.shape[-1]

    def store(self, arguments: Arguments) -> list[str]:
        """Apply the epilogue to `sum0` of the first product and `sum1` of the second, and store the results.

        Only what is stored is rounded, as in cuDNN.
        """
        names = (*(f"y{d}" for d in range(self.y.rank - 1)), "column")
        code = PointwiseCode(Space(self.y.shape, names), arguments, rounds=False)
        for number, product in enumerate(self.products):
            code.define(product.result, f"sum{number}")
        parts = [node.result for node in self.slices]
        code.compute(self.epilogue, [value for value in self.outputs if value not in parts])
        for node in self.slices:
            assert isinstance(node.op, Slice)
            part, start = node.result, node.op.starts[-1]
            at = Space(part.type.shape, (*names[:-1], f"(column - {start}u)")).offset(part.type)
            pointer, text = arguments.write(part), code.as_stored(node.operands[0])
            code.body.append(f"if (column - {start}u < {part.type.shape[-1]}u) {pointer}[{at}] = {text};")
        return code.lines()


@dataclass(frozen=True, eq=False)
class FewRowsSource:
    """The launch of one or two products.

    warps: warps of a block; they share the depth.
    width: columns of each product that a block handles at a time.
    """

    step: RowsStep
    figures: GpuFigures
    warps: int
    width: int

    @property
    def block_rows(self) -> BlockRows:
        return BlockRows(self.step.x, self.step.norm, self.warps)

    @property
    def resident(self) -> int:
        """The blocks of a multiprocessor that its registers have room for."""
        vectors = len(self.step.products) * self.width
        registers = 4 * self.block_rows.packs * (vectors + self.step.rows) + OTHER_REGISTERS
        threads = 32 * self.warps
        return max(1, min(self.figures.processor_threads // threads, REGISTERS // (registers * threads)))

    def launch(self) -> Launch:
        step, arguments, threads = self.step, Arguments(), 32 * self.warps
        columns, rows = step.y.shape[-1], step.rows
        vectors, groups = len(step.products) * self.width, ceil_div(columns, self.width)
        blocks = min(groups, self.figures.processors * self.resident)
        cuda = self.block_rows.bind(_CUDA).bind(
            VECTORS=vectors,
            WIDTH=self.width,
            COLUMNS=columns,
            GROUPS=groups,
            BLOCKS=blocks,
            SIZE=vectors * rows,
            RESULTS=rows * self.width,
            IS_PARTIAL=c_bool(columns % self.width != 0),
        )
        loads = self._loads(cuda, arguments)
        load_rows, store = self.block_rows.load(arguments), step.store(arguments)
        begin = arguments.begin()  # after all pointers are named
        lines = cuda(
            "kernel",
            LOAD_FIRST=loads,
            BEGIN=begin,
            LOAD_ROWS=load_rows,
            MULTIPLY=cuda("multiply"),
            LOAD_NEXT=loads,
            ADD_UP=[
                line
                for number in range(len(step.products))
                for line in cuda("add_up", SUM=f"sum{number}", FIRST=number * self.width)
            ],
            RESULT_COORDINATES=split_index("at", [(f"y{d}", step.y.shape[d]) for d in range(step.y.rank - 1)]),
            EPILOGUE=store,
        )
        return replace(arguments.launch("few_rows", lines, blocks, threads, resident=self.resident), dependent=True)

    def _loads(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        """Request the weights of a group, each column of which is contiguous in memory."""
        arguments.read(self.step.x)
        column = f"group * {self.width}u + c"
        if self.step.y.shape[-1] % self.width:
            column = f"({column} < {self.step.y.shape[-1]}u ? {column} : {self.step.y.shape[-1] - 1}u)"
        lines: list[str] = []
        for number, product in enumerate(self.step.products):
            type = product.operands[1].type
            stored = type.with_order((*range(type.rank - 2), type.rank - 1, type.rank - 2))
            pointer = arguments.read(product.operands[1], stored)
            lines += cuda("load_column", COLUMN=column, FIRST=number * self.width, POINTER=pointer)
        return cuda("load", LOAD_COLUMNS=lines)
