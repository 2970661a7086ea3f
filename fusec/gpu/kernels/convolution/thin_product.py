"""Generate products of many rows with few weights, which memory bounds: 1x1 convolutions and matmuls.

A row is read once, passes the prologue, is multiplied by tensor cores, passes the epilogue, and is written. Weights are
in shared memory as fragments of `mma.sync`. Both operands may permute the depth in the same way. So a thread takes 16
bytes of a row, and eight neighbours of a result, which one load or store moves. Products of 8-bit integers are summed
in i32, and have no prologue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, HALVES, Arguments, Kernel, Launch, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import (
    PointwiseCode,
    Space,
    can_generate,
    split_index,
    stride_along,
    widest_vector,
)
from fusec.ir import DType, Node, TensorType, Value, channels_last
from fusec.ops import Conv, MatMul
from fusec.schedule.program import inputs_of

PACK = 8  # neighbours of a result that a thread handles
PACK_BYTES, DEPTH_BYTES = 16, 64  # of a row, of a thread and of a warp
COLUMNS, ROWS = 32, 16  # of one product of a warp
WARPS = BLOCK // 32
MAX_WIDTH = 4  # groups of columns of a block, because sums are in registers
MIN_ROWS = 512  # a bound of what is tried; tuning times the kernel on each GPU, so this needs no figure
DTYPES = {*((dtype, dtype) for dtype in HALVES), (DType.I8, DType.I32)}  # of a row, and of a sum
WAVES = (4, 2)  # blocks for each multiprocessor, at most; fewer blocks read weights less often
_CUDA = cuda_template(__package__, "thin_product.cuh")


def thin_product(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of such a product with pointwise ops around it; None for other steps."""
    products = [node for node in nodes if isinstance(node.op, (Conv, MatMul))]
    if len(products) != 1 or not all(can_generate(node) or node is products[0] for node in nodes):
        return None
    step = match_product(nodes, products[0])
    if step is None or any(v not in step.results for v in outputs) or not step.fits(figures):
        return None
    name = "+".join(node.op.name for node in nodes)
    groups = ceil_div(step.columns, COLUMNS)
    chunks = ceil_div(step.depth, step.chunk)
    most = min(MAX_WIDTH, groups, max(1, figures.static_bytes // (COLUMNS * chunks * DEPTH_BYTES)))
    widths = sorted(range(1, most + 1), key=lambda n: (ceil_div(groups, n) * n, abs(n - 3)))[:3]
    kernels = [Kernel(name, (ThinSource(step, outputs, figures, n, w).launch(),)) for n in widths for w in WAVES]
    by_key: dict[str, Kernel] = {}
    for kernel in kernels:
        by_key.setdefault(kernel.key, kernel)
    return with_variants(by_key.values())


@dataclass(frozen=True, eq=False)
class ProductStep:
    """A product with the prologue of its first operand and the epilogue of its result."""

    product: Node
    prologue: Sequence[Node]
    epilogue: Sequence[Node]

    @property
    def x(self) -> TensorType:
        return self.product.operands[0].type

    @property
    def y(self) -> TensorType:
        return self.product.result.type

    @property
    def along(self) -> int:
        """The dim along which rows are multiplied."""
        return 1 if isinstance(self.product.op, Conv) else self.x.rank - 1

    @property
    def depth(self) -> int:
        return self.x.shape[self.along]

    @property
    def columns(self) -> int:
        return self.y.shape[self.along]

    @property
    def rows(self) -> int:
        return self.y.size // max(1, self.columns)

    @property
    def steps(self) -> tuple[int, ...]:
        """The distance of neighbours of the result in the first operand, for each dim: a convolution has strides."""
        op = self.product.op
        return (1, 1, *op.strides) if isinstance(op, Conv) else (1,) * self.x.rank

    @property
    def pack(self) -> int:
        """The neighbours of a row that a thread multiplies."""
        return PACK_BYTES // self.x.dtype.itemsize

    @property
    def chunk(self) -> int:
        """The depth of one product of a warp."""
        return DEPTH_BYTES // self.x.dtype.itemsize

    @property
    def results(self) -> set[Value]:
        """The values that may be stored."""
        return {self.product.result, *(v for node in self.epilogue for v in node.results)}

    @property
    def weights(self) -> TensorType:
        """The type of the weights as they are stored: contiguous along the depth."""
        w = self.product.operands[1].type
        return w.with_order((*range(w.rank - 2), w.rank - 1, w.rank - 2)) if self.along != 1 or w.rank == 2 else w

    def fits(self, figures: GpuFigures) -> bool:
        """Tell if rows are moved by packs, and memory rather than arithmetic bounds the product."""
        k, n = self.depth, self.columns
        if k % self.pack or n % PACK or self.rows < MIN_ROWS or max(self.x.size, self.y.size) >= 1 << 31:
            return False
        # bytes are moved in half the time of halves, and multiplied in half, too
        if k * n * self.x.dtype.itemsize**2 > 4 * figures.intensity * (k + n):
            return False  # cuDNN's engines are faster
        if self.x.dtype is DType.I8 and any(d % self.pack for d in _outer_strides(self.x, self.along)):
            return False
        read = [v.type for v in inputs_of([*self.prologue, self.product]) if v is not self.product.operands[1]]
        written = [v.type for v in (*inputs_of(self.epilogue), *self.results)]
        sides = ((self.x, k, read if self.prologue else [self.x]), (self.y, n, written))
        return all(self._packs(space, size, [t for t in types if t.size != 1]) for space, size, types in sides)

    def _packs(self, space: TensorType, size: int, types: Sequence[TensorType]) -> bool:
        rank = space.rank
        others = [d for d in range(rank) if d != self.along]
        steps = [[stride_along(t, rank, self.along), *(stride_along(t, rank, d) for d in others)] for t in types]
        return widest_vector(size, types, steps) == PACK


def _outer_strides(type: TensorType, along: int) -> list[int]:
    return [type.strides[d] for d in range(type.rank) if d != along and type.shape[d] != 1]


def match_product(nodes: Sequence[Node], product: Node) -> ProductStep | None:
    """Sort the nodes into prologue, product and epilogue; None if they are not that."""
    x, w = product.operands
    y = product.result
    if (x.type.dtype, y.type.dtype) not in DTYPES or w.literal is None or not y.type.size:
        return None
    if isinstance(product.op, Conv):
        op, usual = product.op, channels_last(x.type.rank)
        plain = not any(op.pads) and op.groups == 1 and math.prod(w.type.shape[2:]) == 1
        if not plain or x.type.order != usual or y.type.order != usual:
            return None
    elif w.type.size != math.prod(w.type.shape[-2:]) or x.type.rank < 2 or x.type.order or y.type.order:
        return None
    at = list(nodes).index(product)
    prologue: list[Node] = []
    wanted = {x}
    for node in reversed(nodes[:at]):
        if not wanted.isdisjoint(node.results):
            prologue.insert(0, node)
            wanted.update(node.operands)
    epilogue = [node for node in nodes if node is not product and node not in prologue]
    if any(v.type.shape != x.type.shape for node in prologue for v in node.results):
        return None
    if any(v.type.shape != y.type.shape for node in epilogue for v in node.results):
        return None
    if prologue and x.type.dtype is DType.I8:
        return None
    made = {v for node in prologue for v in node.results}
    if any(v in made for node in epilogue for v in node.operands) or w in made:
        return None
    return ProductStep(product, prologue, epilogue)


@dataclass(frozen=True, eq=False)
class ThinSource:
    """The launch of a product.

    width: groups of columns of a block.
    waves: blocks to aim at for each multiprocessor.
    """

    step: ProductStep
    outputs: Sequence[Value]
    figures: GpuFigures
    width: int
    waves: int

    def launch(self) -> Launch:
        step, width, arguments = self.step, self.width, Arguments()
        depths, across = ceil_div(step.depth, step.chunk), ceil_div(step.columns, width * COLUMNS)
        weights = depths * width * COLUMNS * DEPTH_BYTES
        phases = ceil_div(weights, self.figures.static_bytes)  # of a turn, each with its weights
        depths = ceil_div(depths, phases)
        tiles = ceil_div(step.rows, ROWS * WARPS)
        turns = ceil_div(tiles, max(1, min(tiles, self.waves * self.figures.processors // across)))
        down = ceil_div(tiles, turns)
        cuda = _CUDA.bind(
            TYPE=C_TYPES[step.x.dtype],
            SUM="float" if step.x.dtype in HALVES else C_TYPES[step.y.dtype],
            PACK=step.pack,
            THREADS=BLOCK,
            ROWS=step.rows,
            DEPTH=step.depth,
            COLUMNS=step.columns,
            WIDTH=width,
            DEPTHS=depths,
            WEIGHTS=width * 4 * depths * 32,
        )
        cuda = cuda.bind(LOAD_WEIGHTS=self._load_weights(cuda, arguments))
        is_whole = step.depth % (phases * depths * step.chunk) == 0
        multiply = cuda(
            "multiply",
            LOAD_ROW0=self._load_row(cuda, 0, is_whole, arguments),
            LOAD_ROW1=self._load_row(cuda, 1, is_whole, arguments),
        )
        if phases > 1:
            multiply = cuda("multiply_in_phases", ALL_DEPTHS=phases * depths, MULTIPLY=multiply)
        lines = cuda(
            "kernel",
            ACROSS=across,
            DOWN=down,
            TURNS=turns,
            BLOCK_COLUMNS=width * COLUMNS,
            LAST_ROW=step.rows - 1,
            LOAD_ONCE=cuda("load_once") if phases == 1 else [],
            ROW0_COORDINATES=self._row_coordinates(0),
            ROW1_COORDINATES=self._row_coordinates(1),
            MULTIPLY=multiply,
            STORE_ROW0=self._store_row(cuda, 0, arguments),
            STORE_ROW1=self._store_row(cuda, 1, arguments),
        )
        return arguments.launch("thin_product", lines, across * down)

    def _row_coordinates(self, half: int) -> list[str]:
        step = self.step
        sizes = [(f"r{half}_{d}", step.y.shape[d]) for d in range(step.y.rank) if d != step.along]
        return split_index(f"row{half}", sizes)

    def _load_weights(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        type = self.step.weights
        dims = (0, 1) if self.step.along == 1 and type.rank > 2 else (type.rank - 1, type.rank - 2)
        pointer, (own, inner) = arguments.read(self.step.product.operands[1], type), (type.strides[d] for d in dims)
        assert inner == 1, "weights are stored as products take them"
        return cuda("load_weights", POINTER=pointer, STRIDE=own)

    def _load_row(self, cuda: CudaTemplate, half: int, is_whole: bool, arguments: Arguments) -> list[str]:
        """Load the neighbours of a row that a thread multiplies into words x0 or x1.

        is_whole: the depth does not end before them.
        """
        step = self.step
        cuda, value = cuda.bind(INDEX=f"k{half}", WORDS=f"x{half}"), step.product.operands[0]
        code = PointwiseCode(self._space(step.x, half, "k", step.steps), arguments, f"x{half}_")
        if step.prologue:
            for node in step.prologue:
                code.apply(node)
            code.body.append(f"packed.v[j] = {code.as_stored(value)};")
            load = cuda("apply_prologue", PROLOGUE=code.lines())
        else:
            load = cuda("load_words", POINTER=arguments.read(value), AT=code.space.offset(value.type))
        return cuda("load_row", IS_WHOLE=c_bool(is_whole), LOAD=load)

    def _store_row(self, cuda: CudaTemplate, half: int, arguments: Arguments) -> list[str]:
        """Apply the epilogue to eight results of a row, and store them.

        As in cuDNN's graphs, only stored values are rounded.
        """
        step = self.step
        code = PointwiseCode(self._space(step.y, half, "o"), arguments, f"y{half}_", rounds=False)
        code.define(step.product.result, f"acc[n][j / 2][{2 * half} + j % 2]")
        code.compute(step.epilogue, self.outputs)
        return cuda(
            "store_row",
            OFFSET=half * ROWS // 2,
            INDEX=f"o{half}",
            IS_PARTIAL=c_bool(step.columns % (self.width * COLUMNS) != 0),
            EPILOGUE=code.lines(),
        )

    def _space(self, type: TensorType, half: int, name: str, steps: Sequence[int] = ()) -> Space:
        rows = [f"r{half}_{d}" for d in range(type.rank)]
        if steps:
            rows = [row if step == 1 else f"({row} * {step}u)" for row, step in zip(rows, steps, strict=True)]
        names = [row if d != self.step.along else f"{name}{half}" for d, row in enumerate(rows)]
        return Space(type.shape, tuple(names), self.step.along, PACK)
