"""Generate the CUDA C of products whose weights a warp of each block requests some stages ahead."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_file, cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, CLUSTERS, Arguments, Launch, by_value, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import Space, split_index
from fusec.gpu.kernels.product.few_rows.few_rows import RowsStep
from fusec.ir import Node, TensorType, Value
from fusec.ops import RmsNorm
from fusec.system.dataclass import dataclass

WARPS = 8  # that multiply
LEAST_EXPONENT = -14  # of a norm's scale: the reciprocal of the power is a number of 16 bits
TILE, OCTET, STEP = 16, 8, 32  # columns of a tile, rows of one product of a warp, depth that a thread's loads span
_CUDA = cuda_template(__package__, "streamed_weights.cuh")
_RING = cuda_file("fusec.gpu.kernels.product", "stage_ring.cuh")


def _pitch(stage_depth: int) -> int:
    """Return the bytes from one row of a stage to the next, so that eight threads read different banks."""
    return ceil_div(stage_depth * 2, 128) * 128 + 64 if stage_depth > STEP else 64


def bytes_of_stage(tiles: int, stage_depth: int, rows: int) -> int:
    return tiles * TILE * stage_depth * 2 + rows * _pitch(stage_depth)


def scale_exponent(scale: Value) -> int:
    """Return the least power of two that a constant scale does not reach, as an exponent; 0 for other numbers.

    Numbers of 16 bits have both that power and its reciprocal.
    """
    assert scale.literal is not None
    largest = float(np.abs(scale.literal.array.astype(np.float32)).max())
    return max(LEAST_EXPONENT, math.frexp(largest)[1]) if 0 < largest < math.inf else 0


@dataclass(frozen=True, eq=False)
class StreamSource:
    """The launch of one or two products.

    tiles: tiles of 16 columns of each product, for a block.
    parts: blocks of a cluster, which share the depth.
    stage_depth, stages: depth of a stage, and number of stages, of the ring in shared memory.
    """

    step: RowsStep
    tiles: int
    parts: int
    stage_depth: int
    stages: int

    @property
    def stage_bytes(self) -> int:
        copied = self.step.rows + (self.step.norm is not None)
        return bytes_of_stage(self.tiles * len(self.step.products), self.stage_depth, copied)

    @property
    def turns(self) -> int:
        """The stages that a block multiplies."""
        return self.step.x.type.shape[-1] // (self.parts * self.stage_depth)

    @property
    def size(self) -> int:
        """The results of a block's columns, of each product."""
        return self.step.rows * TILE * self.tiles

    @property
    def blocks(self) -> int:
        return self.step.y.shape[-1] // (TILE * self.tiles) * self.parts

    @property
    def squares(self) -> int:
        """The sums of squares that a block sends, in whole packs."""
        return 0 if self.step.norm is None else ceil_div(self.step.rows, 4) * 4

    @property
    def ring_bytes(self) -> int:
        """The stages, or the sums that take their place if they are larger."""
        sums_bytes = 4 * (self.size * len(self.step.products) + self.squares)
        return ceil_div(max(self.stages * self.stage_bytes, sums_bytes), 16) * 16

    @property
    def box_at(self) -> int:
        """The place of what the blocks of a cluster send: after the barriers of the stages, and one more."""
        return self.ring_bytes + ceil_div(2 * self.stages + 1, 2) * 16

    def weights(self, product: Node) -> TensorType:
        """Return the type of the weights as they are stored: in the order of blocks, stages, tiles and threads.

        Thread 4g + q multiplies columns g and g + 8 of a tile, and 8 neighbours along the depth.
        """
        w = product.operands[1].type
        depth = (self.parts, self.turns, self.stage_depth // STEP, 4, 2, 2, 2)
        columns = (self.step.y.shape[-1] // (TILE * self.tiles), self.tiles, 2, 8)
        part, turn, step, q, half, later, pair, block, tile, high, g = range(11)
        order = (block, part, turn, step, tile, half, g, q, later, high, pair)
        return TensorType((*depth, *columns), w.dtype, order)

    def launch(self) -> Launch:
        arguments, count, threads = Arguments(), len(self.step.products), 32 * (WARPS + 1)
        product_bytes = self.tiles * TILE * self.stage_depth * 2
        cuda = _CUDA.bind(
            TYPE=C_TYPES[self.step.x.type.dtype],
            WARPS=WARPS,
            THREADS=threads,
            TILES=self.tiles,
            ALL_TILES=self.tiles * count,
            OWN=ceil_div(self.tiles * count, WARPS),
            OCTETS=ceil_div(self.step.rows, OCTET),
            ROWS=self.step.rows,
            COPIED_ROWS=self.step.rows + (self.step.norm is not None),
            DEPTH=self.step.x.type.shape[-1],
            PRODUCTS=count,
            PARTS=self.parts,
            PART_DEPTH=self.step.x.type.shape[-1] // self.parts,
            STAGE_DEPTH=self.stage_depth,
            STAGES=self.stages,
            TURNS=self.turns,
            EARLY=min(self.stages, self.turns),
            RING_BYTES=self.ring_bytes,
            STAGE_BYTES=self.stage_bytes,
            WEIGHT_BYTES=product_bytes * count,
            PRODUCT_BYTES=product_bytes,
            ROW_PITCH=_pitch(self.stage_depth),
            WIDTH=TILE * self.tiles,
            SIZE=self.size,
            EACH=self.size // self.parts,
            BOX_AT=self.box_at,
        )
        names = [f"x{d}" for d in range(self.step.x.type.rank - 1)]
        cuda = cuda.bind(
            INPUT=arguments.read(self.step.x),
            INPUT_PLACE=Space(self.step.x.type.shape, (*names, "k")).offset(self.step.x.type),
            ROW_COORDINATES=split_index("row", list(zip(names, self.step.x.type.shape, strict=False))),
        )
        copies = cuda("expect")
        for number, product in enumerate(self.step.products):
            pointer = arguments.read(product.operands[1], self.weights(product))
            copies += cuda("copy_product", WEIGHTS=pointer, PLACE=number * product_bytes)
        cuda = self._normalise(cuda, arguments)
        store = self._store(cuda, arguments)
        cuda = cuda.bind(COPY_WEIGHTS=copies)
        lines = cuda(
            "kernel",
            BEGIN_CLUSTER=cuda("begin_cluster") if self.parts > 1 else [],
            BEGIN=arguments.begin(),  # after all pointers are named
            COPY=cuda("copy"),
            MULTIPLY=cuda("multiply"),
            STORE=store,
        )
        launch = arguments.launch(
            "streamed_weights", lines, self.blocks, threads, preamble=[_RING], resident=1, cluster=self.parts
        )
        nbytes = self.box_at + (4 * (self.size * count + self.parts * self.squares) if self.parts > 1 else 0)
        return replace(launch, resident_bytes=nbytes, architecture=CLUSTERS, dependent=True)

    def _normalise(self, cuda: CudaTemplate, arguments: Arguments) -> CudaTemplate:
        """Return the fragments with the statements that normalise the rows."""
        if self.step.norm is None:
            holes = ("SQUARES", "LOAD_SCALE", "NORMALISE_ROW", "STORE_SQUARES", "ADD_SQUARES", "DIVIDE", "SEND_SQUARES")
            empty: dict[str, list[str]] = {hole: [] for hole in holes}
            return cuda.bind(COPIED_PIECE=cuda("copied_piece"), FACTOR="1.0f", SQUARES_SENT=0, **empty)
        assert isinstance(self.step.norm.op, RmsNorm)
        exponent = scale_exponent(self.step.norm.operands[1])
        cuda = cuda.bind(
            NORM_SCALE=arguments.read(self.step.norm.operands[1]),
            EPSILON=f"{self.step.norm.op.epsilon!r}f",
            DOWN=f"bits_to_f32({by_value((127 - exponent) << 23)})",
            UP=f"bits_to_f32({by_value((127 + exponent) << 23)})",
            SQUARE_PACKS=ceil_div(self.step.rows, 4),
        )
        return cuda.bind(
            SQUARES=cuda("squares"),
            LOAD_SCALE=cuda("load_scale"),
            NORMALISE_ROW=cuda("normalise_row"),
            STORE_SQUARES=cuda("store_squares"),
            ADD_SQUARES=cuda("add_squares"),
            COPIED_PIECE=cuda("copied_piece_or_scale"),
            FACTOR="factor",
            SQUARES_SENT=self.squares,
            DIVIDE=cuda("divide" if self.parts == 1 else "divide_in_cluster"),
            SEND_SQUARES=cuda("send_squares"),
        )

    def _store(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        """Add up the parts of results, apply the epilogue and store them. Only what is stored is rounded."""
        sums: list[str] = []
        for number in range(len(self.step.products)):
            sums += cuda("take_sum" if self.parts == 1 else "add_parts", SUM=f"sum{number}", NUMBER=number)
        sizes = [(f"y{d}", size) for d, size in enumerate(self.step.y.shape[:-1])]
        return cuda(
            "store" if self.parts == 1 else "store_in_cluster",
            ADD_UP=sums,
            RESULT_COORDINATES=split_index("at", sizes),
            EPILOGUE=self.step.store(arguments),
        )
