"""Generate instance norms in two launches, for channels last.

The first sums chunks of an image. The second visits the elements again; its blocks merge the sums of their image while
the first elements are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, VECTOR_BYTES, Arguments, Kernel, Launch, ceil_div
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space
from fusec.ir import DType, Node, Value
from fusec.ops import InstanceNorm, MaxPool
from fusec.system.dataclass import dataclass

BLOCK, LANES = 256, 32  # threads; vectors of channels that a block visits together, at most
TURNS = 8  # loads of a thread that are issued together
WAVES = 8  # blocks for each multiprocessor, of a launch over a large tensor
_CUDA = cuda_template(__package__, "instance_norm.cuh")


@dataclass(frozen=True)
class Chunking:
    """Units of an image that blocks share.

    count: units of an image.
    each: units of a block.
    """

    count: int
    each: int

    @property
    def number(self) -> int:
        return ceil_div(self.count, self.each)


@dataclass(frozen=True)
class InstanceNormSource:
    """An instance norm, its epilogue, and perhaps a pool or copies last.

    last: the pool, or the resize that copies pixels.
    window: the window of the pool, or how often a pixel is copied.
    """

    anchor: Node
    epilogue: Sequence[Node]
    last: Node | None
    window: tuple[int, int]
    outputs: Sequence[Value]
    figures: GpuFigures

    @property
    def x(self) -> Value:
        return self.anchor.operands[0]

    @property
    def vector(self) -> int:
        return VECTOR_BYTES // self.x.type.dtype.itemsize

    @property
    def lanes(self) -> int:
        """Vectors of channels of a block."""
        packs = self.x.type.shape[1] // self.vector
        return min(LANES, packs & -packs)

    @property
    def columns(self) -> int:
        """Blocks for all channels of a pixel."""
        return self.x.type.shape[1] // (self.vector * self.lanes)

    @property
    def threads(self) -> int:
        """Pixels that a block visits together."""
        return BLOCK // self.lanes

    @property
    def pixels(self) -> int:
        return self.x.type.size // (self.x.type.shape[0] * self.x.type.shape[1])

    @property
    def taps(self) -> int:
        """Pixels that are read for one unit of the result."""
        return math.prod(self.window) if self.last is not None and isinstance(self.last.op, MaxPool) else 1

    @property
    def sums(self) -> Chunking:
        return self._shared_out(self.pixels, TURNS)

    @property
    def write(self) -> Chunking:
        return self._shared_out(self.pixels // self.taps, self.units)

    @property
    def units(self) -> int:
        """Units that a thread writes in one turn."""
        return max(1, TURNS // self.taps)

    def _shared_out(self, count: int, together: int) -> Chunking:
        images = self.x.type.shape[0] * self.columns
        turns = max(together, ceil_div(count, self.threads * max(1, WAVES * self.figures.processors // images)))
        return Chunking(count, self.threads * ceil_div(turns, together) * together)

    @property
    def channels(self) -> int:
        return self.x.type.shape[1]

    @property
    def own(self) -> int:
        """Channels of a block."""
        return self.lanes * self.vector

    @property
    def name(self) -> str:
        nodes = (self.anchor, *self.epilogue, *([] if self.last is None else [self.last]))
        return "+".join(node.op.name for node in nodes)

    @cached_property
    def cuda(self) -> CudaTemplate:
        return _CUDA.bind(
            BLOCK=BLOCK,
            CHANNELS=self.channels,
            COLUMNS=self.columns,
            LANES=self.lanes,
            OWN=self.own,
            PACK=f"Pack<{C_TYPES[self.x.type.dtype]}, {self.vector}>",
            PIXELS=self.pixels,
            TAPS=self.taps,
            THREADS=self.threads,
            TURNS=TURNS,
            UNITS=self.units,
            VECTOR=self.vector,
        )

    def kernel(self) -> Kernel:
        """Return the kernel with two launches: sums of chunks, and the elements."""
        scratch_bytes = 2 * self.x.type.shape[0] * self.sums.number * self.channels * 4
        return Kernel(self.name, (self._sums(), self._write()), scratch_bytes)

    def _space(self, pixel: str) -> Space:
        rank = self.x.type.rank
        names = ("image", "channel", *(None,) * (rank - 3), pixel)  # the last spatial dim stands for all of them
        return Space(self.x.type.shape, names, 1, self.vector)

    def _place(self, chunks: Chunking, backwards: bool) -> list[str]:
        """Declare which image, channels and pixels a block handles.

        backwards: the last image comes first.
        """
        last = f"{self.x.type.shape[0] - 1}u -" if backwards else ""
        return self.cuda("place", NUMBER=chunks.number, FROM_LAST=last, EACH=chunks.each, COUNT=chunks.count)

    def _load(self, image: str, pixel: str = "p") -> str:
        at = self._space(pixel).offset(self.x.type)
        return f"load_pack<{C_TYPES[self.x.type.dtype]}, {self.vector}>({image} + ({at}))"

    def _sums(self) -> Launch:
        """Return the launch that stores the mean of each chunk, and squares around it."""
        arguments = Arguments()
        image, scratch = arguments.read(self.x), arguments.scratch()
        lines = [
            self._sum_memory,
            *self._place(self.sums, False),
            *self._load_centre(image, "begin"),
            *self.cuda("sum_chunk", STEP=self.threads * TURNS, LOAD=self._load(image)),
            *self._store_chunk(scratch, self.sums.number, "float(end - begin)"),
        ]
        grid = self.x.type.shape[0] * self.sums.number * self.columns
        return arguments.launch("instance_sums", lines, grid, BLOCK)

    def _write(self) -> Launch:
        """Return the launch that visits the elements again. They are loaded before the sums are merged."""
        arguments, step = Arguments(), self.threads * self.units
        image, scratch = arguments.read(self.x), arguments.scratch("const float")
        load = self._load_units(image)
        following = ["if (unit < end) {", *load, "}"] if self.write.each > step else []
        lines = [
            self._merge_memory,
            *self._place(self.write, True),
            *self.cuda("declare_units"),
            *load,
            *self._merge_chunks(scratch),
            *self._parameters(arguments),
            *self.cuda("write_units", STORE_UNIT=self._store_unit(arguments), STEP=step, LOAD_NEXT=following),
        ]
        grid = self.x.type.shape[0] * self.write.number * self.columns
        return arguments.launch("instance_written", lines, grid, BLOCK)

    def _load_units(self, image: str) -> list[str]:
        """Load the pixels of the thread's next units into `taken`."""
        return self.cuda("load_units", PIXEL=self._pixel("u"), LOAD=self._load(image))

    def _pixel(self, unit: str, tap: str = "k") -> str:
        """Return the pixel of a unit that belongs to a tap."""
        if self.taps == 1:
            return unit
        (high, wide), across = self.window, self.x.type.shape[-1]
        row = f"({unit} / {across // wide}u * {high}u + {tap} / {wide}u)"
        return f"{row} * {across}u + {unit} % {across // wide}u * {wide}u + {tap} % {wide}u"

    def _store_unit(self, arguments: Arguments) -> list[str]:
        """Compute and store unit `at`, whose pixels are loaded."""
        code = PointwiseCode(self._space("p"), arguments)
        y = self.epilogue[-1].results[0] if self.epilogue else self.anchor.result
        code.define(self.anchor.result, "(wide(taken[i][k].v[j]) - mean[j]) * factor[j] + bias[j]")
        code.compute(self.epilogue)
        if self.last is None:
            for value in self.outputs:
                code.store(value)
            return ["const u32 p = at, k = 0;", *code.lines()]
        result = self.last.result
        if isinstance(self.last.op, MaxPool):
            code.body.append(f"largest[j] = k == 0 ? {code.get(y)} : nmax(largest[j], {code.get(y)});")
            pooled = PointwiseCode(replace(self._space("at"), shape=result.type.shape), arguments, "w")
            pooled.known[result] = "largest[j]"
            pooled.store(result)
            return self.cuda("store_pooled", PIXEL=self._pixel("at"), LARGEST=code.lines(), STORE=pooled.lines())
        code.body.append(f"copied.v[j] = {code.as_stored(y)};")
        kind, (high, wide) = f"{C_TYPES[y.type.dtype]}, {self.vector}", self.window
        place = Space(result.type.shape, ("image", "channel", "row", "column")).offset(result.type)
        return self.cuda(
            "store_copies",
            PACK=f"Pack<{kind}>",
            COPIED=code.lines(),
            COPIES=high * wide,
            ACROSS=self.x.type.shape[-1],
            HIGH=high,
            WIDE=wide,
            STORE=f"store_pack<{kind}>({arguments.write(result)} + ({place}), copied);",
        )

    def _merge_chunks(self, scratch: str) -> list[str]:
        """Merge the chunks of the image for the block's channels. The results are `means` and `factors`."""
        chunks, numbers = self.sums, 2 * self.channels
        rest = chunks.count - (chunks.number - 1) * chunks.each
        return self.cuda(
            "merge_chunks",
            FROM_IMAGE=chunks.number * numbers,
            COLUMN=f"blockIdx.x % {self.columns}u",
            FIRST_MEAN=f"{scratch}[from]",
            CHUNKS=chunks.number,
            SLICES=BLOCK // self.own,
            CHUNK_MEAN=f"{scratch}[from + c * {numbers}u]",
            LAST=chunks.number - 1,
            REST=rest,
            EACH=chunks.each,
            CHUNK_SQUARES=f"{scratch}[from + c * {numbers}u + {self.channels}u]",
            STATISTICS=self._channel_statistics("first_mean"),
        )

    def _channel_statistics(self, around: str) -> list[str]:
        """Compute mean and factor of channel `i` from its sums around a number."""
        op = self.anchor.op
        assert isinstance(op, InstanceNorm)
        return self.cuda("channel_statistics", AROUND=around, EPSILON=literal(op.epsilon, DType.F32))

    @property
    def _merge_memory(self) -> str:
        """Shared memory for `merge_chunks` and its results."""
        own = self.own
        return f"__shared__ float merging[2][{BLOCK // own}][{own}], means[{own}], factors[{own}];"

    def _parameters(self, arguments: Arguments) -> list[str]:
        """Load mean, factor and bias of a thread's channels."""
        scales, biases = (arguments.read(value) for value in self.anchor.operands[1:])
        return self.cuda("load_parameters", SCALES=scales, BIASES=biases)

    def _load_centre(self, image: str, pixel: str) -> list[str]:
        """Load the number that a chunk's squares are summed around."""
        return self.cuda("load_centre", LOAD=self._load(image, pixel))

    def _store_chunk(self, scratch: str, chunks: int, count: str) -> list[str]:
        """Store a chunk's mean, and squares around it, for other blocks."""
        numbers = 2 * self.channels
        return self._merge_warps(self.cuda("store_chunk", COUNT=count, CHUNKS=chunks, NUMBERS=numbers, SCRATCH=scratch))

    def _merge_warps(self, store: list[str]) -> list[str]:
        """Merge the sums of threads for each channel by one thread, which then runs `store`."""
        return self.cuda("merge_warps", WARPS=BLOCK // 32, STORE=store)

    @property
    def _sum_memory(self) -> str:
        """Shared memory for `merge_warps`."""
        return f"__shared__ float sums[{BLOCK // 32}][2][{self.own}], centres[{self.own}];"
