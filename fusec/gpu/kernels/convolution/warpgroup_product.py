"""Generate convolutions and matmuls of 8-bit integers by warpgroups (four warps), which only Hopper has.

Both operands of `wgmma` are in shared memory, which holds several rounds of the depth. Copies for later rounds and the
products of a round run together. Columns are stored in an order that gives a thread eight neighbours of a result, which
one load or store moves. Sums are i32, and exact. The rows of a convolution are its pixels. Each round of the depth has
one tap of the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, Filling, c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import Arguments, Kernel, Launch, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import (
    PointwiseCode,
    Space,
    can_generate,
    split_index,
    strides_from,
)
from fusec.gpu.kernels.convolution.thin_product import ProductStep, match_product, thin_product
from fusec.ir import DType, Node, TensorType, Value, channels_last
from fusec.ops import Conv, MatMul
from fusec.schedule.program import inputs_of

PIECE = 16  # bytes of the depth that a copy moves
PACK = 8  # neighbours of a result that a thread handles
GROUP_ROWS, GROUP_THREADS = 64, 128  # of a warpgroup
_CUDA = cuda_template(__package__, "warpgroup_product.cuh")


@dataclass(frozen=True)
class Tiling:
    """Sizes of the tiles of a launch.

    groups: warpgroups of a block, with 64 rows each.
    width: columns of a block.
    depth: bytes of the depth of a round.
    stages: rounds in shared memory; copies run two fewer ahead.
    resident: blocks of a multiprocessor, so that one multiplies while another stores.
    """

    groups: int
    width: int
    depth: int
    stages: int
    resident: int


TILINGS = (
    Tiling(2, 128, 64, 6, 2),
    Tiling(2, 192, 128, 5, 1),
    Tiling(2, 256, 128, 4, 1),
    Tiling(2, 64, 128, 4, 2),
    Tiling(1, 128, 128, 4, 2),
    Tiling(2, 128, 128, 4, 1),
)
MOST_TILINGS = 4  # of a product, because each is compiled and timed
NEXT_TO_THIN = 2  # tilings of a product that memory bounds
START = 2048  # clocks of a block without its products, about: it fills shared memory first, and stores last


def warpgroup_product(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of such a product and the pointwise ops after it; None for other steps.

    Where memory bounds the product, the kernels of thin products come before them.
    """
    step = match_bytes(nodes, outputs) if figures.has(wgmma.ARCHITECTURE) else None
    if step is None:
        return None
    name = "+".join(node.op.name for node in nodes)
    sources = [WarpgroupSource(step, outputs, tiling) for tiling in TILINGS]
    fit = [source for source in sources if source.shared_bytes <= figures.dynamic_bytes]
    is_thin = step.depth * step.columns <= figures.intensity * (step.depth + step.columns)
    thin = thin_product(nodes, outputs, figures) if is_thin else None
    best = sorted(fit, key=lambda source: source.cost(figures))[: MOST_TILINGS if thin is None else NEXT_TO_THIN]
    kernels = [Kernel(name, (source.launch(),)) for source in best]
    return with_variants(kernels if thin is None else [replace(thin, others=()), *thin.others, *kernels])


def match_bytes(nodes: Sequence[Node], outputs: Sequence[Value]) -> ProductStep | None:
    """Return a product of i8 by constant weights with its epilogue; None for other steps."""
    product, epilogue = nodes[0], nodes[1:]
    if not isinstance(product.op, (Conv, MatMul)) or not all(map(can_generate, epilogue)):
        return None
    step = match_product(nodes, product) or _window(product, epilogue)
    if step is None or step.x.dtype is not DType.I8 or any(v not in step.results for v in outputs):
        return None
    whole = not step.depth % PIECE and not step.columns % PACK and step.weights.size < 1 << 31
    if not whole or max(step.x.span, step.y.size) >= 1 << 31 or not _is_contiguous(step):
        return None
    return step


def _window(product: Node, epilogue: Sequence[Node]) -> ProductStep | None:
    """Return a convolution of images by windows, channels last; None for other products."""
    (x, w), y, op = (v.type for v in product.operands), product.result.type, product.op
    if not isinstance(op, Conv) or (x.dtype, y.dtype) != (DType.I8, DType.I32) or op.groups != 1 or x.rank != 4:
        return None
    if product.operands[1].literal is None or x.order != channels_last(4) or y.order != channels_last(4) or not y.size:
        return None
    if any(v.type.shape != y.shape for node in epilogue for v in node.results) or w.dtype is not DType.I8:
        return None
    return ProductStep(product, (), epilogue)


def _is_contiguous(step: ProductStep) -> bool:
    """Tell if pieces of rows, and packs of results, are moved by one load or store."""
    own, *others = strides_from(step.x, step.x.rank, step.along)
    moved = [v.type for v in (*inputs_of(step.epilogue), *step.results) if v.type.size != 1]
    packs = (strides_from(type, step.y.rank, step.along) for type in moved)
    if any(inner == 1 and any(s % PACK for s in rest) for inner, *rest in packs):
        return False
    return own == 1 and not any(s % PIECE for s in others)


@dataclass(frozen=True, eq=False)
class WarpgroupSource:
    """The launch of a product."""

    step: ProductStep
    outputs: Sequence[Value]
    tiling: Tiling

    @property
    def height(self) -> int:
        """Rows of a block."""
        return self.tiling.groups * GROUP_ROWS

    def cost(self, figures: GpuFigures) -> int:
        """Estimate the clocks of a launch from its waves of blocks, to order the tilings.

        A multiprocessor multiplies 4096 pairs of bytes in a clock.
        """
        step, tiling = self.step, self.tiling
        blocks = ceil_div(step.columns, tiling.width) * ceil_div(step.rows, self.height)
        waves = ceil_div(blocks, figures.processors * tiling.resident)
        products = self.height * tiling.width * step.depth * self.taps // 4096
        return waves * (tiling.resident * products + START)

    @property
    def pieces(self) -> int:
        """Pieces of a row in a round."""
        return self.tiling.depth // PIECE

    @property
    def shared_bytes(self) -> int:
        return self.tiling.stages * self._stage_bytes

    @property
    def _stage_bytes(self) -> int:
        return self.pieces * (self._lead(self.height) + self._lead(self.tiling.width))

    def _lead(self, rows: int) -> int:
        """Return the bytes from a piece of all rows to the next, so that neighbours are in different banks."""
        return (rows + wgmma.offset(self.pieces)) * PIECE

    @property
    def taps(self) -> int:
        """Places of the window of a convolution."""
        return math.prod(self._window)

    @property
    def _window(self) -> tuple[int, ...]:
        return self.step.product.operands[1].type.shape[2:] if isinstance(self.step.product.op, Conv) else ()

    def launch(self) -> Launch:
        step, tiling, arguments = self.step, self.tiling, Arguments()
        threads = tiling.groups * GROUP_THREADS
        across, down = ceil_div(step.columns, tiling.width), ceil_div(step.rows, self.height)
        chunks = ceil_div(step.depth, tiling.depth)
        together = threads // self.pieces  # rows of which all threads together copy a round
        cuda = _CUDA.bind(
            ACROSS=across,
            WIDTH=tiling.width,
            HEIGHT=self.height,
            OCTETS=tiling.width // 8,
            DEPTH=tiling.depth,
            PIECES=self.pieces,
            STAGES=tiling.stages,
            AHEAD=tiling.stages - 2,
            STAGE_BYTES=self._stage_bytes,
            ROW_LEAD=self._lead(self.height),
            COLUMN_LEAD=self._lead(tiling.width),
            ROWS_BYTES=self.pieces * self._lead(self.height),
            PASS=together,
            ROW_PASSES=self.height // together,
            COLUMN_PASSES=tiling.width // together,
            ROUNDS=chunks * self.taps,
            CHUNKS=chunks,
            CHANNELS=step.depth,
            COLUMNS=step.columns,
            ROWS=step.rows,
            LAST_ROW=step.rows - 1,
            IS_WHOLE=c_bool(step.depth % tiling.depth == 0),
            IS_FULL=c_bool(step.columns % tiling.width == 0),
        )
        cuda = cuda.bind(**self._pointers(arguments))
        stages = [cuda.bind(ROUND=f"{stage}u", TO_STAGE=f"{stage}u") for stage in range(tiling.stages - 2)]
        some = stages[: chunks * self.taps]
        # constant weights come first, before earlier launches end
        first = [line for each in some for line in each("copy_columns")] + self._begin(arguments)
        for each in stages:
            first += [*(self._copy_rows(each) if each in some else []), "copied();"]
        later = cuda.bind(ROUND="later", TO_STAGE="to_stage")
        lines = cuda(
            "kernel",
            ROWS_TO_COPY=self._rows_to_copy(cuda),
            COPY_FIRST=first,
            COPY_LATER=[*later("copy_columns"), *self._copy_rows(later)],
            PRODUCT=f"ENTRY_{tiling.width}",
            STORE_ROW0=self._store_row(cuda, 0, arguments),
            STORE_ROW1=self._store_row(cuda, 1, arguments),
        )
        launch = arguments.launch(
            "warpgroup_product",
            lines,
            across * down,
            threads,
            preamble=wgmma.byte_product(tiling.width),
            resident=tiling.resident,
        )
        return replace(launch, resident_bytes=self.shared_bytes, architecture=wgmma.ARCHITECTURE, early=True)

    def _begin(self, arguments: Arguments) -> list[str]:
        """Wait for earlier launches, whose results are rows and operands of the epilogue."""
        for value in (self.step.product.operands[0], *inputs_of(self.step.epilogue)):
            if value.literal is None and value is not self.step.product.result:
                arguments.read(value)
        return arguments.begin()

    @property
    def _weights(self) -> TensorType:
        """The type of the weights as they are copied: the depth is innermost, and a tap has one of its own."""
        w = self.step.product.operands[1].type
        return w.with_order(channels_last(w.rank)) if self._window else self.step.weights

    def _pointers(self, arguments: Arguments) -> dict[str, Filling]:
        weights = self._weights
        column = weights.strides[0] if self._window else weights.strides[-1]
        tap = f" + tap * {self.step.depth}u" if self.taps > 1 else ""
        return {
            "ROW_POINTER": arguments.read(self.step.product.operands[0]),
            "COLUMN_POINTER": arguments.read(self.step.product.operands[1], weights),
            "COLUMN_AT": f"(first + column) * {column}u + k{tap}",
        }

    def _copy_rows(self, cuda: CudaTemplate) -> list[str]:
        """Begin to copy the rows of a round: the pixels of one tap that are inside of the image."""
        op, x = self.step.product.op, self.step.x
        if self.taps == 1 and not (isinstance(op, Conv) and any(op.pads)):
            return cuda("copy_rows", TAP=[], IS_INSIDE="true", SHIFT=0)
        assert isinstance(op, Conv)
        _, _, height, width = x.shape
        tap = cuda("tap", ACROSS_WINDOW=self._window[1], DOWN_STEP=op.dilations[0], ACROSS_STEP=op.dilations[1])
        inside = f"(u32)(up[u] + y) < {height}u && (u32)(left[u] + x) < {width}u"
        shift = f"y * {x.strides[2]} + x * {x.strides[3]}"
        return cuda("copy_rows", TAP=tap, IS_INSIDE=inside if any(op.pads) else "true", SHIFT=shift)

    def _rows_to_copy(self, cuda: CudaTemplate) -> list[str]:
        step, op = self.step, self.step.product.op
        names: list[str | None] = [None if d == step.along else f"r{d}" for d in range(step.x.rank)]
        window, declared = [], []
        if isinstance(op, Conv):
            pads = dict(zip(range(2, step.x.rank), op.pads, strict=False))
            names = [n if d < 2 else f"({n} * {step.steps[d]}u - {pads[d]}u)" for d, n in enumerate(names)]
            if any(op.pads):
                declared = [f"i32 up[{cuda.holes['ROW_PASSES']}], left[{cuda.holes['ROW_PASSES']}];"]
                window = [f"up[u] = (i32){names[2]};", f"left[u] = (i32){names[3]};"]
        at = Space(step.x.shape, tuple(names)).offset(step.x)
        return [*declared, *cuda("rows_to_copy", ROW_COORDINATES=self._coordinates("row", "r"), AT=at, WINDOW=window)]

    def _coordinates(self, row: str, name: str) -> list[str]:
        y = self.step.y
        return split_index(row, [(f"{name}{d}", y.shape[d]) for d in range(y.rank) if d != self.step.along])

    def _store_row(self, cuda: CudaTemplate, half: int, arguments: Arguments) -> list[str]:
        """Apply the epilogue to eight results of a row, and store them.

        As in cuDNN's graphs, only stored values are rounded.
        """
        step = self.step
        names = tuple("o" if d == step.along else f"y{d}" for d in range(step.y.rank))
        is_short = all(value.type.dtype.itemsize <= 2 for value in self.outputs)
        space = Space(step.y.shape, names, step.along, PACK)
        code = PointwiseCode(space, arguments, f"v{half}_", rounds=False, is_short=is_short)
        code.define(step.product.result, f"sums[n * 4 + j / 2][{2 * half} + j % 2]")
        code.compute(step.epilogue, self.outputs)
        return cuda(
            "store_row",
            OFFSET=half * 8,
            INDEX=f"row{half}",
            RESULT_COORDINATES=self._coordinates(f"row{half}", "y"),
            EPILOGUE=code.lines(),
        )
