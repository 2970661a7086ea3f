"""Generate convolution with few filters.

cuDNN's tiles are 32 filters wide or more, so 3 filters waste tensor cores. Here the columns of a product are the
filters
times the taps along a row, and the products are summed with shifts. A warp reads a row of the image once and multiplies
it by the taps of all rows of results that it contributes to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen.gpu_figures import PROCESSORS
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import COLUMNS, PIXELS, can_follow, unrolled_loops
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, split_index
from fusec.ir import Node, Value
from fusec.ops import Conv

MOST_FILTERS = 8
MOST_SUMS = 176  # of a thread, because it has 255 registers
TILES, WARPS = (1, 2, 4), (4, 8)
# The cost of reading a row, and of starting a block, relative to multiplying a row by all its taps. They are estimates,
# which only order the variants.
READ, BEGUN = 0.4, 2.0
UNROLLED_STEPS = 16  # up to this, unneeded products at the ends of a strip are left out
PADDING = 4  # of a row of sums, so that those of a warp are in different banks
SHARED_BYTES = 96 << 10  # of a block, at most
STRIPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OTHERS = 3


@dataclass(frozen=True)
class FewFiltersTiling:
    """Shares of a convolution among blocks.

    warps: warps of a block.
    tiles: each warp handles 16 times so many pixels of a row.
    strip: rows of results of a block.
    """

    warps: int
    tiles: int
    strip: int

    @property
    def span(self) -> int:
        """Pixels of a row that a block multiplies."""
        return self.warps * self.tiles * PIXELS


def few_filters(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """Return the kernel of a convolution with at most 8 filters and its epilogue; None for other steps."""
    conv, rest = nodes[0], nodes[1:]
    if not isinstance(conv.op, Conv) or not all(map(can_follow, rest)):
        return None
    (x, w), y = conv.operands, conv.result
    if x.type.rank != 4 or x.type.dtype not in HALVES or conv.op.groups != 1 or conv.op.strides != (1, 1):
        return None
    steps = [stride for d, stride in enumerate(x.type.strides) if d != 1]
    if x.type.strides[1] != 1 or x.type.shape[1] % 16 or any(stride % 8 for stride in steps):
        return None
    if w.type.shape[0] > MOST_FILTERS or w.type.dtype is not x.type.dtype or not y.type.size:
        return None
    if any(v.type.shape != y.type.shape for v in outputs) or max(v.type.span for v in (x, w, y)) >= 1 << 31:
        return None
    variants = _variants(conv)
    if not variants:
        return None
    best, *others = (_FewFiltersSource(conv, rest, outputs, variant).kernel() for variant in variants)
    return replace(best, others=tuple(others))


def _variants(conv: Node) -> list[FewFiltersTiling]:
    """Return the variants, the likely fastest first; none if sums do not fit into registers."""
    op, (x, w), y = conv.op, conv.operands, conv.result
    assert isinstance(op, Conv)
    filters, _, high, wide = w.type.shape
    numbers = ceil_div(wide * filters, COLUMNS)
    if high * numbers * 4 > MOST_SUMS:
        return []
    taken: list[tuple[float, FewFiltersTiling]] = []
    width, reach = x.type.shape[3], (wide - 1) * op.dilations[1]
    for tiles, warps in ((tiles, warps) for tiles in TILES for warps in WARPS):
        tiling = FewFiltersTiling(warps, tiles, 1)
        if high * numbers * 4 * tiles > MOST_SUMS or _shared_bytes(conv, tiling) > SHARED_BYTES:
            continue
        if width > tiling.span and tiling.span <= 2 * reach:
            continue
        at_once = max(WARPS) // warps  # because registers suffice for one block of the larger size
        for strip in STRIPS:
            down = op.dilations[0] * ceil_div(ceil_div(y.type.shape[2], op.dilations[0]), strip)
            turns = ceil_div(x.type.shape[0] * _across(conv, tiling) * down, PROCESSORS * at_once)
            rows = strip + high - 1
            products = strip if rows <= UNROLLED_STEPS else rows
            cost = turns * at_once * tiling.span * (READ * rows + products + BEGUN)
            taken.append((cost, replace(tiling, strip=strip)))
            if down <= op.dilations[0]:
                break
    taken.sort(key=lambda item: item[0])
    firsts: dict[tuple[int, int], None] = {}
    chosen: list[FewFiltersTiling] = []
    for _, tiling in taken:  # the best strip of each width first, then the others
        if (tiling.warps, tiling.tiles) not in firsts:
            firsts[tiling.warps, tiling.tiles] = None
            chosen.append(tiling)
    rest = [tiling for _, tiling in taken if tiling not in chosen]
    return [*chosen, *rest][: 1 + OTHERS]


def _across(conv: Node, tiling: FewFiltersTiling) -> int:
    """Return the blocks for a row. If one block holds all of it, pixels past its ends are known to be zero."""
    op, x, y = conv.op, conv.operands[0], conv.result
    assert isinstance(op, Conv)
    if x.type.shape[3] <= tiling.span:
        return 1
    return ceil_div(y.type.shape[3], tiling.span - (conv.operands[1].type.shape[3] - 1) * op.dilations[1])


def _shared_bytes(conv: Node, tiling: FewFiltersTiling) -> int:
    filters, channels, high, wide = conv.operands[1].type.shape
    numbers = ceil_div(wide * filters, COLUMNS) * COLUMNS
    return numbers * (high * channels * 2 + 2 * (tiling.span + PADDING) * 4)


@dataclass(frozen=True)
class _FewFiltersSource:
    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    tiling: FewFiltersTiling

    def kernel(self) -> Kernel:
        conv, tiling = self.conv, self.tiling
        op, (x, w), y = conv.op, conv.operands, conv.result
        assert isinstance(op, Conv)
        filters, channels, high, wide = w.type.shape
        across, apart = _across(conv, tiling), op.dilations[0]
        strips = ceil_div(ceil_div(y.type.shape[2], apart), tiling.strip)
        grid = x.type.shape[0] * strips * apart * across
        arguments = Arguments()
        image = arguments.read(x)
        stored = w.type if w.literal is None else w.type.with_order((2, 3, 0, 1))
        taps = arguments.read(w, stored)
        each = 8 if channels % 32 == 0 else 4  # neighbours of a pixel that a thread reads; four threads share the pixel
        whole = across == 1 and x.type.shape[3] <= tiling.span
        out = y.type.shape[3] if whole else tiling.span - (wide - 1) * op.dilations[1]
        tiles, numbers = tiling.tiles, ceil_div(wide * filters, COLUMNS)
        chunks, block, steps = channels // (4 * each), tiling.warps * 32, tiling.strip + high - 1
        kind = C_TYPES[x.type.dtype]
        pack = f"Pack<u32, {each // 2}>"
        lines = [
            f"alignas(16) __shared__ {kind} filters[{high * chunks * numbers * COLUMNS * 4 * each}];",
            "RESIDENT(kept);",
            "const u32 warp = threadIdx.x / 32u, lane = threadIdx.x % 32u, eighth = lane / 4u, fourth = lane % 4u;",
            "const u32 block = blockIdx.x;",
            *split_index("block", [("c0", x.type.shape[0]), ("strip", strips), ("phase", apart), ("part", across)]),
            f"const int first = (int)(strip * {tiling.strip * apart}u + phase);",
            f"const int top = first - {op.pads[0]};",
            f"const int begin = (int)part * {out}, left = {0 if whole else f'begin - {op.pads[1]}'};",
        ]
        lines += self._load_filters(taps, stored.strides, each, chunks, numbers, block)
        # `next` is loaded while `taken` is multiplied
        lines += [
            f"float acc[{high}][{tiles}][{numbers}][4];",
            *unrolled_loops([("a", high), ("b", tiles), ("c", numbers), ("d", 4)], "acc[a][b][c][d] = 0.0f;"),
            f"{pack} next[{tiles}][2];",
        ]
        load = self._load(image, each)
        lines += [*load("0", "0"), "__syncthreads();"]
        short = steps <= UNROLLED_STEPS
        if short:
            lines += ["#pragma unroll", f"for (int p = 0; p < {steps}; ++p) {{", "const int s = p;"]
        else:
            lines += ["#pragma unroll 1", f"for (int base = 0; base < {steps}; base += {high}) {{"]
            lines += ["#pragma unroll", f"for (int p = 0; p < {high}; ++p) {{", "const int s = base + p;"]
            lines += [f"if (s >= {steps}) break;"]
        lines += ["#pragma unroll", f"for (int chunk = 0; chunk < {chunks}; ++chunk) {{"]
        lines += [f"{pack} taken[{tiles}][2];"]
        lines += unrolled_loops([("b", tiles), ("h", 2)], "taken[b][h] = next[b][h];")
        lines += [f"if (chunk + 1 < {chunks}) {{", *load("s", "chunk + 1"), f"}} else if (s + 1 < {steps}) {{"]
        lines += [*load("s + 1", "0"), "}"]
        lines += ["#pragma unroll", f"for (int k = 0; k < {high}; ++k) {{"]
        if short:
            lines.append(f"if (k > s || s - k >= {tiling.strip}) continue;")
        lines += ["#pragma unroll", f"for (int c = 0; c < {numbers}; ++c) {{"]
        place = f"((k * {chunks} + chunk) * {numbers} + c) * {32 * each} + lane * {each}"
        lines.append(f"const {pack} tap = *reinterpret_cast<const {pack}*>(filters + ({place}));")
        lines += ["#pragma unroll", f"for (int b = 0; b < {tiles}; ++b) {{"]
        for half in range(each // 4):
            lower, upper = 2 * half, 2 * half + 1
            words = ", ".join(f"taken[b][{h}].v[{i}]" for i in (lower, upper) for h in (0, 1))
            lines.append(
                f"multiply_tile<{kind}>(acc[(p + {high} - k) % {high}][b][c], {words}, tap.v[{lower}], tap.v[{upper}]);"
            )
        lines += ["}", "}", "}", "}", *self._finish_row(out, whole, numbers, arguments), "}"]
        lines += [] if short else ["}"]
        name = "+".join(["few_filters", *(node.op.name for node in self.rest)])
        launch = arguments.launch("few_filters", lines, grid, block)
        nbytes = 2 * numbers * COLUMNS * (tiling.span + PADDING) * 4
        return Kernel(name, (replace(launch, resident_bytes=nbytes),))

    def _load_filters(
        self, taps: str, strides: tuple[int, ...], each: int, chunks: int, numbers: int, block: int
    ) -> list[str]:
        """Load the filters as threads read them: by row, chunk of channels, column of the product, channels."""
        filters, _, high, wide = self.conv.operands[1].type.shape
        kind, count = C_TYPES[self.conv.operands[1].type.dtype], high * chunks * numbers * COLUMNS * 4
        lines = [f"for (u32 i = threadIdx.x; i < {count}u; i += {block}u) {{"]
        lines += split_index("i", [("k", high), ("chunk", chunks), ("column", numbers * COLUMNS), ("quarter", 4)])
        lines += [f"Pack<{kind}, {each}> tap;", f"for (int j = 0; j < {each}; ++j) tap.v[j] = {kind}();"]
        lines.append(f"if (column < {wide * filters}u) {{")
        f, c, a, b = strides
        lines.append(f"const u32 tap_column = column / {filters}u, filter = column % {filters}u;")
        channel = f"(chunk * {4 * each}u + quarter * {each}u) * {c}"
        lines.append(f"const u32 from = filter * {f} + k * {a} + tap_column * {b} + {channel};")
        if c == 1 and all(stride % each == 0 for stride in (f, a, b)):
            lines.append(f"tap = load_pack<{kind}, {each}>({taps} + from);")
        else:
            lines.append(f"for (int j = 0; j < {each}; ++j) tap.v[j] = {taps}[from + j * {c}];")
        lines.append("}")
        return [*lines, f"*reinterpret_cast<Pack<{kind}, {each}>*>(filters + i * {each}) = tap;", "}"]

    def _load(self, image: str, each: int) -> Callable[[str, str], list[str]]:
        """Return a function that loads a step's pixels of some channels; past the image, zeros."""
        op, x = self.conv.op, self.conv.operands[0].type
        assert isinstance(op, Conv)
        n, _, h, w = x.strides

        def load(step: str, chunk: str) -> list[str]:
            at = f"c0 * {n}u + (u32)row * {h}u + (u32)column * {w}u + ({chunk}) * {4 * each} + fourth * {each}u"
            return [
                "{",
                f"const int row = top + ({step}) * {op.dilations[0]};",
                *unrolled_loops(
                    [("b", self.tiling.tiles), ("h", 2)],
                    f"const u32 pixel = (warp * {self.tiling.tiles}u + b) * {PIXELS}u + h * 8u + eighth;",
                    "const int column = left + (int)pixel;",
                    f"for (int j = 0; j < {each // 2}; ++j) next[b][h].v[j] = 0;",
                    f"if ((u32)row < {x.shape[2]}u && (u32)column < {x.shape[3]}u)",
                    f"  next[b][h] = load_pack<u32, {each // 2}>(reinterpret_cast<const u32*>({image} + ({at})));",
                ),
                "}",
            ]

        return load

    def _finish_row(self, out: int, whole: bool, numbers: int, arguments: Arguments) -> list[str]:
        """Sum the taps of a finished row of results, apply the epilogue, and store it."""
        op, w, y, tiling = self.conv.op, self.conv.operands[1], self.conv.result, self.tiling
        assert isinstance(op, Conv)
        filters, _, high, wide = w.type.shape
        # two rows alternate, so that a fast warp can multiply the next one while others still sum this one
        pitch, width = tiling.span + PADDING, numbers * COLUMNS
        lines = [f"if (s >= {high - 1}) {{", f"float* sums = reinterpret_cast<float*>(kept) + s % 2 * {pitch * width};"]
        done = f"(p + 1) % {high}"
        lines += unrolled_loops(
            [("b", tiling.tiles), ("c", numbers), ("h", 2), ("d", 2)],
            f"sums[(c * 8 + fourth * 2 + d) * {pitch} + (warp * {tiling.tiles} + b) * {PIXELS} + h * 8 + eighth] = "
            f"acc[{done}][b][c][h * 2 + d];",
        )
        lines += ["__syncthreads();", f"const u32 c2 = (u32)(first + (s - {high - 1}) * {op.dilations[0]});"]
        lines.append(f"if (c2 < {y.type.shape[2]}u)")
        lines.append(f"for (u32 column = threadIdx.x; column < {out}u; column += {tiling.warps * 32}u) {{")
        lines += ["const u32 c3 = (u32)begin + column;", f"if (c3 >= {y.type.shape[3]}u) break;"]
        code = PointwiseCode(Space(y.type.shape, ("c0", "c1", "c2", "c3")), arguments)
        code.define(y, "total")
        for node in self.rest:
            code.apply(node)
        for value in self.outputs:
            code.store(value)
        lines += ["#pragma unroll", f"for (u32 c1 = 0; c1 < {filters}u; ++c1) {{", "float total = 0.0f;"]
        lines += ["#pragma unroll", f"for (int k = 0; k < {wide}; ++k) {{"]
        lines.append(f"const int at = (int)column + k * {op.dilations[1]}{f' - {op.pads[1]}' if whole else ''};")
        guard = f"if ((u32)at < {tiling.span}u) " if whole else ""
        lines += [f"{guard}total += sums[(k * {filters} + c1) * {pitch} + at];", "}", *code.lines(), "}", "}", "}"]
        # also in the first steps, whose products belong to rows before the strip
        lines += unrolled_loops([("b", tiling.tiles), ("c", numbers), ("d", 4)], f"acc[{done}][b][c][d] = 0.0f;")
        return lines
