"""Generate products of many rows with few weights, which memory bounds: 1x1 convolutions and matmuls.

A row is read once, passes the prologue, is multiplied by tensor cores, passes the epilogue, and is written. Weights are
in shared memory as fragments of `mma.sync`. Both operands may permute the depth in the same way. So a thread takes 16
bytes of a row, and eight neighbours of a result, which one load or store moves. Products of 8-bit integers have another
kernel (int8/thin_bytes.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, c_bool, cuda_template
from fusec.gpu.kernels.codegen.equal_steps import once_for_equal_steps
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, Launch, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, split_index
from fusec.gpu.kernels.product.int8.thin_bytes import thin_bytes
from fusec.gpu.kernels.product.product_step import PACK, ProductStep, match_product
from fusec.ir import DType, Node, TensorType, Value
from fusec.system.dataclass import dataclass

DEPTH_BYTES = 64  # of a row, of a warp
COLUMNS, ROWS = 32, 16  # of one product of a warp
WARPS = BLOCK // 32
MAX_WIDTH = 4  # groups of columns of a block, because sums are in registers
WAVES = (4, 2)  # blocks for each multiprocessor, at most; fewer blocks read weights less often
_CUDA = cuda_template(__package__, "thin_product.cuh")


@once_for_equal_steps
def thin_product(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a thin product with pointwise ops around it; None for other steps."""
    step = match_product(nodes)
    if step is None or any(v not in step.results for v in outputs):
        return None
    name = "+".join(node.op.name for node in nodes)
    if step.x.dtype is DType.I8:
        return thin_bytes(name, step, outputs, figures)
    if not step.fits(figures):
        return None
    groups = ceil_div(step.columns, COLUMNS)
    chunks = ceil_div(step.depth, step.chunk)
    most = min(MAX_WIDTH, groups, max(1, figures.static_bytes // (COLUMNS * chunks * DEPTH_BYTES)))
    widths = sorted(range(1, most + 1), key=lambda n: (ceil_div(groups, n) * n, abs(n - 3)))[:3]
    kernels = [Kernel(name, (ThinSource(step, outputs, figures, n, w).launch(),)) for n in widths for w in WAVES]
    return with_variants({kernel.key: kernel for kernel in kernels}.values())


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
        depths, column_blocks = ceil_div(step.depth, step.chunk), ceil_div(step.columns, width * COLUMNS)
        weights = depths * width * COLUMNS * DEPTH_BYTES
        phases = ceil_div(weights, self.figures.static_bytes)  # of a turn, each with its weights
        depths = ceil_div(depths, phases)
        tiles = ceil_div(step.rows, ROWS * WARPS)
        turns = ceil_div(tiles, max(1, min(tiles, self.waves * self.figures.processors // column_blocks)))
        row_blocks = ceil_div(tiles, turns)
        cuda = _CUDA.bind(
            TYPE=C_TYPES[step.x.dtype],
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
            COLUMN_BLOCKS=column_blocks,
            ROW_BLOCKS=row_blocks,
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
        return arguments.launch("thin_product", lines, column_blocks * row_blocks)

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
        space, total = self._space(step.y, half, "o"), f"acc[n][j / 2][{2 * half} + j % 2]"
        code = PointwiseCode(space, arguments, f"y{half}_", rounds=False)
        code.define(step.product.result, total)
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
