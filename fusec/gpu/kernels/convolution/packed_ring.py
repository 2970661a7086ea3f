"""Generate a product with packed weights whose warps read them as streams, through rings in shared memory.

A warp multiplies a share of the depth by all columns of its block. It reads its weights and scales as one contiguous
stream, several chunks ahead, and each row once. Copies to shared memory take no registers, so a multiprocessor holds
more warps, and more bytes are requested at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import Arguments, Launch
from fusec.gpu.kernels.convolution.packed_codes import PackedCodes
from fusec.gpu.kernels.convolution.packed_source import PackedSource
from fusec.ir import Node

MAX_TILES = 16  # of a block: their sums are in registers
FEW_TILES = 8  # leave registers for the rows of two chunks
SUM_BYTES = 40 << 10  # of the sums of a block's warps, in static shared memory
CODE_BYTES = 512  # of a chunk
# Warps, chunks in shared memory, blocks of a multiprocessor.
TILINGS = ((32, 4, 1), (16, 6, 2))


def ring_tilings(product: Node, figures: GpuFigures) -> Iterator[tuple[int, int, int, int]]:
    """Yield warps, tiles, chunks in shared memory and blocks of a multiprocessor. All blocks run at the same time.

    Several chunks must not share a scale, and zero points are not read.
    """
    packed = PackedCodes.of(product)
    columns, depth = packed.type.shape
    tiles, chunks = columns // 16, depth // packed.depth
    if packed.zeros is not None or not packed.blocks_of_chunk:
        return
    for warps, stages, resident in TILINGS:
        fitting = (n for n in range(1, MAX_TILES + 1) if tiles % n == 0 and tiles // n <= figures.processors * resident)
        each = next(fitting, None)
        if each is not None and chunks % warps == 0:
            yield warps, each, min(stages, chunks // warps * each + 1), resident


@dataclass(frozen=True, eq=False)
class PackedRing(PackedSource):
    """The launch of such a product.

    stages: chunks of a ring; one less is waited for.
    resident: blocks of a multiprocessor.
    """

    stages: int
    resident: int

    @property
    def _scale_bytes(self) -> int:
        """The bytes of the scales of a chunk."""
        return self.codes.blocks_of_chunk * 16 * self.codes.scales.type.dtype.itemsize

    @property
    def _ring_bytes(self) -> int:
        return self.warps * self.stages * (CODE_BYTES + self._scale_bytes)

    def fits(self, figures: GpuFigures) -> bool:
        """Tell if rings and sums have room in shared memory, and a thread in registers."""
        sums = self.warps * self.size * 4
        together = self.resident * (self._ring_bytes + sums)
        return self.stages > 1 and sums <= SUM_BYTES and together <= figures.dynamic_bytes and self.octets == 1

    def launch(self) -> Launch:
        arguments, packed = Arguments(), self.codes
        own = self.chunks // self.warps
        cuda = self.bound(arguments).bind(
            CODES=arguments.read(packed.codes, packed.stored(self.tiles, self.warps)),
            SCALES=arguments.read(packed.scales, packed.by_chunk(packed.scales, self.tiles, self.warps)),
            STAGES=self.stages,
            OWN_CHUNKS=own,
            CHUNK_BYTES=CODE_BYTES + self._scale_bytes,
            SCALE_BYTES=self._scale_bytes,
            SCALES_OF_THREAD=2 * packed.blocks_of_chunk,
            AHEAD=2 if own % 2 == 0 and self.tiles <= FEW_TILES else 1,
        )
        rows, store = self.load_rows(cuda, arguments), self.store(arguments)
        parts = {"REQUEST": cuda("request"), "LOAD_ROWS": rows, "MULTIPLY": cuda("multiply")}
        lines = cuda(
            "kernel",
            ROW_COORDINATES=self.row_coordinates(),
            LOOPS=cuda("ring", BEGIN=arguments.begin(), **parts),
            SHARE=[],
            ADD_UP=cuda("add_warps"),
            RESULT_COORDINATES=self.result_coordinates(),
            EPILOGUE=store,
        )
        launch = self.finished(lines, arguments, self.groups_of_tiles, self.resident)
        return replace(launch, resident_bytes=self._ring_bytes)
