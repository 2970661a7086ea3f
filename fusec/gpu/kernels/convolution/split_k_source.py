"""What a convolution over few pixels is written as: see `split_k`.

A block has a tile of pixels, some filters and some channels. The pixels that its taps read lie in shared memory.
Weights are constants, in memory as threads multiply them: those of all steps are on their way to registers at once.
Which of a thread's numbers is called which place of a fragment is free as long as both operands agree: it has eight
neighbours of a pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fusec.gpu.kernels.codegen.kernel import C_TYPES, CLUSTERS, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import nested
from fusec.gpu.kernels.codegen.pointwise_code import Chain, Space, decoded, step, widest
from fusec.gpu.kernels.convolution.split_k_tiling import (
    COLUMNS,
    DEPTH,
    PACK,
    ROWS,
    Along,
    Shares,
    along,
    fragments,
    is_flat,
)
from fusec.ir import Node, Value
from fusec.ops import Conv
from fusec.schedule.program import inputs_of

HELD = 96  # registers for weights on their way


@dataclass(frozen=True, eq=False)
class FewPixelsSource:
    """A convolution, the pointwise ops behind it, and what is stored."""

    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    shares: Shares

    @property
    def op(self) -> Conv:
        assert isinstance(self.conv.op, Conv)
        return self.conv.op

    @cached_property
    def is_flat(self) -> bool:
        """Whether pixels are a row of places, whatever image they are of."""
        return is_flat(self.conv)

    @property
    def image(self) -> tuple[int, int, int]:
        """Images and their pixels, as tiles see them."""
        n, _, high, wide = self.conv.operands[0].type.shape
        return (1, 1, n * high * wide) if self.is_flat else (n, high, wide)

    @property
    def result(self) -> tuple[int, int, int]:
        n, _, high, wide = self.conv.result.type.shape
        return (1, 1, n * high * wide) if self.is_flat else (n, high, wide)

    @cached_property
    def sides(self) -> tuple[Along, Along]:
        window = self.conv.operands[1].type.shape[2:]
        return along(self.op, 0, window[0], self.shares.high), along(self.op, 1, window[1], self.shares.wide)

    @property
    def chunks(self) -> int:
        """Of DEPTH channels, that a block has."""
        return self.conv.operands[1].type.shape[1] // DEPTH // self.shares.splits

    @property
    def steps(self) -> int:
        """A block's taps, times its chunks."""
        high, wide = self.conv.operands[1].type.shape[2:]
        return high * wide * self.chunks

    @property
    def own_steps(self) -> int:
        """Of a warp, at most."""
        return ceil_div(self.steps, self.shares.deep)

    @cached_property
    def pitch(self) -> int:
        """Bytes from a pixel to the next one in shared memory: those of two neighbouring results, of which eight
        threads read 64 bytes each, are in different banks."""
        nbytes, apart = 2 * DEPTH * self.chunks, self.sides[1].apart
        pads = range(0, 128, 16)
        return nbytes + min(pads, key=lambda pad: (abs((nbytes + pad) * apart % 128 - 64), pad))

    @property
    def patch_bytes(self) -> int:
        down, right = self.sides
        return ceil_div(down.count * right.count * self.pitch, 128) * 128

    @property
    def sums_pitch(self) -> int:
        """Numbers from the sums of a pixel to the next one's, in other banks."""
        return self.shares.filters + 4

    @property
    def rows_each(self) -> int:
        """Pixels of a tile that a block of a cluster finishes."""
        return ceil_div(self.shares.pixels, self.shares.splits if self.shares.clusters else 1)

    @property
    def resident_bytes(self) -> int:
        shares = self.shares
        sums = shares.deep * shares.tiles * COLUMNS * self.sums_pitch * 4
        box = shares.splits * self.rows_each * self.sums_pitch * 4 if shares.clusters and shares.splits > 1 else 0
        return 16 + self.patch_bytes + sums + box

    @property
    def across(self) -> tuple[int, int, int, int]:
        """Blocks: images, tiles below and beside each other, groups of filters."""
        shares, (n, high, wide) = self.shares, self.result
        filters = self.conv.result.type.shape[1]
        return n, ceil_div(high, shares.high), ceil_div(wide, shares.wide), ceil_div(filters, shares.filters)

    @property
    def grid(self) -> int:
        n, down, right, groups = self.across
        return n * down * right * groups * self.shares.splits

    def kernel(self) -> Kernel:
        shares, arguments = self.shares, Arguments()
        n, down, right, groups = self.across
        lines = [
            "RESIDENT(kept);",
            "const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, q = lane % 4u;",
            f"const u32 deep = warp / {shares.across}u, side = warp % {shares.across}u, block = blockIdx.x;",
            *decoded("block", [("n", n), ("down", down), ("right", right), ("group", groups), ("part", shares.splits)]),
            f"const u32 first = group * {shares.filters}u;",
        ]
        meets = shares.clusters and shares.splits > 1
        lines += ["u8* patch = kept + 16;", f"float* sums = (float*)(patch + {self.patch_bytes});"]
        if meets:
            each = self.rows_each
            lines.append(f"float* box = sums + {shares.deep * shares.tiles * COLUMNS * self.sums_pitch};")
            lines.append("u64* door = (u64*)kept;")
            finished = f"const u32 finished = (part + 1u) * {each}u <= {shares.pixels}u ? {each}u : "
            lines.append(f"{finished}(part * {each}u < {shares.pixels}u ? {shares.pixels}u - part * {each}u : 0u);")
            lines.append(f"cluster_begins(door, finished * {shares.splits * shares.filters * 4}u);")
        asked = self._asked(arguments)
        lines += [*self._weights(arguments), "wait_for_launches();", *self._patch(arguments)]
        lines += [*asked, "next_may_begin();", *self._multiplied(), *self._summed(arguments)]
        name = "+".join(["few_pixels", *(node.op.name for node in self.rest)])
        launch = arguments.launch("few_pixels", lines, self.grid, shares.threads, cluster=shares.splits if meets else 1)
        launch = replace(
            launch, resident_bytes=self.resident_bytes, architecture=CLUSTERS if meets else "", early=self._is_early
        )
        scratch = 0 if meets or shares.splits == 1 else self.grid * shares.pixels * shares.filters * 4
        return Kernel(name, (launch,), scratch)

    def _patch(self, arguments: Arguments) -> list[str]:
        """The pixels that the tile reads on their way into shared memory, zeros where there are none: threads have
        pixels of a row, or of several rows."""
        x, shares, (down, right) = self.conv.operands[0], self.shares, self.sides
        channels, (_, high, wide) = x.type.shape[1], self.image
        n, _, h, w = (0, 1, 0, channels) if self.is_flat else x.type.strides
        top, left = (0, 0) if self.is_flat else self.op.pads[:2]
        strides = (1, 1) if self.is_flat else self.op.strides
        octets = DEPTH // PACK * self.chunks
        span = right.count * octets  # of a row
        rows, turns = max(1, shares.threads // span), ceil_div(span, shares.threads)  # at once, and of a row
        held = [f"i < {span}u"] if turns * shares.threads > span else []
        if rows > 1:
            held = [f"first < {rows}u"] if rows * span < shares.threads else []
            held += [f"r * {rows} + first < {down.count}u"] if down.count % rows else []
        y, stride = f"y + r * {rows * down.stride}", rows * down.stride * h
        copy = f"copy_or_zeros_ahead(to + r * {rows * right.count * self.pitch}, from + r * {stride}"
        return [
            "#pragma unroll",
            f"for (int turn = 0; turn < {turns}; ++turn) {{",
            f"  const u32 place = threadIdx.x + turn * {shares.threads}u;",
            f"  const u32 first = {f'place / {span}u' if rows > 1 else '0u'}, i = place - first * {span}u;",
            f"  const u32 c = i % {octets}u, column = i / {octets}u;",
            f"  const int y = (int)(down * {shares.high * strides[0]}u + first * {down.stride}u) - {top};",
            f"  const int x = (int)(right * {shares.wide * strides[1]}u + column * {right.stride}u) - {left};",
            f"  const {C_TYPES[x.type.dtype]}* from = {arguments.read(x)} + ((int)(n * {n}u) + y * {h} + x * {w} + "
            f"(int)(part * {self.chunks * DEPTH}u + c * {PACK}u));",
            f"  u8* to = patch + ((first * {right.count}u + column) * {self.pitch}u + c * 16u);",
            "  #pragma unroll",
            f"  for (int r = 0; r < {ceil_div(down.count, rows)}; ++r)",
            f"    if ({' && '.join(held) or 'true'}) {copy}, (u32)({y}) < {high}u && (u32)x < {wide}u);",
            "}",
            "copied();",
        ]

    def _weights(self, arguments: Arguments) -> list[str]:
        """Those of a warp's first steps on their way."""
        w, shares = self.conv.operands[1], self.shares
        filters = w.type.shape[0]
        groups, kind = filters // ROWS, C_TYPES[w.type.dtype]
        size = ROWS * DEPTH  # of a step
        own = f"(group * {shares.filters // ROWS}u + side * {shares.rows}u"
        pointer = arguments.read(w, fragments(w.type, shares.splits))
        lines = [f"const {kind}* weights[{shares.rows}];"]
        place = f"{own} + m)"
        if filters % shares.filters:  # those beyond the last are computed, but not stored
            place = f"({place} < {groups}u ? {place} : {groups - 1}u)"
        at = f"({place} * {shares.splits}u + part) * {self.steps * size}u + deep * {size}u + lane * {PACK}u"
        lines += nested([("m", shares.rows)], f"weights[m] = {pointer} + ({at});")
        lines += [f"u32 w[{self._ahead}][{shares.rows}][2][4];", "auto load = [&](int slot, int i) {"]
        load = f"load_words(w[slot][m][h], weights[m] + (i * {shares.deep * size} + h * {size // 2}));"
        lines += [f"if ({self._is_step}) {{", *nested([("m", shares.rows), ("h", 2)], load)]
        return [*lines, "}", "};", *nested([("i", self._ahead)], "load(i, i);"), "__syncwarp();"]

    @property
    def _ahead(self) -> int:
        """Steps of a warp whose weights are on their way at once."""
        return max(1, min(self.own_steps, HELD // (8 * self.shares.rows)))

    @property
    def _is_step(self) -> str:
        """Whether a warp has a step `i`: all have but the last."""
        deep = self.shares.deep
        return f"(i + 1) * {deep} <= {self.steps} || deep + i * {deep}u < {self.steps}u"

    def _multiplied(self) -> list[str]:
        """The block's sums in shared memory, for each of `deep` warps: `sums`."""
        shares, (down, right) = self.shares, self.sides
        wide = self.conv.operands[1].type.shape[3]
        tiles, rows, own, kind = shares.tiles, shares.rows, self.own_steps, C_TYPES[self.conv.result.type.dtype]
        row, column = f"n * {COLUMNS} / {shares.wide}", f"n * {COLUMNS} % {shares.wide}"
        spot = f"({row} * {down.apart * right.count} + {column} * {right.apart}) * {self.pitch}"
        lines = [f"const u8* own = patch + (g * {right.apart * self.pitch}u + q * 16u);"]
        lines.append(f"float acc[{rows}][{tiles}][4];")
        lines += nested([("m", rows), ("n", tiles), ("e", 4)], "acc[m][n][e] = 0.0f;")
        lines += ["wait_for_copies<0>();", "__syncthreads();"]
        lines += ["#pragma unroll", f"for (int i = 0; i < {own}; ++i) {{", f"if ({self._is_step}) {{"]
        lines.append(f"const u32 s = deep + i * {shares.deep}u, tap = s / {self.chunks}u, chunk = s % {self.chunks}u;")
        taps = f"tap / {wide}u * {down.dilation * right.count}u + tap % {wide}u * {right.dilation}u"
        lines.append(f"const u32 from = ({taps}) * {self.pitch}u + chunk * {2 * DEPTH}u;")
        lines += ["#pragma unroll", f"for (int n = 0; n < {tiles}; ++n) {{"]
        lines += [f"const Pack<u32, 4> x = load_pack<u32, 4>((const u32*)(own + from + {spot}));"]
        words = ", ".join(f"v[{i}]" for i in range(4))
        lines += nested(
            [("h", 2), ("m", rows)],
            f"const u32(&v)[4] = w[i % {self._ahead}][m][h];",
            f"multiply_tile<{kind}>(acc[m][n], {words}, x.v[2 * h], x.v[2 * h + 1]);",
        )
        lines += ["}", "}"]
        if own > self._ahead:
            lines.append(f"if (i + {self._ahead} < {own}) load(i % {self._ahead}, i + {self._ahead});")
        lines.append("}")
        own_pixel = f"deep * {tiles * COLUMNS}u + n * {COLUMNS} + 2u * q + e % 2"
        own_filter = f"(side * {rows}u + m) * {ROWS}u + e / 2 * 8 + g"
        place = f"({own_pixel}) * {self.sums_pitch}u + {own_filter}"
        lines += nested([("m", rows), ("n", tiles), ("e", 4)], f"sums[{place}] = acc[m][n][e];")
        return [*lines, "__syncthreads();"]

    def _summed(self, arguments: Arguments) -> list[str]:
        """The sums of warps, and those of blocks, each in order; and what is made of them."""
        shares = self.shares
        octets, pitch = shares.filters // PACK, self.sums_pitch
        of_warps = f"sums + (pixel * {pitch}u + octet * {PACK}u)", shares.tiles * COLUMNS * pitch, shares.deep
        if shares.splits == 1:
            return self._finished(arguments, *of_warps)
        lines = [
            f"for (u32 i = threadIdx.x; i < {shares.pixels * octets}u; i += {shares.threads}u) {{",
            f"const u32 pixel = i / {octets}u, octet = i % {octets}u;",
            *_added("total", *of_warps),
        ]
        if shares.clusters:
            at = f"(part * {self.rows_each}u + pixel % {self.rows_each}u) * {pitch}u + octet * {PACK}u"
            lines.append(f"send(box + ({at}), total, door, pixel / {self.rows_each}u);")
            lines = ["cluster_is_there();", *lines, "}", "wait_for_peers(door);"]
            from_box = f"box + (pixel % {self.rows_each}u * {pitch}u + octet * {PACK}u)"
            return [*lines, *self._finished(arguments, from_box, self.rows_each * pitch, shares.splits)]
        size = shares.pixels * shares.filters
        lines.append(f"store_pack<float, 8>({arguments.scratch()} + (block * {size}u + i * {PACK}u), total);")
        door = f"{arguments.doors(self.grid // shares.splits)} + block / {shares.splits}u * DOOR"
        lines += ["}", f"if (!last_of({door}, {shares.splits}u)) return;"]
        there = f"{arguments.scratch()} + (block / {shares.splits}u * {shares.splits * size}u + item * {PACK}u)"
        return [*lines, *self._finished(arguments, there, size, shares.splits, "across")]

    def _finished(self, arguments: Arguments, pointer: str, apart: int, count: int, read: str = "*") -> list[str]:
        """Sums of so many parts, and what becomes of them: as in cuDNN's graphs, only what is stored is rounded."""
        return [
            line
            for turn in range(self._turns)
            for line in (
                f"if (is{turn}) {{",
                f"const u32 item = item{turn}, pixel = pixel{turn}, octet = item % {self.shares.filters // PACK}u;",
                *_added("total", pointer, apart, count, read),
                *self._chain(turn, arguments)[1],
                "}",
            )
        ]

    @property
    def _turns(self) -> int:
        """Of a thread, to finish eight results of a pixel."""
        return ceil_div(self.rows_each * self.shares.filters // PACK, self.shares.threads)

    def _asked(self, arguments: Arguments) -> list[str]:
        """What the ops behind the convolution read, ahead of the sums; threads that have no result read another's."""
        return [line for turn in range(self._turns) for line in self._chain(turn, arguments)[0]]

    @cached_property
    def _packs(self) -> bool:
        """Whether eight neighbours are moved at once, wherever they lie side by side."""
        values = (self.conv.result, *inputs_of(self.rest), *self.outputs)
        types = [v.type for v in values if v.type.size != 1]
        steps = [[step(each, 4, 1), *(step(each, 4, d) for d in (0, 2, 3))] for each in types]
        return widest(self.conv.result.type.shape[1], types, steps) == PACK

    @property
    def _is_early(self) -> bool:
        """Whether all that launches in front may have written is read where it stands: the compiler may read what
        else is only read before it waits for them."""
        read = [v.type for v in inputs_of(self.rest) if v.literal is None and v is not self.conv.result]
        return self._packs and all(step(type, 4, 1) == 1 for type in read)

    def _chain(self, turn: int, arguments: Arguments) -> tuple[list[str], list[str]]:
        """The ops behind: what they read, and what is done."""
        shares, y, (_, high, wide) = self.shares, self.conv.result, self.result
        octets, filters = shares.filters // PACK, y.type.shape[1]
        t, own = str(turn), shares.clusters and shares.splits > 1
        inside = [f"down * {shares.high}u + pixel{t} / {shares.wide}u < {high}u"]
        inside += [f"right * {shares.wide}u + pixel{t} % {shares.wide}u < {wide}u", f"pixel{t} < {shares.pixels}u"]
        inside += [f"item{t} < {self.rows_each * octets}u", f"first + item{t} % {octets}u * {PACK}u < {filters}u"]
        lines = [
            f"const u32 item{t} = threadIdx.x + {turn * shares.threads}u;",
            f"const u32 pixel{t} = item{t} / {octets}u{f' + part * {self.rows_each}u' if own else ''};",
            f"const bool is{t} = {' && '.join(inside)};",
            f"const u32 p{t} = is{t} ? pixel{t} : 0u, f{t} = first + (is{t} ? item{t} % {octets}u * {PACK}u : 0u);",
            f"const u32 y{t} = down * {shares.high}u + p{t} / {shares.wide}u;",
            f"const u32 x{t} = right * {shares.wide}u + p{t} % {shares.wide}u;",
        ]
        names: tuple[str, ...] = ("n", f"f{t}", f"y{t}", f"x{t}")
        if self.is_flat:
            n, _, height, width = y.type.shape
            names = (f"n{t}", f"f{t}", f"h{t}", f"w{t}")
            lines += decoded(f"x{t}", [(names[0], n), (names[2], height), (names[3], width)])
        space = Space(y.type.shape, names, 1, PACK, packs=self._packs)
        chain = Chain(space, arguments, f"v{t}_", rounds=False, ahead=True)
        chain.define(y, "total.v[j]")
        for node in self.rest:
            chain.apply(node)
        asked, chain.before = chain.before, []
        for value in self.outputs:
            chain.store(value)
        return [*lines, *asked], chain.lines()


def _added(name: str, pointer: str, apart: int, count: int, read: str = "*") -> list[str]:
    """Eight sums of so many parts, which lie so far apart."""
    pack = "const Pack<float, 8>"
    lines = [f"Pack<float, 8> {name} = {read}(({pack}*)({pointer}));"]
    if count > 1:
        lines += ["#pragma unroll", f"for (int k = 1; k < {count}; ++k) {{"]
        lines.append(f"{pack} more = {read}(({pack}*)({pointer} + k * {apart}));")
        lines += [*nested([("j", PACK)], f"{name}.v[j] += more.v[j];"), "}"]
    return lines
