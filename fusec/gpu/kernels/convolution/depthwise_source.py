"""Generate depthwise convolution by blocks that keep some channels of one image.

Filters can stay in registers. Results are also summed over space, for the mean of a squeeze-and-excitation.
Blocks store their sums in scratch memory; a small launch merges those of an image in the order of the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, c_bool, cuda_template
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Launch, ceil_div, compute_type, power_of_two
from fusec.gpu.kernels.codegen.loops import ChunkMerge
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, split_index
from fusec.gpu.kernels.convolution.rolling_sums import RollingSums
from fusec.ir import Node, TensorType, Value
from fusec.ops import Conv, Reduce
from fusec.system.dataclass import dataclass

MAX_LANES = 32  # neighbouring vectors of channels of a block
FULL_LANES = 8  # from here on, a block reads whole cache lines
CUDA = cuda_template(__package__, "depthwise.cuh")


@dataclass(frozen=True)
class DepthwiseTile:
    """Tile that a thread computes in one turn: `vector` channels of `strip` results.

    held: all filters stay in registers for all turns.
    blocks: the number of blocks to aim at; 0 if a thread computes one strip only.
    band: rows of results that a thread computes in one turn with rolling sums; 0: one row, without them.
    """

    vector: int
    strip: int
    held: bool = False
    blocks: int = 0
    band: int = 0


@dataclass(frozen=True, eq=False)
class DepthwiseSource:
    """A convolution with its epilogue, and a sum or mean of the result over space.

    rest: the epilogue.
    outputs: results of the epilogue that are stored.
    """

    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    mean: Node
    tile: DepthwiseTile

    @property
    def y(self) -> TensorType:
        return self.conv.result.type

    @property
    def packs(self) -> int:
        return self.y.shape[1] // self.tile.vector

    @cached_property
    def share(self) -> tuple[int, int]:
        """Vectors of channels of a block, and threads that share the places of each (a power of two).

        Whole warps are chosen, and equally many channels for all blocks, if there are such numbers.
        """
        found: list[tuple[bool, int, int, int]] = []
        for lanes in (n for n in range(1, MAX_LANES + 1) if self.packs % n == 0):
            threads = min(1 << (BLOCK // lanes).bit_length() - 1, max(power_of_two(self.items), 32 // (lanes & -lanes)))
            if lanes * threads % 32 == 0:
                found.append((lanes >= min(FULL_LANES, self.packs), lanes * threads, lanes, threads))
        fallback = min(MAX_LANES, power_of_two(self.packs))
        _, _, lanes, threads = max(found, default=(False, 0, fallback, BLOCK // fallback))
        return lanes, threads

    @property
    def lanes(self) -> int:
        return self.share[0]

    @property
    def threads(self) -> int:
        return self.share[1]

    @property
    def groups(self) -> int:
        return ceil_div(self.packs, self.lanes)

    @property
    def bands(self) -> int:
        return ceil_div(self.y.shape[-2], self.tile.band or 1) if self.y.rank > 3 else 1

    @property
    def strips(self) -> int:
        return ceil_div(self.y.shape[-1], self.tile.strip)

    @property
    def items(self) -> int:
        """Tiles of an image and vector."""
        return math.prod(self.y.shape[2:-2]) * self.bands * self.strips

    @property
    def chunks(self) -> int:
        """Blocks that share the places of an image."""
        wanted = max(1, self.tile.blocks // max(1, self.groups * self.y.shape[0]))
        return ceil_div(self.items, self.each(min(wanted, ceil_div(self.items, self.threads))))

    def each(self, chunks: int) -> int:
        """Return the tiles of a chunk; the last one may have fewer."""
        return ceil_div(ceil_div(self.items, chunks), self.threads) * self.threads

    @property
    def scratch_bytes(self) -> int:
        return self.chunks * self.y.shape[0] * self.y.shape[1] * (8 if self.kind == "double" else 4)

    @property
    def kind(self) -> str:
        return compute_type(self.y.dtype)

    def launches(self) -> tuple[Launch, ...]:
        return self.elements(), self.merge()

    def elements(self) -> Launch:
        """Return the launch that computes each result, and the sums of blocks."""
        y, tile, arguments = self.y, self.tile, Arguments()
        rank, (samples, channels, *_), block = y.rank, y.shape, self.lanes * self.threads
        cuda = CUDA.bind(TYPE=self.kind, VECTOR=tile.vector, STRIP=tile.strip, COLUMN=f"c{rank - 1}")
        window = DepthwiseWindow(self.conv, tile, arguments)
        rolling = RollingSums(self.conv, tile.strip, tile.band) if tile.band else None
        filters, sums = window.filters() if tile.held else [], [] if rolling else window.sums()
        names = tuple(f"c{d}" for d in range(rank))
        code = PointwiseCode(Space(y.shape, names, 1, tile.vector), arguments, rounds=False)
        code.define(self.conv.result, rolling.result if rolling else "acc[s][j]")
        code.compute(self.rest, self.outputs)
        code.body.append(f"if (live) sum[j] += {code.get(self.mean.operands[0])};")
        results = (
            rolling.lines(arguments, code.lines())
            if rolling
            else cuda(
                "tile",
                WINDOW=sums,
                STRIPS_FIT=c_bool(y.shape[-1] % tile.strip == 0),
                WIDTH=y.shape[-1],
                EPILOGUE=code.lines(),
            )
        )
        row = "band" if rolling else f"c{rank - 2}"
        items = [*((f"c{d}", y.shape[d]) for d in range(2, rank - 2)), *[(row, self.bands)] * (rank > 3)]
        lines = cuda(
            "blocks",
            LANES=self.lanes,
            THREADS=self.threads,
            BLOCK_COORDINATES=split_index("block", [("chunk", self.chunks), ("c0", samples), ("group", self.groups)]),
            LANES_FIT=c_bool(self.packs % self.lanes == 0),
            PACKS=self.packs,
            FILTERS=filters,
            EACH=self.each(self.chunks),
            ITEMS=self.items,
            ITEM_COORDINATES=split_index("item", [*items, ("strip", self.strips)]),
            RESULTS=results,
            SUMS=arguments.scratch(self.kind),
            SAMPLES=samples,
            CHANNELS=channels,
        )
        return arguments.launch("depthwise", lines, self.groups * samples * self.chunks, block)

    def merge(self) -> Launch:
        """Return the launch that merges the sums of blocks."""
        arguments, (n, channels) = Arguments(), self.y.shape[:2]
        sums, result = arguments.scratch(f"const {self.kind}"), self.mean.result
        plan = ChunkMerge(n * channels, self.chunks)
        code = PointwiseCode(Space(result.type.shape, ("c0", "c1", *[None] * (result.type.rank - 2))), arguments)
        code.define(result, self.total("acc0[0]"))
        code.store(result)
        lines = CUDA(
            "merge_sums",
            SETUP=plan.setup(self.kind, 1),
            CHUNKS=self.chunks,
            THREADS=plan.threads,
            SUMS=sums,
            COLUMNS=n * channels,
            REDUCE=plan.reduce(1),
            COORDINATES=split_index("c", [("c0", n), ("c1", channels)]),
            RESULT=code.lines(),
        )
        return arguments.launch("depthwise_together", lines, plan.blocks, plan.block)

    def total(self, sum: str) -> str:
        """Turn a sum over space into the result of the reduction."""
        assert isinstance(self.mean.op, Reduce)
        count = math.prod(self.y.shape[2:])
        return f"{sum} / {self.kind}({count})" if self.mean.op.kind == "mean" else sum


@dataclass(frozen=True, eq=False)
class DepthwiseWindow:
    """The sums of products of a tile, and its filters.

    unroll: unroll the loops over the outer dims of the window.
    """

    conv: Node
    tile: DepthwiseTile
    arguments: Arguments
    unroll: bool = True

    @property
    def op(self) -> Conv:
        assert isinstance(self.conv.op, Conv)
        return self.conv.op

    @property
    def taps(self) -> TensorType:
        """The stored filters; channels are innermost if they are constant."""
        w = self.conv.operands[1]
        return w.type if w.literal is None else w.type.with_order((*range(2, w.type.rank), 0, 1))

    @cached_property
    def cuda(self) -> CudaTemplate:
        x, tile = self.conv.operands[0].type, self.tile
        return CUDA.bind(
            TYPE=compute_type(self.conv.result.type.dtype),
            STORED=C_TYPES[x.dtype],
            VECTOR=tile.vector,
            STRIP=tile.strip,
            UNROLL="unroll" if self.unroll else "unroll 1",
        )

    def _along(self, d: int) -> CudaTemplate:
        """Return the template of loops over dim `d` of the window."""
        op = self.op
        return self.cuda.bind(
            TAPS=self.taps.shape[2 + d],
            STRIDE=op.strides[d],
            PAD=op.pads[d],
            DILATION=op.dilations[d],
            SIZE=self.conv.operands[0].type.shape[2 + d],
            PLACE=f"p{d}",
            TAP=f"k{d}",
            COORDINATE=f"c{2 + d}",
        )

    def filters(self) -> list[str]:
        """Load the filters into `weight`: all of them, or those of the loop's current row."""
        taps, n, w = self.taps, self.taps.rank - 2, self.conv.operands[1]
        dims = range(n) if self.tile.held else range(n - 1, n)
        loops = [("#pragma unroll", f"for (int k{d} = 0; k{d} < {taps.shape[2 + d]}; ++k{d})") for d in dims]
        return self.cuda(
            "load_filters",
            WEIGHT_SIZES="weight" + "".join(f"[{taps.shape[2 + d]}]" for d in dims),
            LOOPS=[line for loop in loops for line in loop],
            CONTIGUOUS=c_bool(taps.strides[0] == 1 and self.tile.vector > 1),
            FILTERS=self.arguments.read(w, taps),
            AT=" + ".join([f"c1 * {taps.strides[0]}", *(f"k{d} * {taps.strides[2 + d]}" for d in range(n))]),
            WEIGHT="weight" + "".join(f"[k{d}]" for d in dims),
            CHANNEL_STRIDE=taps.strides[0],
        )

    def sums(self) -> list[str]:
        """Compute the sums of products in `acc`."""
        op, x, tile, n = self.op, self.conv.operands[0], self.tile, self.taps.rank - 2
        weight = "weight" + "".join(f"[k{d}]" for d in range(n - 1) if tile.held)
        stride, dilation = op.strides[-1], op.dilations[-1]
        lines = self._along(n - 1)(
            "image_columns",
            WIDTH_READ=(tile.strip - 1) * stride + (self.taps.shape[-1] - 1) * dilation + 1,
            IMAGE=self.arguments.read(x),
            AT=Space(x.type.shape, ("c0", "c1", *(f"p{d}" for d in range(n)))).offset(x.type),
            WEIGHT=weight,
        )
        if not tile.held:
            lines = [*self.filters(), *lines]
        for d in reversed(range(n - 1)):
            lines = self._along(d)("outer_taps", BODY=lines)
        return self.cuda("sums", ADD_PRODUCTS=lines)
