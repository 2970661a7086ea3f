"""Instance norm where channels lie innermost: sums of chunks of an image, read once; then the elements again, by blocks
that put their image's sums together while the first of its elements are on their way.

A max pool of windows side by side, or copies of each pixel side by side, are taken in behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fusec.gpu.kernels import rows
from fusec.gpu.kernels.chain import Chain, Space, step, takes
from fusec.gpu.kernels.expressions import literal
from fusec.gpu.kernels.spec import C_TYPES, HALVES, VECTOR_BYTES, Arguments, Kernel, Launch, ceil_div
from fusec.ir import DType, Node, TensorType, Value
from fusec.ops import InstanceNorm, MaxPool, Resize
from fusec.program import inputs_of

BLOCK, LANES = 256, 32  # threads; vectors of channels that they go through side by side, at most
TURNS = (8, 4, 2)  # of a thread that are asked for together, and that a chunk has at least; the first where unmeasured
BLOCKS = 1056  # of a launch over a large tensor
FEW_PIXELS = 1024  # with fewer, one launch may be as fast: it comes first


@dataclass(frozen=True)
class _Share:
    """`count` units of an image, which blocks share by so many each."""

    count: int
    each: int

    @property
    def chunks(self) -> int:
        return ceil_div(self.count, self.each)


@dataclass(frozen=True)
class _Norm:
    """An instance norm, what is applied to its elements, and perhaps a pool or copies last, of windows of pixels or to
    them; `turns` of a thread are asked for together."""

    anchor: Node
    behind: Sequence[Node]
    last: Node | None
    window: tuple[int, int]
    outputs: Sequence[Value]
    turns: int

    @property
    def x(self) -> Value:
        return self.anchor.operands[0]

    @property
    def vector(self) -> int:
        return VECTOR_BYTES // self.x.type.dtype.itemsize

    @property
    def lanes(self) -> int:
        """Vectors of channels that a block goes through."""
        packs = self.x.type.shape[1] // self.vector
        return min(LANES, packs & -packs)

    @property
    def columns(self) -> int:
        """Blocks for all channels of a pixel."""
        return self.x.type.shape[1] // (self.vector * self.lanes)

    @property
    def threads(self) -> int:
        """Pixels that a block goes through at once."""
        return BLOCK // self.lanes

    @property
    def pixels(self) -> int:
        return self.x.type.size // (self.x.type.shape[0] * self.x.type.shape[1])

    @property
    def taps(self) -> int:
        """Pixels that are read for one unit of what is written."""
        return math.prod(self.window) if self.last is not None and isinstance(self.last.op, MaxPool) else 1

    @property
    def sums(self) -> _Share:
        return self._shared_out(self.pixels, self.turns)

    @property
    def write(self) -> _Share:
        return self._shared_out(self.pixels // self.taps, self.units)

    @property
    def units(self) -> int:
        """That a thread writes in one turn."""
        return max(1, self.turns // self.taps)

    def _shared_out(self, count: int, together: int) -> _Share:
        images = self.x.type.shape[0] * self.columns
        turns = max(together, ceil_div(count, self.threads * max(1, BLOCKS // images)))
        return _Share(count, self.threads * ceil_div(turns, together) * together)

    @property
    def channels(self) -> int:
        return self.x.type.shape[1]

    def kernel(self) -> Kernel:
        launches = (self._sums(), self._written())
        scratch_bytes = 2 * self.x.type.shape[0] * self.sums.chunks * self.channels * 4
        nodes = (self.anchor, *self.behind, *([] if self.last is None else [self.last]))
        return Kernel("+".join(node.op.name for node in nodes), launches, scratch_bytes)

    def _space(self, pixel: str) -> Space:
        rank = self.x.type.rank
        names = ("image", "channel", *(None,) * (rank - 3), pixel)  # the last of merged dims counts for all
        return Space(self.x.type.shape, names, 1, self.vector)

    def _begun(self, share: _Share, backwards: bool) -> list[str]:
        """Which image, channels and pixels a block is about; backwards: the last image first."""
        images, v = self.x.type.shape[0], self.vector
        return [
            f"const u32 lane = threadIdx.x % {self.lanes}u, t = threadIdx.x / {self.lanes}u;",
            f"const u32 place = blockIdx.x / {self.columns}u, chunk = place % {share.chunks}u;",
            f"const u32 image = {f'{images - 1}u - ' if backwards else ''}place / {share.chunks}u;",
            f"const u32 channel = (blockIdx.x % {self.columns}u * {self.lanes}u + lane) * {v}u;",
            f"const u32 begin = chunk * {share.each}u;",
            f"const u32 end = begin + {share.each}u < {share.count}u ? begin + {share.each}u : {share.count}u;",
        ]

    @property
    def _pack(self) -> str:
        return f"Pack<{C_TYPES[self.x.type.dtype]}, {self.vector}>"

    def _load(self, image: str, pixel: str) -> str:
        at = self._space(pixel).offset(self.x.type)
        return f"load_pack<{C_TYPES[self.x.type.dtype]}, {self.vector}>({image} + ({at}))"

    def _taken(self, image: str) -> list[str]:
        """The next turns of a thread, into `taken`: what lies beyond the end is the first pixel again."""
        return [
            "#pragma unroll",
            f"for (int i = 0; i < {self.turns}; ++i) {{",
            f"const u32 at = pixel + i * {self.threads}u, p = at < end ? at : begin;",
            f"taken[i] = {self._load(image, 'p')};",
            "}",
        ]

    def _sums(self) -> Launch:
        """Of each chunk: its mean, and squares around that."""
        arguments, v = Arguments(), self.vector
        image, scratch = arguments.read(self.x), arguments.scratch()
        lines = [f"__shared__ float shared[{BLOCK * v}];", *self._begun(self.sums, False)]
        lines += [
            f"float around[{v}], acc0[{v}], acc1[{v}];",
            f"const {self._pack} first = {self._load(image, 'begin')};",
        ]
        lines += ["#pragma unroll", f"for (int j = 0; j < {v}; ++j) {{", "const float e = wide(first.v[j]);"]
        lines += ["around[j] = fabs(e) < INFINITE ? e : 0.0f;", "acc0[j] = acc1[j] = 0.0f;", "}"]
        lines += [f"for (u32 pixel = begin + t; pixel < end; pixel += {self.threads * self.turns}u) {{"]
        lines += [f"{self._pack} taken[{self.turns}];", *self._taken(image)]
        lines += ["#pragma unroll", f"for (int i = 0; i < {self.turns}; ++i) {{"]
        lines += [f"const bool live = pixel + i * {self.threads}u < end;"]
        lines += ["#pragma unroll", f"for (int j = 0; j < {v}; ++j) {{"]
        lines += ["const float d = live ? wide(taken[i].v[j]) - around[j] : 0.0f;"]
        lines += ["acc0[j] += d;", "acc1[j] += d * d;", "}", "}", "}"]
        reduced = f"reduce_threads<{BLOCK}, {self.threads}, {self.lanes}, {v}>"
        lines += [f"{reduced}(acc0, shared, Add());", f"{reduced}(acc1, shared, Add());", "if (t == 0) {"]
        lines += ["const float count = float(end - begin);", f"for (int j = 0; j < {v}; ++j) {{"]
        lines += [f"const u32 at = (image * {self.sums.chunks}u + chunk) * {2 * self.channels}u + channel + j;"]
        lines += ["const float mean = acc0[j] / count;"]
        lines += [f"{scratch}[at] = around[j] + mean;", f"{scratch}[at + {self.channels}u] = acc1[j] - acc0[j] * mean;"]
        lines += ["}", "}"]
        grid = self.x.type.shape[0] * self.sums.chunks * self.columns
        return arguments.launch("instance_sums", lines, grid, BLOCK)

    def _written(self) -> Launch:
        arguments, v, own = Arguments(), self.vector, self.lanes * self.vector
        image, scratch = arguments.read(self.x), arguments.scratch("const float")
        lines = [f"__shared__ float shared[{BLOCK}], means[{own}], factors[{own}];", *self._begun(self.write, True)]
        lines += [f"{self._pack} taken[{self.units}][{self.taps}];", "u32 unit = begin + t;", *self._windows(image)]
        lines += self._merged(scratch, own)
        op = self.anchor.op
        assert isinstance(op, InstanceNorm)
        number = literal(op.epsilon, DType.F32)
        lines += [f"if (threadIdx.x < {own}u) {{", f"const float mean = acc0[0] / {self.pixels}.0f;"]
        # rounding may have left less than nothing; what is no number stays so
        lines += ["const float squares = acc1[0] - acc0[0] * mean, spread = squares < 0.0f ? 0.0f : squares;"]
        lines += ["means[threadIdx.x] = around + mean;"]
        lines += [f"factors[threadIdx.x] = 1.0f / sqrt(spread / {self.pixels}.0f + {number});", "}", "__syncthreads();"]
        scales, biases = (arguments.read(value) for value in self.anchor.operands[1:])
        lines += [f"float mean[{v}], factor[{v}], bias[{v}];", "#pragma unroll", f"for (int j = 0; j < {v}; ++j) {{"]
        lines += [f"mean[j] = means[lane * {v}u + j];"]
        lines += [f"factor[j] = factors[lane * {v}u + j] * wide({scales}[channel + j]);"]
        lines += [f"bias[j] = wide({biases}[channel + j]);", "}"]
        lines += ["while (unit < end) {", "#pragma unroll", f"for (int i = 0; i < {self.units}; ++i) {{"]
        lines += [f"const u32 at = unit + i * {self.threads}u;", "if (at < end) {", *self._stored(arguments), "}", "}"]
        lines.append(f"unit += {self.threads * self.units}u;")
        if self.write.each > self.threads * self.units:
            lines += ["if (unit < end) {", *self._windows(image), "}"]
        lines += ["}"]
        grid = self.x.type.shape[0] * self.write.chunks * self.columns
        return arguments.launch("instance_written", lines, grid, BLOCK)

    def _windows(self, image: str) -> list[str]:
        """The pixels of the next units of a thread, into `taken`."""
        return [
            *("#pragma unroll", f"for (int i = 0; i < {self.units}; ++i) {{"),
            f"const u32 at = unit + i * {self.threads}u, u = at < end ? at : begin;",
            *("#pragma unroll", f"for (u32 k = 0; k < {self.taps}u; ++k) {{"),
            f"const u32 p = {self._pixel('u')};",
            f"taken[i][k] = {self._load(image, 'p')};",
            *("}", "}"),
        ]

    def _pixel(self, unit: str) -> str:
        """Of a unit the pixel of tap k."""
        if self.taps == 1:
            return unit
        (high, wide), across = self.window, self.x.type.shape[-1]
        row, column = f"({unit} / {across // wide}u * {high}u + k / {wide}u)", f"{unit} % {across // wide}u * {wide}u"
        return f"{row} * {across}u + {column} + k % {wide}u"

    def _stored(self, arguments: Arguments) -> list[str]:
        """What becomes of unit `at`, of which the pixels are taken."""
        chain = Chain(self._space("p"), arguments)
        y = self.behind[-1].results[0] if self.behind else self.anchor.result
        chain.define(self.anchor.result, "(wide(taken[i][k].v[j]) - mean[j]) * factor[j] + bias[j]")
        for node in self.behind:
            chain.apply(node)
        if self.last is None:
            for value in self.outputs:
                chain.store(value)
            return ["const u32 p = at, k = 0;", *chain.lines()]
        result, kind, v = self.last.result, C_TYPES[y.type.dtype], self.vector
        (high, wide), across = self.window, self.x.type.shape[-1]
        if isinstance(self.last.op, MaxPool):
            chain.inside.append(f"largest[j] = k == 0 ? {chain.get(y)} : nmax(largest[j], {chain.get(y)});")
            lines = [f"float largest[{v}];", "#pragma unroll", f"for (u32 k = 0; k < {self.taps}u; ++k) {{"]
            lines += [f"const u32 p = {self._pixel('at')};", *chain.lines(), "}"]
            pooled = Chain(replace(self._space("at"), shape=result.type.shape), arguments, "w")
            pooled.known[result] = "largest[j]"
            pooled.store(result)
            return [*lines, *pooled.lines()]
        chain.inside.append(f"copied.v[j] = {chain.as_stored(y)};")
        lines = ["const u32 p = at, k = 0;", f"Pack<{kind}, {v}> copied;", *chain.lines()]
        lines += ["#pragma unroll", f"for (u32 copy = 0; copy < {high * wide}u; ++copy) {{"]
        lines.append(f"const u32 row = at / {across}u * {high}u + copy / {wide}u;")
        lines.append(f"const u32 column = at % {across}u * {wide}u + copy % {wide}u;")
        place = Space(result.type.shape, ("image", "channel", "row", "column")).offset(result.type)
        return [*lines, f"store_pack<{kind}, {v}>({arguments.write(result)} + ({place}), copied);", "}"]

    def _merged(self, scratch: str, own: int) -> list[str]:
        """The sums of this image's chunks for the block's channels, around the first one's mean, in the first threads'
        acc0 and acc1."""
        column = f"blockIdx.x % {self.columns}u"
        slices, chunks, each = BLOCK // own, self.sums.chunks, self.sums.each
        rest = self.pixels - (chunks - 1) * each
        lines = [
            f"const u32 mine = threadIdx.x % {own}u, slice = threadIdx.x / {own}u;",
            f"const u32 from = image * {chunks * 2 * self.channels}u + {column} * {own}u + mine;",
            f"const float around = {scratch}[from];",
            "float acc0[1] = {0.0f}, acc1[1] = {0.0f};",
            "#pragma unroll 8",
            f"for (u32 c = slice; c < {chunks}u; c += {slices}u) {{",
            f"const float d = {scratch}[from + c * {2 * self.channels}u] - around;",
            f"const float count = c == {chunks - 1}u ? {rest}.0f : {each}.0f;",
            "acc0[0] += count * d;",
            f"acc1[0] += {scratch}[from + c * {2 * self.channels}u + {self.channels}u] + count * d * d;",
            "}",
        ]
        reduced = f"reduce_threads<{BLOCK}, {slices}, {own}, 1>"
        return [*lines, f"{reduced}(acc0, shared, Add());", f"{reduced}(acc1, shared, Add());"]


def instance(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """The kernel for an instance norm over images with channels innermost, pointwise ops over its result, and perhaps a
    pool or copies behind these; None if the step is no such thing."""
    anchor, behind = nodes[0], nodes[1:]
    if not isinstance(anchor.op, InstanceNorm):
        return None
    last = behind[-1] if behind and isinstance(behind[-1].op, (MaxPool, Resize)) else None
    behind = behind if last is None else behind[:-1]
    x, y = anchor.operands[0], anchor.result
    if x.type.dtype not in (*HALVES, DType.F32) or not x.type.size or not all(takes(node) for node in behind):
        return None
    window = (1, 1) if last is None else _window(last)
    if last is not None and (
        window is None or list(outputs) != [last.result] or last.operands[0] != nodes[-2].results[0]
    ):
        return None
    if last is None and any(v.type.shape != y.type.shape for v in outputs):
        return None
    norm = _Norm(anchor, behind, last, window or (1, 1), outputs, TURNS[0])
    if x.type.strides[1] != 1 or x.type.shape[1] % norm.vector or norm.lanes * norm.vector > BLOCK:
        return None
    if last is not None and last.result.type.dtype is not x.type.dtype:
        return None
    read = [v for v in inputs_of(behind) if v is not y]
    types = [v.type for v in (x, *read, *outputs) if v.type.size != 1]
    whole = types if last is None else types[:-1]
    if any(t.span >= 1 << 31 for t in types) or not all(_merges(t, x.type.shape) for t in whole):
        return None
    if any(stride % norm.vector for t in types for stride in t.strides if stride != 1):
        return None
    if any(node.op.name == "gen_index" for node in behind):
        return None
    mine = [replace(norm, turns=turns).kernel() for turns in TURNS]
    other = rows.rows(nodes, outputs)
    theirs = [] if other is None else [replace(other, others=()), *other.others]
    best, *others = [*theirs, *mine] if norm.pixels < FEW_PIXELS else [*mine, *theirs]
    return replace(best, others=tuple(others))


def _window(node: Node) -> tuple[int, int] | None:
    """Of a pool whose windows lie side by side, or how often each pixel is copied; None of others."""
    op, x, y = node.op, node.operands[0].type, node.result.type
    if x.rank != 4 or x.shape[:2] != y.shape[:2] or y.strides[1] != 1:
        return None
    if isinstance(op, MaxPool):
        window = (op.window[0], op.window[1])
        fits = op.strides == op.window and not any(op.pads) and set(op.dilations) == {1}
        return (
            window
            if fits and all(a == b * k for a, b, k in zip(x.shape[2:], y.shape[2:], window, strict=True))
            else None
        )
    assert isinstance(op, Resize)
    if op.mode != "nearest" or any(b % a for a, b in zip(x.shape[2:], y.shape[2:], strict=True)):
        return None
    times = (y.shape[2] // x.shape[2], y.shape[3] // x.shape[3])
    found = (op.nearest(np, dim, x.shape[dim]) for dim in (2, 3))
    copies = (np.arange(y.shape[dim]) // times[dim - 2] for dim in (2, 3))
    return times if all(np.array_equal(a, b) for a, b in zip(found, copies, strict=True)) else None


def _merges(type: TensorType, shape: tuple[int, ...]) -> bool:
    """Whether a tensor goes through the spatial dims as if they were one, the last."""
    rank = len(shape)
    return all(step(type, rank, d) == step(type, rank, d + 1) * shape[d + 1] for d in range(2, rank - 1))
