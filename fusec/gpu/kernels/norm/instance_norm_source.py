"""Generate instance norms in two launches, for channels last.

The first sums chunks of an image. The second visits the elements again; its blocks merge the sums of their image while
the first elements are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen.gpu_figures import PROCESSORS
from fusec.gpu.kernels.codegen.kernel import C_TYPES, VECTOR_BYTES, Arguments, Kernel, Launch, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import unrolled_loops
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space
from fusec.ir import DType, Node, Value
from fusec.ops import InstanceNorm, MaxPool

BLOCK, LANES = 256, 32  # threads; vectors of channels that a block visits together, at most
BLOCKS = 8 * PROCESSORS  # of a launch over a large tensor


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
    turns: loads of a thread that are issued together.
    block: threads of a block.
    most: vectors of channels that a block visits together, at most.
    """

    anchor: Node
    epilogue: Sequence[Node]
    last: Node | None
    window: tuple[int, int]
    outputs: Sequence[Value]
    turns: int
    block: int = BLOCK
    most: int = LANES

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
        return min(self.most, packs & -packs)

    @property
    def columns(self) -> int:
        """Blocks for all channels of a pixel."""
        return self.x.type.shape[1] // (self.vector * self.lanes)

    @property
    def threads(self) -> int:
        """Pixels that a block visits together."""
        return self.block // self.lanes

    @property
    def pixels(self) -> int:
        return self.x.type.size // (self.x.type.shape[0] * self.x.type.shape[1])

    @property
    def taps(self) -> int:
        """Pixels that are read for one unit of the result."""
        return math.prod(self.window) if self.last is not None and isinstance(self.last.op, MaxPool) else 1

    @property
    def sums(self) -> Chunking:
        return self._shared_out(self.pixels, self.turns)

    @property
    def write(self) -> Chunking:
        return self._shared_out(self.pixels // self.taps, self.units)

    @property
    def units(self) -> int:
        """Units that a thread writes in one turn."""
        return max(1, self.turns // self.taps)

    def _shared_out(self, count: int, together: int) -> Chunking:
        images = self.x.type.shape[0] * self.columns
        turns = max(together, ceil_div(count, self.threads * max(1, BLOCKS // images)))
        return Chunking(count, self.threads * ceil_div(turns, together) * together)

    @property
    def channels(self) -> int:
        return self.x.type.shape[1]

    def kernel(self) -> Kernel:
        """Return the kernel with two launches: sums of chunks, and the elements."""
        scratch_bytes = 2 * self.x.type.shape[0] * self.sums.number * self.channels * 4
        return Kernel(self._name, (self._sums(), self._write()), scratch_bytes)

    def _space(self, pixel: str) -> Space:
        rank = self.x.type.rank
        names = ("image", "channel", *(None,) * (rank - 3), pixel)  # the last spatial dim stands for all of them
        return Space(self.x.type.shape, names, 1, self.vector)

    def _setup(self, chunks: Chunking, backwards: bool) -> list[str]:
        """Declare which image, channels and pixels a block handles.

        backwards: the last image comes first.
        """
        images, v = self.x.type.shape[0], self.vector
        return [
            f"const u32 lane = threadIdx.x % {self.lanes}u, t = threadIdx.x / {self.lanes}u;",
            f"const u32 place = blockIdx.x / {self.columns}u, chunk = place % {chunks.number}u;",
            f"const u32 image = {f'{images - 1}u - ' if backwards else ''}place / {chunks.number}u;",
            f"const u32 first_channel = blockIdx.x % {self.columns}u * {self._own}u;",
            f"const u32 channel = first_channel + lane * {v}u;",
            f"const u32 begin = chunk * {chunks.each}u;",
            f"const u32 end = begin + {chunks.each}u < {chunks.count}u ? begin + {chunks.each}u : {chunks.count}u;",
        ]

    @property
    def _pack(self) -> str:
        return f"Pack<{C_TYPES[self.x.type.dtype]}, {self.vector}>"

    def _load(self, image: str, pixel: str) -> str:
        at = self._space(pixel).offset(self.x.type)
        return f"load_pack<{C_TYPES[self.x.type.dtype]}, {self.vector}>({image} + ({at}))"

    def _load_turns(self, image: str) -> list[str]:
        """Load the next turns of a thread into `taken`. Past the end it loads the first pixel again."""
        return [
            "#pragma unroll",
            f"for (int i = 0; i < {self.turns}; ++i) {{",
            f"const u32 at = pixel + i * {self.threads}u, p = at < end ? at : begin;",
            f"taken[i] = {self._load(image, 'p')};",
            "}",
        ]

    def _sums(self) -> Launch:
        """Return the launch that stores the mean of each chunk, and squares around it."""
        arguments, v = Arguments(), self.vector
        image, scratch = arguments.read(self.x), arguments.scratch()
        lines = [self._sum_memory, *self._setup(self.sums, False)]
        lines += self._load_centre(image, "begin")
        lines += [f"for (u32 pixel = begin + t; pixel < end; pixel += {self.threads * self.turns}u) {{"]
        lines += [f"{self._pack} taken[{self.turns}];", *self._load_turns(image)]
        lines += ["#pragma unroll", f"for (int i = 0; i < {self.turns}; ++i) {{"]
        lines += [f"const bool live = pixel + i * {self.threads}u < end;"]
        lines += [*unrolled_loops([("j", v)], *self._accumulate("taken[i].v[j]")), "}", "}"]
        lines += self._store_chunk(scratch, self.sums.number, "float(end - begin)")
        grid = self.x.type.shape[0] * self.sums.number * self.columns
        return arguments.launch("instance_sums", lines, grid, self.block)

    def _write(self) -> Launch:
        arguments = Arguments()
        image, scratch = arguments.read(self.x), arguments.scratch("const float")
        lines = [self._merge_memory, *self._setup(self.write, True)]
        lines += [
            f"{self._pack} taken[{self.units}][{self.taps}];",
            "u32 unit = begin + t;",
            *self._load_windows(image),
        ]
        lines += self._merge_chunks(self.sums, f"blockIdx.x % {self.columns}u", lambda at: f"{scratch}[{at}]")
        lines += self._parameters(arguments)
        lines += ["while (unit < end) {", "#pragma unroll", f"for (int i = 0; i < {self.units}; ++i) {{"]
        lines += [
            f"const u32 at = unit + i * {self.threads}u;",
            "if (at < end) {",
            *self._store_unit(arguments),
            "}",
            "}",
        ]
        lines.append(f"unit += {self.threads * self.units}u;")
        if self.write.each > self.threads * self.units:
            lines += ["if (unit < end) {", *self._load_windows(image), "}"]
        lines += ["}"]
        grid = self.x.type.shape[0] * self.write.number * self.columns
        return arguments.launch("instance_written", lines, grid, self.block)

    def _load_windows(self, image: str) -> list[str]:
        """Load the pixels of the thread's next units into `taken`."""
        return [
            *("#pragma unroll", f"for (int i = 0; i < {self.units}; ++i) {{"),
            f"const u32 at = unit + i * {self.threads}u, u = at < end ? at : begin;",
            *("#pragma unroll", f"for (u32 k = 0; k < {self.taps}u; ++k) {{"),
            f"const u32 p = {self._pixel('u')};",
            f"taken[i][k] = {self._load(image, 'p')};",
            *("}", "}"),
        ]

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
        for node in self.epilogue:
            code.apply(node)
        if self.last is None:
            for value in self.outputs:
                code.store(value)
            return ["const u32 p = at, k = 0;", *code.lines()]
        result, kind, v = self.last.result, C_TYPES[y.type.dtype], self.vector
        (high, wide), across = self.window, self.x.type.shape[-1]
        if isinstance(self.last.op, MaxPool):
            code.body.append(f"largest[j] = k == 0 ? {code.get(y)} : nmax(largest[j], {code.get(y)});")
            lines = [f"float largest[{v}];", "#pragma unroll", f"for (u32 k = 0; k < {self.taps}u; ++k) {{"]
            lines += [f"const u32 p = {self._pixel('at')};", *code.lines(), "}"]
            pooled = PointwiseCode(replace(self._space("at"), shape=result.type.shape), arguments, "w")
            pooled.known[result] = "largest[j]"
            pooled.store(result)
            return [*lines, *pooled.lines()]
        code.body.append(f"copied.v[j] = {code.as_stored(y)};")
        lines = ["const u32 p = at, k = 0;", f"Pack<{kind}, {v}> copied;", *code.lines()]
        lines += ["#pragma unroll", f"for (u32 copy = 0; copy < {high * wide}u; ++copy) {{"]
        lines.append(f"const u32 row = at / {across}u * {high}u + copy / {wide}u;")
        lines.append(f"const u32 column = at % {across}u * {wide}u + copy % {wide}u;")
        place = Space(result.type.shape, ("image", "channel", "row", "column")).offset(result.type)
        return [*lines, f"store_pack<{kind}, {v}>({arguments.write(result)} + ({place}), copied);", "}"]

    def _merge_chunks(self, chunks: Chunking, column: str, part: Callable[[str], str]) -> list[str]:
        """Merge the chunks of the image for the block's channels, around the first chunk's mean.

        The results are `means` and `factors`.

        part: returns the number at a place of the scratch memory.
        """
        own, c2 = self._own, 2 * self.channels
        slices, taps, rest = (
            self.block // own,
            self.pixels // chunks.count,
            chunks.count - (chunks.number - 1) * chunks.each,
        )
        total = f"for (u32 w = 0; w < {slices}u; ++w) {{ sum0 += merging[0][w][i]; sum1 += merging[1][w][i]; }}"
        return [
            f"const u32 mine = threadIdx.x % {own}u, slice = threadIdx.x / {own}u;",
            f"const u32 from = image * {chunks.number * c2}u + {column} * {own}u + mine;",
            f"const float first_mean = {part('from')};",
            "float part0 = 0.0f, part1 = 0.0f;",
            "#pragma unroll 8",
            f"for (u32 c = slice; c < {chunks.number}u; c += {slices}u) {{",
            f"const float d = {part(f'from + c * {c2}u')} - first_mean;",
            f"const float count = c == {chunks.number - 1}u ? {rest * taps}.0f : {chunks.each * taps}.0f;",
            "part0 += count * d;",
            f"part1 += {part(f'from + c * {c2}u + {self.channels}u')} + count * d * d;",
            "}",
            "merging[0][slice][mine] = part0;",
            "merging[1][slice][mine] = part1;",
            "__syncthreads();",
            f"if (threadIdx.x < {own}u) {{",
            *("const u32 i = threadIdx.x;", "float sum0 = 0.0f, sum1 = 0.0f;", "#pragma unroll", total),
            *self._channel_statistics("first_mean"),
            "}",
            "__syncthreads();",
        ]

    def _channel_statistics(self, around: str) -> list[str]:
        """Compute mean and factor of channel `i` from its sums around a number."""
        op = self.anchor.op
        assert isinstance(op, InstanceNorm)
        return [
            f"const float mean = sum0 / {self.pixels}.0f;",
            # rounding may have left a negative number; NaN stays NaN
            "const float squares = sum1 - sum0 * mean, spread = squares < 0.0f ? 0.0f : squares;",
            f"means[i] = {around} + mean;",
            f"const float variance = spread / {self.pixels}.0f;",
            f"factors[i] = 1.0f / sqrt(variance + {literal(op.epsilon, DType.F32)});",
        ]

    @property
    def _merge_memory(self) -> str:
        """Shared memory for `_merge_chunks` and its results."""
        own = self._own
        return f"__shared__ float merging[2][{self.block // own}][{own}], means[{own}], factors[{own}];"

    def _parameters(self, arguments: Arguments) -> list[str]:
        """Load mean, factor and bias of a thread's channels."""
        v, (scales, biases) = self.vector, (arguments.read(value) for value in self.anchor.operands[1:])
        return [
            f"float mean[{v}], factor[{v}], bias[{v}];",
            *("#pragma unroll", f"for (int j = 0; j < {v}; ++j) {{"),
            f"mean[j] = means[lane * {v}u + j];",
            f"factor[j] = factors[lane * {v}u + j] * wide({scales}[channel + j]);",
            f"bias[j] = wide({biases}[channel + j]);",
            "}",
        ]

    @property
    def _own(self) -> int:
        """Channels of a block."""
        return self.lanes * self.vector

    @property
    def _name(self) -> str:
        nodes = (self.anchor, *self.epilogue, *([] if self.last is None else [self.last]))
        return "+".join(node.op.name for node in nodes)

    def _load_centre(self, image: str, pixel: str) -> list[str]:
        """Load the number that a chunk's squares are summed around: its first element, if that is finite."""
        return [
            f"float around[{self.vector}], acc0[{self.vector}], acc1[{self.vector}];",
            f"const {self._pack} first = {self._load(image, pixel)};",
            *("#pragma unroll", f"for (int j = 0; j < {self.vector}; ++j) {{"),
            "const float e = wide(first.v[j]);",
            *("around[j] = fabs(e) < INFINITE ? e : 0.0f;", "acc0[j] = acc1[j] = 0.0f;"),
            "}",
        ]

    def _accumulate(self, element: str) -> list[str]:
        """Add an element to the sums if it is `live`."""
        return [
            f"const float d = live ? wide({element}) - around[j] : 0.0f;",
            *("acc0[j] += d;", "acc1[j] += d * d;"),
        ]

    def _store_chunk(self, scratch: str, chunks: int, count: str) -> list[str]:
        """Store a chunk's mean, and squares around it, for other blocks."""
        return self._merge_warps(
            f"const float mean = sum0 / {count};",
            f"const u32 at = (image * {chunks}u + chunk) * {2 * self.channels}u + first_channel + i;",
            f"{scratch}[at] = centres[i] + mean;",
            f"{scratch}[at + {self.channels}u] = sum1 - sum0 * mean;",
        )

    def _merge_warps(self, *then: str) -> list[str]:
        """Merge the sums of threads within warps, then for each channel by one thread, which runs `then`."""
        v, own, warps = self.vector, self._own, self.block // 32
        total = f"for (u32 w = 0; w < {warps}u; ++w) {{ sum0 += sums[w][0][i]; sum1 += sums[w][1][i]; }}"
        return [
            *("#pragma unroll", f"for (int s = 16; s >= {self.lanes}; s /= 2) {{"),
            *unrolled_loops(
                [("j", v)],
                "acc0[j] += __shfl_xor_sync(0xffffffffu, acc0[j], s);",
                "acc1[j] += __shfl_xor_sync(0xffffffffu, acc1[j], s);",
            ),
            "}",
            f"if (threadIdx.x % 32u < {self.lanes}u) {{",
            *unrolled_loops(
                [("j", v)],
                f"sums[threadIdx.x / 32u][0][lane * {v}u + j] = acc0[j];",
                f"sums[threadIdx.x / 32u][1][lane * {v}u + j] = acc1[j];",
                f"if (threadIdx.x < 32u) centres[lane * {v}u + j] = around[j];",
            ),
            "}",
            "__syncthreads();",
            f"for (u32 i = threadIdx.x; i < {own}u; i += {self.block}u) {{",
            *("float sum0 = 0.0f, sum1 = 0.0f;", "#pragma unroll", total),
            *then,
            "}",
        ]

    @property
    def _sum_memory(self) -> str:
        """Shared memory for `_merge_warps`."""
        return f"__shared__ float sums[{self.block // 32}][2][{self._own}], centres[{self._own}];"
