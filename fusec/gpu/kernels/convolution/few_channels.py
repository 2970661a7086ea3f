"""Generate convolution of an image of up to four channels.

Tensor cores take channels by sixteens, and cuDNN leaves most of them idle. Here four taps of four channels are one step
of a product. A thread reads its operand from the image in shared memory, eight bytes a tap. Filters stay in registers,
and a thread gets neighbouring results.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fusec.gpu.kernels.codegen.gpu_figures import PROCESSORS, SHARED_BYTES
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import COLUMNS, PIXELS, can_follow, unrolled_loops
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, split_index, stride_along
from fusec.ir import Node, TensorType, Value, channels_last
from fusec.ops import Conv, Pad

CHANNELS = 4  # those of the image, and zeros
TAPS = 4  # of one step
MOST_STEPS = 16  # because the filters of a warp take 8 registers a step
MOST_FILTERS = 128
WARPS = 4  # of a block, at least
BANKS = 16  # of shared memory, eight bytes each
RESIDENT = 3  # blocks on a multiprocessor
SIZES = ((8, 128), (4, 128), (4, 64), (8, 64), (16, 64), (2, 64))  # rows and columns of a tile of results, about
BEGUN = 256  # the start of a block costs as much as so many results: an estimate
OTHERS = 4


@dataclass(frozen=True)
class _StemSource:
    """A convolution with its prologue and epilogue, and the tile of results that a block computes."""

    prologue: Sequence[Node]
    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    rows: int = 0
    columns: int = 0

    @property
    def op(self) -> Conv:
        assert isinstance(self.conv.op, Conv)
        return self.conv.op

    @property
    def source(self) -> Value:
        """The value that is read: the image before it is padded to four channels, if that happens here."""
        return self.prologue[0].operands[0] if self.prologue else self.conv.operands[0]

    @property
    def taps(self) -> int:
        return math.prod(self.conv.operands[1].type.shape[2:])

    @property
    def steps(self) -> int:
        return ceil_div(self.taps, TAPS)

    @property
    def wide(self) -> int:
        """Columns of a warp's product, by eights."""
        return 4 if self.conv.result.type.shape[1] % 32 == 0 else 2

    @property
    def groups(self) -> int:
        """Warps that share the filters."""
        return self.conv.result.type.shape[1] // (self.wide * COLUMNS)

    @property
    def warps(self) -> int:
        return self.groups * ceil_div(WARPS, self.groups)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the image that a tile of results reads."""
        sizes = zip((self.rows, self.columns), self._window, self.op.strides, self.op.dilations, strict=True)
        high, across = ((size - 1) * stride + (k - 1) * dilation + 1 for size, k, stride, dilation in sizes)
        return high, across

    @cached_property
    def pitch(self) -> int:
        """Pixels from one row of the tile to the next in shared memory; some of them may be unused.

        It is chosen so that the taps of a step are in different banks, also where they cross the end of a row of the
        window.
        """
        stride, (down, right), across = self.op.strides[1], self.op.dilations, self.tile[1]
        taps = [divmod(k if k < self.taps else 0, self._window[1]) for k in range(self.steps * TAPS)]

        def turns(pitch: int) -> int:
            """Count the turns of all reads, half a warp at a time."""
            total = 0
            for first in range(0, len(taps), TAPS):
                own = [a * down * pitch + b * right for a, b in taps[first : first + TAPS]]
                places = {at + pixel * stride for at in own for pixel in range(PIXELS // 4)}
                total += max(Counter(place % BANKS for place in places).values())
            return total

        return min(range(across, across + BANKS), key=turns)

    @property
    def _in_words(self) -> bool:
        """Tell if two words contain a pixel of three contiguous numbers.

        The last word must end where the image does.
        """
        type, kind = self.source.type, self.conv.operands[0].type.dtype
        if not isinstance(self.prologue[0].op, Pad) or type.dtype is not kind or type.within or type.size % 2:
            return False
        return type.shape[1] == 3 and type.order == channels_last(4)

    @property
    def _window(self) -> tuple[int, ...]:
        return self.conv.operands[1].type.shape[2:]

    @property
    def blocks(self) -> int:
        n, _, high, across = self.conv.result.type.shape
        return n * ceil_div(high, self.rows) * ceil_div(across, self.columns)

    @property
    def cost(self) -> float:
        """Estimate the time, which orders the variants: rounds of blocks, times the results of a block."""
        return ceil_div(self.blocks, PROCESSORS * RESIDENT) * (self.rows * self.columns + BEGUN)

    def sized(self, rows: int, columns: int) -> _StemSource:
        """Return the source with tiles of about that size, which divide the image evenly."""
        _, _, high, across = self.conv.result.type.shape
        return replace(self, rows=min(rows, high), columns=ceil_div(across, ceil_div(across, columns)))

    def kernel(self) -> Kernel:
        conv, y, kind = self.conv, self.conv.result, C_TYPES[self.conv.operands[0].type.dtype]
        _, _, out_high, out_across = y.type.shape
        high, across = self.tile
        arguments, block = Arguments(), self.warps * 32
        down, right = ceil_div(out_high, self.rows), ceil_div(out_across, self.columns)
        lines = [
            f"__shared__ Pack<{kind}, {CHANNELS}> image[{high * self.pitch}];",
            "const u32 warp = threadIdx.x / 32u, lane = threadIdx.x % 32u, eighth = lane / 4u, fourth = lane % 4u;",
            "const u32 block = blockIdx.x;",
            *split_index("block", [("c0", y.type.shape[0]), ("down", down), ("right", right)]),
            f"const int top = (int)down * {self.rows * self.op.strides[0]} - {self.op.pads[0]};",
            f"const int left = (int)right * {self.columns * self.op.strides[1]} - {self.op.pads[1]};",
            *self._load_filters(arguments),
            f"for (u32 i = threadIdx.x; i < {high * across}u; i += {block}u) {{",
            f"const int row = top + (int)(i / {across}u), column = left + (int)(i % {across}u);",
            f"Pack<{kind}, {CHANNELS}> pixel;",
            f"for (int j = 0; j < {CHANNELS}; ++j) pixel.v[j] = {kind}();",
            *self._load_pixel(arguments),
            f"image[i / {across}u * {self.pitch}u + i % {across}u] = pixel;",
            "}",
            "__syncthreads();",
        ]
        pixels, each = self.rows * self.columns, self.warps // self.groups
        turns = ceil_div(pixels, PIXELS * each)
        lines += ["#pragma unroll 1", f"for (u32 turn = 0; turn < {turns}u; ++turn) {{"]
        lines += [f"float acc[{self.wide}][4];", *unrolled_loops([("c", self.wide), ("d", 4)], "acc[c][d] = 0.0f;")]
        lines += ["u32 pixel[2], at[2];", "#pragma unroll", "for (int h = 0; h < 2; ++h) {"]
        lines.append(f"pixel[h] = (turn * {each}u + warp / {self.groups}u) * {PIXELS}u + h * 8u + eighth;")
        row, column = f"(p / {self.columns}u * {self.op.strides[0]}u)", f"p % {self.columns}u * {self.op.strides[1]}u"
        lines.append(f"const u32 p = pixel[h] < {pixels}u ? pixel[h] : 0u;")
        lines += [f"at[h] = {row} * {self.pitch}u + {column};", "}"]
        lines += ["#pragma unroll", f"for (int s = 0; s < {self.steps}; ++s) {{"]
        lines.append("Pack<u32, 2> low = load_pack<u32, 2>(reinterpret_cast<const u32*>(image + at[0] + offset[s]));")
        lines.append("Pack<u32, 2> high = load_pack<u32, 2>(reinterpret_cast<const u32*>(image + at[1] + offset[s]));")
        if self.taps % TAPS:  # without a tap the pixel is zero, because infinity times zero would be NaN
            beyond = f"s == {self.steps - 1} && fourth >= {self.taps % TAPS}u"
            lines.append(f"if ({beyond}) low.v[0] = low.v[1] = high.v[0] = high.v[1] = 0;")
        words = "low.v[0], high.v[0], low.v[1], high.v[1], tap[s][c].v[0], tap[s][c].v[1]"
        lines += unrolled_loops([("c", self.wide)], f"multiply_tile<{kind}>(acc[c], {words});")
        lines += ["}", *self._finish_pixels(arguments), "}"]
        nodes = (*self.prologue, conv, *self.rest)
        name = "+".join("few_channels" if node is conv else node.op.name for node in nodes)
        return Kernel(name, (arguments.launch("few_channels", lines, self.blocks, block),))

    def _load_filters(self, arguments: Arguments) -> list[str]:
        """Load the warp's filters, and the offset of a thread's tap of each step.

        A thread has two of each eight columns, so filters are dealt out to give it neighbouring results.
        """
        w, own = self.conv.operands[1], 2 * self.wide
        across = self._window[1]
        stored = w.type if w.literal is None else w.type.with_order(channels_last(4))
        kind, pointer = C_TYPES[w.type.dtype], arguments.read(w, stored)
        f, c, a, b = stored.strides
        lines = [f"u32 offset[{self.steps}];", f"Pack<u32, 2> tap[{self.steps}][{self.wide}];"]
        lines += ["#pragma unroll", f"for (int s = 0; s < {self.steps}; ++s) {{"]
        lines.append(f"const u32 k = s * {TAPS} + fourth < {self.taps} ? s * {TAPS} + fourth : 0;")
        row, column = f"k / {across}u", f"k % {across}u"
        pitch, apart = self.op.dilations[0] * self.pitch, self.op.dilations[1]
        lines.append(f"offset[s] = {row} * {pitch}u + {column} * {apart}u;")
        lines += ["#pragma unroll", f"for (int c = 0; c < {self.wide}; ++c) {{"]
        first = f"warp % {self.groups}u * {self.wide * COLUMNS}u"
        lines.append(f"const u32 filter = {first} + eighth / 2u * {own}u + c * 2u + eighth % 2u;")
        lines.append(f"Pack<{kind}, {CHANNELS}> words;")
        at = f"filter * {f} + {row} * {a} + {column} * {b}"
        if c == 1 and all(stride % CHANNELS == 0 for stride in (f, a, b)):
            lines.append(f"words = load_pack<{kind}, {CHANNELS}>({pointer} + ({at}));")
        else:
            lines.append(f"for (int j = 0; j < {CHANNELS}; ++j) words.v[j] = {pointer}[{at} + j * {c}];")
        lines.append(f"if (s * {TAPS} + fourth >= {self.taps})")
        lines.append(f"  for (int j = 0; j < {CHANNELS}; ++j) words.v[j] = {kind}();")
        lines.append("tap[s][c] = *reinterpret_cast<const Pack<u32, 2>*>(&words);")
        return [*lines, "}", "}"]

    def _load_pixel(self, arguments: Arguments) -> list[str]:
        """Load the pixel at a row and column of the image, if it exists."""
        x, source = self.conv.operands[0], self.source
        kind, names = C_TYPES[x.type.dtype], ("c0", None, "(u32)row", "(u32)column")
        lines = [f"if ((u32)row < {x.type.shape[2]}u && (u32)column < {x.type.shape[3]}u) {{"]
        if not self.prologue:
            pointer = arguments.read(x)
            at = Space(x.type.shape, names).offset(x.type)
            return [*lines, f"pixel = load_pack<{kind}, {CHANNELS}>({pointer} + ({at}));", "}"]
        if self._in_words:
            at = Space(source.type.shape, names).offset(source.type)
            lines += [f"const u32 first = {at};", "Pack<u32, 2> both;"]
            lines.append(f"const u32* words = reinterpret_cast<const u32*>({arguments.read(source)}) + first / 2u;")
            lines.append("const u32 low = words[0], high = words[1];")
            lines.append("both.v[0] = first % 2u ? low >> 16 | high << 16 : low;")
            lines.append("both.v[1] = first % 2u ? high >> 16 : high & 0xffffu;")
            return [*lines, f"pixel = *reinterpret_cast<const Pack<{kind}, {CHANNELS}>*>(&both);", "}"]
        code = PointwiseCode(Space(source.type.shape, ("c0", "c1", *names[2:])), arguments, "p")
        for node in self.prologue:
            if isinstance(node.op, Pad):
                value = node.operands[0]
                code.get(value)
                code.body.append(f"pixel.v[c1] = {code.as_stored(value)};")
                break
            code.apply(node)
        lines += ["#pragma unroll", f"for (u32 c1 = 0; c1 < {source.type.shape[1]}u; ++c1)"]
        return [*lines, *code.lines(), "}"]

    def _finish_pixels(self, arguments: Arguments) -> list[str]:
        """Apply the epilogue to the results of a thread's two pixels, and store them."""
        y, own = self.conv.result, 2 * self.wide
        _, _, out_high, out_across = y.type.shape
        lines = ["#pragma unroll", "for (int h = 0; h < 2; ++h) {"]
        lines.append(f"const u32 c2 = down * {self.rows}u + pixel[h] / {self.columns}u;")
        lines.append(f"const u32 c3 = right * {self.columns}u + pixel[h] % {self.columns}u;")
        inside = f"pixel[h] < {self.rows * self.columns}u && c2 < {out_high}u && c3 < {out_across}u"
        lines.append(f"const u32 c1 = warp % {self.groups}u * {self.wide * COLUMNS}u + fourth * {own}u;")
        lines.append(f"if ({inside})")
        code = PointwiseCode(Space(y.type.shape, ("c0", "c1", "c2", "c3"), 1, own), arguments)
        code.define(y, "acc[j / 2][h * 2 + j % 2]")
        for node in self.rest:
            code.apply(node)
        for value in self.outputs:
            code.store(value)
        return [*lines, *code.lines(), "}"]


def few_channels(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """Return the kernel of a convolution of four channels with its epilogue; None for other steps.

    The fourth channel may be added by a pad before it.
    """
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, Conv)), None)
    if at is None:
        return None
    prologue, conv, rest = nodes[:at], nodes[at], nodes[at + 1 :]
    op, (x, w), y = conv.op, conv.operands, conv.result
    assert isinstance(op, Conv)
    if x.type.rank != 4 or x.type.dtype not in HALVES or op.groups != 1 or x.type.shape[1] != CHANNELS:
        return None
    if w.type.dtype is not x.type.dtype or y.type.shape[1] % 16 or y.type.shape[1] > MOST_FILTERS or not y.type.size:
        return None
    if not all(map(can_follow, rest)) or any(v.type.shape != y.type.shape for v in outputs):
        return None
    if not _reads(prologue, rest, x):
        return None
    stem = _StemSource(prologue, conv, rest, outputs)
    if stem.steps > MOST_STEPS or not _packed(x.type, prologue) or not _stores(stem):
        return None
    values = (x, w, y, stem.source, *outputs, *(v for node in rest for v in node.operands))
    if max(v.type.span for v in values) >= 1 << 31:
        return None
    variants = {(variant.rows, variant.columns): variant for variant in (stem.sized(*size) for size in SIZES)}.values()
    fit = [
        variant
        for variant in variants
        if variant.tile[0] * variant.pitch * CHANNELS * x.type.dtype.itemsize <= SHARED_BYTES
    ]
    if not fit:
        return None
    best, *others = (variant.kernel() for variant in sorted(fit, key=lambda variant: variant.cost)[: 1 + OTHERS])
    return replace(best, others=tuple(others))


def _reads(prologue: Sequence[Node], rest: Sequence[Node], x: Value) -> bool:
    """Tell if the prologue is pointwise ops and then a pad by a fourth channel, which only the convolution reads."""
    made = {v for node in prologue for v in node.results}
    if any(v in made for node in rest for v in node.operands):
        return False
    pads = [node for node in prologue if isinstance(node.op, Pad)]
    if not prologue:
        return True
    if len(pads) != 1 or not all(can_follow(node) for node in prologue if node not in pads):
        return False
    (pad,) = pads
    op, (source,) = pad.op, pad.operands
    assert isinstance(op, Pad)
    if op.pads != (0, 0, 0, 0, 0, CHANNELS - source.type.shape[1], 0, 0) or (op.mode, op.value) != ("constant", 0.0):
        return False
    code = list(prologue)
    epilogue = code[code.index(pad) + 1 :]
    if any(node.op.name != "relayout" for node in epilogue) or x not in made:
        return False
    return all(v.type.shape == source.type.shape for node in code[: code.index(pad)] for v in node.results)


def _packed(type: TensorType, prologue: Sequence[Node]) -> bool:
    """Tell if one load moves the channels of a pixel."""
    return bool(prologue) or (type.strides[1] == 1 and all(type.strides[d] % CHANNELS == 0 for d in (0, 2, 3)))


def _stores(stem: _StemSource) -> bool:
    """Tell if one store can move a thread's results, or if they are stored one by one."""
    own = 2 * stem.wide
    types = [v.type for v in (*stem.outputs, *(v for node in stem.rest for v in node.operands)) if v.type.size != 1]
    return all(stride_along(t, 4, 1) != 1 or all(stride_along(t, 4, d) % own == 0 for d in (0, 2, 3)) for t in types)
