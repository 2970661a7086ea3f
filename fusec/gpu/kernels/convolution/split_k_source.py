"""Generate the CUDA C of a convolution over few pixels: see `split_k`.

A block has a tile of pixels, some filters and some channels. The pixels that its taps read are in shared memory.
Weights
are constants, stored in the order in which threads multiply them; loads of many steps are issued together. Both
operands
may permute the depth in the same way, so a thread takes eight neighbours of a pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fusec.gpu.kernels.codegen.kernel import C_TYPES, CLUSTERS, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import unrolled_loops
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, split_index, stride_along, widest_vector
from fusec.gpu.kernels.convolution.split_k_tiling import (
    COLUMNS,
    DEPTH,
    PACK,
    ROWS,
    Along,
    SplitKTiling,
    along,
    fragments,
    is_flat,
)
from fusec.ir import Node, Value
from fusec.ops import Conv
from fusec.schedule.program import inputs_of

HELD = 96  # registers for weights that are being loaded


@dataclass(frozen=True, eq=False)
class SplitKSource:
    """A convolution, its epilogue, and what is stored."""

    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    tiling: SplitKTiling

    @property
    def op(self) -> Conv:
        assert isinstance(self.conv.op, Conv)
        return self.conv.op

    @cached_property
    def is_flat(self) -> bool:
        """Tell if pixels form one row, in whichever image they are."""
        return is_flat(self.conv)

    @property
    def image(self) -> tuple[int, int, int]:
        """Images and their rows and columns, as tiles see them."""
        n, _, high, wide = self.conv.operands[0].type.shape
        return (1, 1, n * high * wide) if self.is_flat else (n, high, wide)

    @property
    def result(self) -> tuple[int, int, int]:
        n, _, high, wide = self.conv.result.type.shape
        return (1, 1, n * high * wide) if self.is_flat else (n, high, wide)

    @cached_property
    def sides(self) -> tuple[Along, Along]:
        window = self.conv.operands[1].type.shape[2:]
        return along(self.op, 0, window[0], self.tiling.high), along(self.op, 1, window[1], self.tiling.wide)

    @property
    def chunks(self) -> int:
        """Chunks of DEPTH channels of a block."""
        return self.conv.operands[1].type.shape[1] // DEPTH // self.tiling.splits

    @property
    def steps(self) -> int:
        """Taps of a block, times its chunks."""
        high, wide = self.conv.operands[1].type.shape[2:]
        return high * wide * self.chunks

    @property
    def own_steps(self) -> int:
        """Steps of a warp, at most."""
        return ceil_div(self.steps, self.tiling.deep)

    @cached_property
    def pitch(self) -> int:
        """Bytes from one pixel to the next in shared memory.

        It is chosen so that two neighbouring results, of which eight threads read 64 bytes each, are in different
        banks.
        """
        nbytes, apart = 2 * DEPTH * self.chunks, self.sides[1].apart
        pads = range(0, 128, 16)
        return nbytes + min(pads, key=lambda pad: (abs((nbytes + pad) * apart % 128 - 64), pad))

    @property
    def patch_bytes(self) -> int:
        down, right = self.sides
        return ceil_div(down.count * right.count * self.pitch, 128) * 128

    @property
    def sums_pitch(self) -> int:
        """Numbers from the sums of one pixel to those of the next, which are in other banks."""
        return self.tiling.filters + 4

    @property
    def rows_each(self) -> int:
        """Pixels of a tile that a block of a cluster finishes."""
        return ceil_div(self.tiling.pixels, self.tiling.splits if self.tiling.clusters else 1)

    @property
    def resident_bytes(self) -> int:
        tiling = self.tiling
        sums = tiling.deep * tiling.tiles * COLUMNS * self.sums_pitch * 4
        box = tiling.splits * self.rows_each * self.sums_pitch * 4 if tiling.clusters and tiling.splits > 1 else 0
        return 16 + self.patch_bytes + sums + box

    @property
    def across(self) -> tuple[int, int, int, int]:
        """Blocks: images, rows and columns of tiles, groups of filters."""
        tiling, (n, high, wide) = self.tiling, self.result
        filters = self.conv.result.type.shape[1]
        return n, ceil_div(high, tiling.high), ceil_div(wide, tiling.wide), ceil_div(filters, tiling.filters)

    @property
    def grid(self) -> int:
        n, down, right, groups = self.across
        return n * down * right * groups * self.tiling.splits

    def kernel(self) -> Kernel:
        tiling, arguments = self.tiling, Arguments()
        n, down, right, groups = self.across
        lines = [
            "RESIDENT(kept);",
            "const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, q = lane % 4u;",
            f"const u32 deep = warp / {tiling.across}u, side = warp % {tiling.across}u, block = blockIdx.x;",
            *split_index(
                "block", [("n", n), ("down", down), ("right", right), ("group", groups), ("part", tiling.splits)]
            ),
            f"const u32 first = group * {tiling.filters}u;",
        ]
        meets = tiling.clusters and tiling.splits > 1
        lines += ["u8* patch = kept + 16;", f"float* sums = (float*)(patch + {self.patch_bytes});"]
        if meets:
            each = self.rows_each
            lines.append(f"float* box = sums + {tiling.deep * tiling.tiles * COLUMNS * self.sums_pitch};")
            lines.append("u64* door = (u64*)kept;")
            finished = f"const u32 finished = (part + 1u) * {each}u <= {tiling.pixels}u ? {each}u : "
            lines.append(f"{finished}(part * {each}u < {tiling.pixels}u ? {tiling.pixels}u - part * {each}u : 0u);")
            lines.append(f"cluster_begins(door, finished * {tiling.splits * tiling.filters * 4}u);")
        loads = self._load_operands(arguments)
        lines += [*self._load_weights(arguments), "wait_for_launches();", *self._load_pixels(arguments)]
        lines += [*loads, "next_may_begin();", *self._multiply(), *self._merge_sums(arguments)]
        name = "+".join(["few_pixels", *(node.op.name for node in self.rest)])
        launch = arguments.launch("few_pixels", lines, self.grid, tiling.threads, cluster=tiling.splits if meets else 1)
        launch = replace(
            launch, resident_bytes=self.resident_bytes, architecture=CLUSTERS if meets else "", early=self._is_early
        )
        scratch = 0 if meets or tiling.splits == 1 else self.grid * tiling.pixels * tiling.filters * 4
        return Kernel(name, (launch,), scratch)

    def _load_pixels(self, arguments: Arguments) -> list[str]:
        """Begin to copy the pixels that the tile reads into shared memory; past the image, zeros.

        Threads copy pixels of a row, or of several rows.
        """
        x, tiling, (down, right) = self.conv.operands[0], self.tiling, self.sides
        channels, (_, high, wide) = x.type.shape[1], self.image
        n, _, h, w = (0, 1, 0, channels) if self.is_flat else x.type.strides
        top, left = (0, 0) if self.is_flat else self.op.pads[:2]
        strides = (1, 1) if self.is_flat else self.op.strides
        octets = DEPTH // PACK * self.chunks
        span = right.count * octets  # copies for a row
        rows, turns = (
            max(1, tiling.threads // span),
            ceil_div(span, tiling.threads),
        )  # together, and of a row
        held = [f"i < {span}u"] if turns * tiling.threads > span else []
        if rows > 1:
            held = [f"first < {rows}u"] if rows * span < tiling.threads else []
            held += [f"r * {rows} + first < {down.count}u"] if down.count % rows else []
        y, stride = f"y + r * {rows * down.stride}", rows * down.stride * h
        copy = f"copy_or_zeros_ahead(to + r * {rows * right.count * self.pitch}, from + r * {stride}"
        return [
            "#pragma unroll",
            f"for (int turn = 0; turn < {turns}; ++turn) {{",
            f"  const u32 place = threadIdx.x + turn * {tiling.threads}u;",
            f"  const u32 first = {f'place / {span}u' if rows > 1 else '0u'}, i = place - first * {span}u;",
            f"  const u32 c = i % {octets}u, column = i / {octets}u;",
            f"  const int y = (int)(down * {tiling.high * strides[0]}u + first * {down.stride}u) - {top};",
            f"  const int x = (int)(right * {tiling.wide * strides[1]}u + column * {right.stride}u) - {left};",
            f"  const {C_TYPES[x.type.dtype]}* from = {arguments.read(x)} + ((int)(n * {n}u) + y * {h} + x * {w} + "
            f"(int)(part * {self.chunks * DEPTH}u + c * {PACK}u));",
            f"  u8* to = patch + ((first * {right.count}u + column) * {self.pitch}u + c * 16u);",
            "  #pragma unroll",
            f"  for (int r = 0; r < {ceil_div(down.count, rows)}; ++r)",
            f"    if ({' && '.join(held) or 'true'}) {copy}, (u32)({y}) < {high}u && (u32)x < {wide}u);",
            "}",
            "copied();",
        ]

    def _load_weights(self, arguments: Arguments) -> list[str]:
        """Issue the loads of the weights of a warp's first steps."""
        w, tiling = self.conv.operands[1], self.tiling
        filters = w.type.shape[0]
        groups, kind = filters // ROWS, C_TYPES[w.type.dtype]
        size = ROWS * DEPTH  # of a step
        own = f"(group * {tiling.filters // ROWS}u + side * {tiling.rows}u"
        pointer = arguments.read(w, fragments(w.type, tiling.splits))
        lines = [f"const {kind}* weights[{tiling.rows}];"]
        place = f"{own} + m)"
        if filters % tiling.filters:  # filters past the last are computed, but not stored
            place = f"({place} < {groups}u ? {place} : {groups - 1}u)"
        at = f"({place} * {tiling.splits}u + part) * {self.steps * size}u + deep * {size}u + lane * {PACK}u"
        lines += unrolled_loops([("m", tiling.rows)], f"weights[m] = {pointer} + ({at});")
        lines += [f"u32 w[{self._ahead}][{tiling.rows}][2][4];", "auto load = [&](int slot, int i) {"]
        load = f"load_words(w[slot][m][h], weights[m] + (i * {tiling.deep * size} + h * {size // 2}));"
        lines += [f"if ({self._is_step}) {{", *unrolled_loops([("m", tiling.rows), ("h", 2)], load)]
        return [*lines, "}", "};", *unrolled_loops([("i", self._ahead)], "load(i, i);"), "__syncwarp();"]

    @property
    def _ahead(self) -> int:
        """Steps of a warp whose weights are loaded together."""
        return max(1, min(self.own_steps, HELD // (8 * self.tiling.rows)))

    @property
    def _is_step(self) -> str:
        """The condition that a warp has a step `i`; only the last may be missing."""
        deep = self.tiling.deep
        return f"(i + 1) * {deep} <= {self.steps} || deep + i * {deep}u < {self.steps}u"

    def _multiply(self) -> list[str]:
        """Compute the block's sums in shared memory (`sums`), for each of `deep` warps."""
        tiling, (down, right) = self.tiling, self.sides
        wide = self.conv.operands[1].type.shape[3]
        tiles, rows, own, kind = tiling.tiles, tiling.rows, self.own_steps, C_TYPES[self.conv.result.type.dtype]
        row, column = f"n * {COLUMNS} / {tiling.wide}", f"n * {COLUMNS} % {tiling.wide}"
        spot = f"({row} * {down.apart * right.count} + {column} * {right.apart}) * {self.pitch}"
        lines = [f"const u8* own = patch + (g * {right.apart * self.pitch}u + q * 16u);"]
        lines.append(f"float acc[{rows}][{tiles}][4];")
        lines += unrolled_loops([("m", rows), ("n", tiles), ("e", 4)], "acc[m][n][e] = 0.0f;")
        lines += ["wait_for_copies<0>();", "__syncthreads();"]
        lines += ["#pragma unroll", f"for (int i = 0; i < {own}; ++i) {{", f"if ({self._is_step}) {{"]
        lines.append(f"const u32 s = deep + i * {tiling.deep}u, tap = s / {self.chunks}u, chunk = s % {self.chunks}u;")
        taps = f"tap / {wide}u * {down.dilation * right.count}u + tap % {wide}u * {right.dilation}u"
        lines.append(f"const u32 from = ({taps}) * {self.pitch}u + chunk * {2 * DEPTH}u;")
        lines += ["#pragma unroll", f"for (int n = 0; n < {tiles}; ++n) {{"]
        lines += [f"const Pack<u32, 4> x = load_pack<u32, 4>((const u32*)(own + from + {spot}));"]
        words = ", ".join(f"v[{i}]" for i in range(4))
        lines += unrolled_loops(
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
        lines += unrolled_loops([("m", rows), ("n", tiles), ("e", 4)], f"sums[{place}] = acc[m][n][e];")
        return [*lines, "__syncthreads();"]

    def _merge_sums(self, arguments: Arguments) -> list[str]:
        """Merge the sums of warps, and of blocks, in a fixed order; apply the epilogue."""
        tiling = self.tiling
        octets, pitch = tiling.filters // PACK, self.sums_pitch
        of_warps = f"sums + (pixel * {pitch}u + octet * {PACK}u)", tiling.tiles * COLUMNS * pitch, tiling.deep
        if tiling.splits == 1:
            return self._finish(arguments, *of_warps)
        lines = [
            f"for (u32 i = threadIdx.x; i < {tiling.pixels * octets}u; i += {tiling.threads}u) {{",
            f"const u32 pixel = i / {octets}u, octet = i % {octets}u;",
            *_sum_parts("total", *of_warps),
        ]
        if tiling.clusters:
            at = f"(part * {self.rows_each}u + pixel % {self.rows_each}u) * {pitch}u + octet * {PACK}u"
            lines.append(f"send(box + ({at}), total, door, pixel / {self.rows_each}u);")
            lines = ["cluster_is_there();", *lines, "}", "wait_for_peers(door);"]
            from_box = f"box + (pixel % {self.rows_each}u * {pitch}u + octet * {PACK}u)"
            return [*lines, *self._finish(arguments, from_box, self.rows_each * pitch, tiling.splits)]
        size = tiling.pixels * tiling.filters
        lines.append(f"store_pack<float, 8>({arguments.scratch()} + (block * {size}u + i * {PACK}u), total);")
        door = f"{arguments.doors(self.grid // tiling.splits)} + block / {tiling.splits}u * DOOR"
        lines += ["}", f"if (!last_of({door}, {tiling.splits}u)) return;"]
        there = f"{arguments.scratch()} + (block / {tiling.splits}u * {tiling.splits * size}u + item * {PACK}u)"
        return [*lines, *self._finish(arguments, there, size, tiling.splits, "across")]

    def _finish(self, arguments: Arguments, pointer: str, apart: int, count: int, read: str = "*") -> list[str]:
        """Merge `count` parts and apply the epilogue. As in cuDNN's graphs, only what is stored is rounded."""
        return [
            line
            for turn in range(self._turns)
            for line in (
                f"if (is{turn}) {{",
                f"const u32 item = item{turn}, pixel = pixel{turn}, octet = item % {self.tiling.filters // PACK}u;",
                *_sum_parts("total", pointer, apart, count, read),
                *self._epilogue_code(turn, arguments)[1],
                "}",
            )
        ]

    @property
    def _turns(self) -> int:
        """Turns of a thread, which finishes eight results of a pixel in each."""
        return ceil_div(self.rows_each * self.tiling.filters // PACK, self.tiling.threads)

    def _load_operands(self, arguments: Arguments) -> list[str]:
        """Issue the loads of the epilogue before the sums are known. Threads without a result read another's."""
        return [line for turn in range(self._turns) for line in self._epilogue_code(turn, arguments)[0]]

    @cached_property
    def _packs(self) -> bool:
        """Tell if one load or store moves eight neighbours, where they are contiguous."""
        values = (self.conv.result, *inputs_of(self.rest), *self.outputs)
        types = [v.type for v in values if v.type.size != 1]
        steps = [[stride_along(each, 4, 1), *(stride_along(each, 4, d) for d in (0, 2, 3))] for each in types]
        return widest_vector(self.conv.result.type.shape[1], types, steps) == PACK

    @property
    def _is_early(self) -> bool:
        """Tell if the launch may begin early: all that earlier launches may write is loaded after the wait.

        The compiler may move other read-only loads before the wait.
        """
        read = [v.type for v in inputs_of(self.rest) if v.literal is None and v is not self.conv.result]
        return self._packs and all(stride_along(type, 4, 1) == 1 for type in read)

    def _epilogue_code(self, turn: int, arguments: Arguments) -> tuple[list[str], list[str]]:
        """Return the code of the epilogue: its loads, and the rest."""
        tiling, y, (_, high, wide) = self.tiling, self.conv.result, self.result
        octets, filters = tiling.filters // PACK, y.type.shape[1]
        t, own = str(turn), tiling.clusters and tiling.splits > 1
        inside = [f"down * {tiling.high}u + pixel{t} / {tiling.wide}u < {high}u"]
        inside += [f"right * {tiling.wide}u + pixel{t} % {tiling.wide}u < {wide}u", f"pixel{t} < {tiling.pixels}u"]
        inside += [f"item{t} < {self.rows_each * octets}u", f"first + item{t} % {octets}u * {PACK}u < {filters}u"]
        lines = [
            f"const u32 item{t} = threadIdx.x + {turn * tiling.threads}u;",
            f"const u32 pixel{t} = item{t} / {octets}u{f' + part * {self.rows_each}u' if own else ''};",
            f"const bool is{t} = {' && '.join(inside)};",
            f"const u32 p{t} = is{t} ? pixel{t} : 0u, f{t} = first + (is{t} ? item{t} % {octets}u * {PACK}u : 0u);",
            f"const u32 y{t} = down * {tiling.high}u + p{t} / {tiling.wide}u;",
            f"const u32 x{t} = right * {tiling.wide}u + p{t} % {tiling.wide}u;",
        ]
        names: tuple[str, ...] = ("n", f"f{t}", f"y{t}", f"x{t}")
        if self.is_flat:
            n, _, height, width = y.type.shape
            names = (f"n{t}", f"f{t}", f"h{t}", f"w{t}")
            lines += split_index(f"x{t}", [(names[0], n), (names[2], height), (names[3], width)])
        space = Space(y.type.shape, names, 1, PACK, packs=self._packs)
        code = PointwiseCode(space, arguments, f"v{t}_", rounds=False, ahead=True)
        code.define(y, "total.v[j]")
        for node in self.rest:
            code.apply(node)
        loads, code.head = code.head, []
        for value in self.outputs:
            code.store(value)
        return [*lines, *loads], code.lines()


def _sum_parts(name: str, pointer: str, apart: int, count: int, read: str = "*") -> list[str]:
    """Sum eight numbers over `count` parts, which are `apart` numbers from each other."""
    pack = "const Pack<float, 8>"
    lines = [f"Pack<float, 8> {name} = {read}(({pack}*)({pointer}));"]
    if count > 1:
        lines += ["#pragma unroll", f"for (int k = 1; k < {count}; ++k) {{"]
        lines.append(f"{pack} more = {read}(({pack}*)({pointer} + k * {apart}));")
        lines += [*unrolled_loops([("j", PACK)], f"{name}.v[j] += more.v[j];"), "}"]
    return lines
