"""Generate a product with packed weights whose warps read them as streams, through rings in shared memory.

A warp multiplies a share of the depth by all columns of its block. It reads its weights and scales as one contiguous
stream, several chunks ahead, and each row once. Copies to shared memory take no registers, so a multiprocessor holds
more warps, and more bytes are requested at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate
from fusec.gpu.kernels.codegen.gpu_figures import REGISTERS, GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Launch, ceil_div
from fusec.gpu.kernels.product.packed.packed_codes import PackedCodes
from fusec.gpu.kernels.product.packed.packed_source import OCTET, PackedSource
from fusec.gpu.kernels.product.row_norm import BlockRows
from fusec.ir import Node, Value
from fusec.system.dataclass import dataclass

MAX_TILES = 16  # of a block
FEW_SUMS = 16  # of a thread, which leave registers for the rows of two chunks
STATIC_BYTES = 34 << 10  # of the sums of a block's warps, at most, in static shared memory
CODE_BYTES = 512  # of a chunk
# Warps, chunks in shared memory, blocks of a multiprocessor: for up to 8 rows, and for 16.
TILINGS = {1: ((32, 4, 1), (16, 8, 1), (16, 6, 2)), 2: ((16, 8, 1),)}


def packed_rings(
    products: Sequence[Node],
    epilogue: Sequence[Node],
    outputs: Sequence[Value],
    figures: GpuFigures,
    norm: Node | None,
) -> Iterator[PackedRing]:
    """Yield the forms of one product, or of two of the same rows, in which all blocks run at the same time.

    norm: an RMS norm of the rows, which each block computes.
    """
    packed = PackedCodes.of(products[0])
    columns, depth = packed.type.shape
    tiles, chunks = columns // 16, depth // packed.depth
    octets = ceil_div(products[0].result.type.size, columns * OCTET)
    for warps, stages, resident in TILINGS[octets]:
        fitting = (n for n in range(1, MAX_TILES + 1) if tiles % n == 0 and tiles // n <= figures.processors * resident)
        each = next(fitting, None)
        if each is not None and chunks % warps == 0:
            stages = min(stages if len(products) == 1 else (stages + 2) // 2, chunks // warps * each + 1)
            ring = PackedRing(products[0], epilogue, outputs, warps, each, stages, resident, products[1:], norm)
            if ring.fits(figures):
                yield ring


@dataclass(frozen=True, eq=False)
class PackedRing(PackedSource):
    """The launch of a packed product.

    stages: chunks of a ring, of each product; one less is waited for.
    resident: blocks of a multiprocessor.
    others: a second product of the same rows, or none.
    norm: norm of the rows, which the products read from shared memory; None without one.
    """

    stages: int
    resident: int
    others: Sequence[Node]
    norm: Node | None

    @property
    def _products(self) -> tuple[Node, ...]:
        return (self.product, *self.others)

    @property
    def _scale_bytes(self) -> int:
        """The bytes of the scales of a chunk."""
        return self.codes.blocks_of_chunk * 16 * self.codes.scales.type.dtype.itemsize

    @property
    def _zero_bytes(self) -> int:
        """The bytes of the zero points of a chunk."""
        return 0 if self.codes.zeros is None else self.codes.blocks_of_chunk * 2 * self.codes.bits

    @property
    def _chunk_bytes(self) -> int:
        return CODE_BYTES + self._scale_bytes + ceil_div(self._zero_bytes, 16) * 16

    @property
    def _sum_bytes(self) -> int:
        return self.warps * self.size * 4 * len(self._products)

    @property
    def _ring_bytes(self) -> int:
        return self.warps * self.stages * self._chunk_bytes * len(self._products)

    @property
    def resident_bytes(self) -> int:
        """Dynamic shared memory: the rings and the normalised rows, and later the sums, if they are large."""
        rows_bytes = 0 if self.norm is None else self.x.nbytes
        first = self._ring_bytes + rows_bytes
        return first if self._sum_bytes <= STATIC_BYTES else max(first, self._sum_bytes)

    @property
    def _sums_of_thread(self) -> int:
        return self.tiles * self.octets * (2 if self.rows == 1 else 4) * len(self._products)

    def fits(self, figures: GpuFigures) -> bool:
        """Tell if rings and sums have room in shared memory, and the sums of a thread in half of its registers."""
        static = self._sum_bytes if self._sum_bytes <= STATIC_BYTES else 0
        static += 0 if self.norm is None else 4 * self.warps * self.rows  # of the squares
        registers = REGISTERS // (32 * self.warps * self.resident)
        has_room = self.resident * (self.resident_bytes + static) <= figures.dynamic_bytes
        return self.stages > 1 and has_room and self._sums_of_thread <= registers // 2

    def launch(self) -> Launch:
        arguments, packed, count = Arguments(), self.codes, len(self._products)
        own = self.chunks // self.warps
        cuda = self.bound("zeros").bind(
            CODES=arguments.read(packed.codes, packed.stored(self.tiles, self.warps)),
            STAGES=self.stages,
            OWN_CHUNKS=own,
            STAGE_BYTES=self._chunk_bytes * count,
            CHUNK_BYTES=self._chunk_bytes,
            CHUNKS_OF_BLOCK=packed.chunks_of_block,
            SCALE_BYTES=self._scale_bytes,
            SCALE_STEPS=packed.scales.type.shape[1] // packed.blocks_of_chunk,
            SCALES_OF_THREAD=2 * packed.blocks_of_chunk,
            ZERO_BYTES=self._zero_bytes,
            ZERO_TYPE=C_TYPES[packed.type.dtype],
            AHEAD=2 if own % 2 == 0 and self._sums_of_thread <= FEW_SUMS else 1,
            ALL_TILES=self.tiles * count,
            ALL_SUMS=self.size * count,
        )
        streams, copies = list[str](), list[str]()
        for number, product in enumerate(self._products):
            stream = self._stream(cuda, arguments, number, PackedCodes.of(product))
            streams += stream("stream")
            copies += stream("copy")
        cuda = cuda.bind(STAGE_ZEROS=[] if packed.zeros is None else cuda("stage_zeros"))
        normalise = self._normalise(cuda, arguments)
        rows, store = self.load_rows(cuda, arguments), self.store(arguments)
        parts = {"REQUEST": cuda("request", COPIES=copies), "LOAD_ROWS": rows, "MULTIPLY": cuda("multiply")}
        lines = cuda(
            "kernel",
            ROW_COORDINATES=self.row_coordinates(),
            LOOPS=cuda("ring", STREAMS=streams, BEGIN=arguments.begin(), NORMALISE=normalise, **parts),
            SUMS=cuda("sums" if self._sum_bytes <= STATIC_BYTES else "sums_in_rings"),
            SHARE=[],
            ADD_UP=cuda("add_warps" if count == 1 else "add_warps_of_two"),
            RESULT_COORDINATES=self.result_coordinates(),
            EPILOGUE=store,
        )
        launch = self.finished(lines, arguments, self.groups_of_tiles, self.resident)
        return replace(launch, resident_bytes=self.resident_bytes)

    def _normalise(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        """Return the statements that leave the normalised rows in shared memory."""
        if self.norm is None:
            return []
        rows = BlockRows(self.norm.operands[0], self.norm, self.warps)
        lines = [*rows.load(arguments), *rows.share("normalised")]
        return cuda("normalise", RING_BYTES=self._ring_bytes, NORMED_ROWS=lines)

    def load_rows(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        if self.norm is None:
            return super().load_rows(cuda, arguments)
        lines: list[str] = []
        for octet in range(self.octets):
            each = cuda.bind(OCTET=octet, ROW=f"row{octet}", ROW_DEPTH=self.x.shape[-1])
            lines += each("load_row", LOAD_NEIGHBOURS=each("load_normalised"))
        return lines

    def _stream(self, cuda: CudaTemplate, arguments: Arguments, number: int, packed: PackedCodes) -> CudaTemplate:
        """Return the fragments that request the weights of a product."""
        zeros = packed.zeros
        cuda = cuda.bind(
            CODES=arguments.read(packed.codes, packed.stored(self.tiles, self.warps)),
            SCALES=arguments.read(packed.scales, packed.by_chunk(packed.scales, self.tiles)),
            ZEROS="" if zeros is None else arguments.read(zeros, packed.by_chunk(zeros, self.tiles)),
            MORE=f"more{number}",
            MORE_SCALES=f"more_scales{number}",
            MORE_ZEROS=f"more_zeros{number}",
            PLACE=number * self._chunk_bytes,
        )
        first, copy = ([], []) if zeros is None else (cuda("first_zeros"), cuda("copy_zeros"))
        return cuda.bind(FIRST_ZEROS=first, COPY_ZEROS=copy)

    def sums(self) -> list[tuple[Value, str]]:
        names = zip((product.result for product in self._products), ("sum", "second_sum"), strict=False)
        return list(names)
