"""Generate depthwise convolution by blocks that keep some channels of one image.

Filters can stay in registers. Results are also summed over space, for the mean that a squeeze-and-excitation begins
with.
Blocks store their sums in scratch memory; a small launch merges those of an image in the order of the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fusec.gpu.kernels.codegen.gpu_figures import PROCESSORS
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Launch, ceil_div, compute_type, power_of_two
from fusec.gpu.kernels.codegen.loops import ChunkMerge
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, split_index
from fusec.ir import Node, TensorType, Value
from fusec.ops import Conv, Reduce

MAX_LANES = 32  # neighbouring vectors of channels of a block
FULL_LANES = 8  # with so many, a block reads whole cache lines


@dataclass(frozen=True)
class DepthwiseTile:
    """Tile that a thread computes in one turn: `vector` channels of `rows` x `strip` results.

    held: all filters stay in registers for all turns; otherwise there is one row.
    blocks: the number of blocks to aim at.
    """

    vector: int
    strip: int
    rows: int = 1
    held: bool = False
    blocks: int = 8 * PROCESSORS


@dataclass(frozen=True, eq=False)
class DepthwiseSource:
    """A convolution with its epilogue, and perhaps a sum or mean over space.

    rest: the epilogue.
    outputs: results of the epilogue that are stored.
    """

    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    mean: Node | None
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
        return ceil_div(self.y.shape[-2], self.tile.rows) if self.y.rank > 3 else 1

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
        if self.mean is None:
            return 0
        return self.chunks * self.y.shape[0] * self.y.shape[1] * (8 if self.kind == "double" else 4)

    @property
    def kind(self) -> str:
        return compute_type(self.y.dtype)

    def launches(self) -> tuple[Launch, ...]:
        return (self.elements(),) if self.mean is None else (self.elements(), self.together())

    def elements(self) -> Launch:
        """Return the launch that computes each result, and the sums of blocks."""
        y, tile, threads, lanes, arguments = self.y, self.tile, self.threads, self.lanes, Arguments()
        n, rank, each = y.shape[0], y.rank, self.each(self.chunks)
        lines = [f"const u32 lane = threadIdx.x % {lanes}u, t = threadIdx.x / {lanes}u;"]
        lines.append("const u32 block = blockIdx.x;")
        lines += split_index("block", [("chunk", self.chunks), ("c0", n), ("group", self.groups)])
        lines.append(f"const u32 pack = group * {lanes}u + lane;")
        if self.packs % lanes:
            lines.append(f"const bool live = pack < {self.packs}u;")
            lines.append(f"const u32 c1 = (live ? pack : {self.packs - 1}u) * {tile.vector}u;")
        else:
            lines += ["const bool live = true;", f"const u32 c1 = pack * {tile.vector}u;"]
        if self.mean is not None:
            lines.append(f"__shared__ {self.kind} shared[{lanes * threads * tile.vector}];")
            lines.append(f"{self.kind} sum[{tile.vector}];")
            lines.append(f"for (int j = 0; j < {tile.vector}; ++j) sum[j] = 0;")
        window = DepthwiseWindow(self.conv, tile, arguments)
        if tile.held:
            lines += window.filters()
        lines.append(f"const u32 begin = chunk * {each}u;")
        lines.append(f"const u32 end = begin + {each}u < {self.items}u ? begin + {each}u : {self.items}u;")
        lines += ["#pragma unroll 1", f"for (u32 item = begin + t; item < end; item += {threads}u) {{"]
        names = [(f"c{d}", y.shape[d]) for d in range(2, rank - 2)]
        names += [("band", self.bands)] if rank > 3 else []
        body = split_index("item", [*names, ("strip", self.strips)])
        body += window.sums()
        code = PointwiseCode(
            Space(y.shape, tuple(f"c{d}" for d in range(rank)), 1, tile.vector), arguments, rounds=False
        )
        code.define(self.conv.result, "acc[r][s][j]")
        for node in self.rest:
            code.apply(node)
        for value in self.outputs:
            code.store(value)
        if self.mean is not None:
            code.body.append(f"if (live) sum[j] += {code.get(self.mean.operands[0])};")
        body += ["#pragma unroll", f"for (int r = 0; r < {tile.rows}; ++r) {{"]
        if rank > 3:
            body.append(f"  const u32 c{rank - 2} = band * {tile.rows}u + r;")
            if y.shape[-2] % tile.rows:
                body.append(f"  if (c{rank - 2} >= {y.shape[-2]}u) break;")
        body += ["  #pragma unroll", f"  for (int s = 0; s < {tile.strip}; ++s) {{"]
        body.append(f"    const u32 c{rank - 1} = strip * {tile.strip}u + s;")
        if y.shape[-1] % tile.strip:
            body.append(f"    if (c{rank - 1} >= {y.shape[-1]}u) break;")
        body += [*(f"    {line}" for line in code.lines()), "  }", "}"]
        lines += [*(f"  {line}" for line in body), "}"]
        if self.mean is not None:
            pointer = arguments.scratch(self.kind)
            lines.append(f"reduce_threads<{lanes * threads}, {threads}, {lanes}, {tile.vector}>(sum, shared, Add());")
            lines.append("if (live && t == 0)")
            at = f"(chunk * {n}u + c0) * {y.shape[1]}u + c1 + j"
            lines.append(f"  for (int j = 0; j < {tile.vector}; ++j) {pointer}[{at}] = sum[j];")
        grid = self.groups * n * self.chunks
        return arguments.launch("depthwise", lines, grid, lanes * threads)

    def together(self) -> Launch:
        """Return the launch that merges the sums of blocks."""
        assert self.mean is not None and isinstance(self.mean.op, Reduce)
        arguments, (n, channels) = Arguments(), self.y.shape[:2]
        pointer = arguments.scratch(f"const {self.kind}")
        merge = ChunkMerge(n * channels, self.chunks)
        lines = merge.setup(self.kind, 1)
        lines += ["#pragma unroll 4", f"for (u32 s = t; s < {self.chunks}u; s += {merge.threads}u)"]
        lines += [f"  acc0[0] += {pointer}[s * {n * channels}u + c];", *merge.reduce(1)]
        lines += split_index("c", [("c0", n), ("c1", channels)])
        result = self.mean.result
        names = ("c0", "c1", *[None] * (result.type.rank - 2))
        code = PointwiseCode(Space(result.type.shape, names), arguments)
        code.define(result, self.total("acc0[0]"))
        code.store(result)
        lines += ["if (live && t == 0) {", *(f"  {line}" for line in code.lines()), "}"]
        return arguments.launch("depthwise_together", lines, merge.blocks, merge.block)

    def total(self, sum: str) -> str:
        """Turn a sum over space into the result of the reduction."""
        assert self.mean is not None and isinstance(self.mean.op, Reduce)
        count = math.prod(self.y.shape[2:])
        return f"{sum} / {self.kind}({count})" if self.mean.op.kind == "mean" else sum


@dataclass(frozen=True, eq=False)
class DepthwiseWindow:
    """The sums of products of a tile, and its filters."""

    conv: Node
    tile: DepthwiseTile
    arguments: Arguments

    @property
    def taps(self) -> TensorType:
        w = self.conv.operands[1]
        return w.type if w.literal is None else w.type.with_order((*range(2, w.type.rank), 0, 1))

    def filters(self) -> list[str]:
        """Load the filters into `weight`: all of them, or those of the loop's current row."""
        taps, n, vector = self.taps, self.taps.rank - 2, self.tile.vector
        kind, number = C_TYPES[taps.dtype], compute_type(taps.dtype)
        pointer = self.arguments.read(self.conv.operands[1], taps)
        dims = range(n) if self.tile.held else range(n - 1, n)
        lines = [f"{number} weight{''.join(f'[{taps.shape[2 + d]}]' for d in dims)}[{vector}];"]
        lines += [
            line for d in dims for line in ("#pragma unroll", f"for (int k{d} = 0; k{d} < {taps.shape[2 + d]}; ++k{d})")
        ]
        at = " + ".join(["c1 * " + str(taps.strides[0]), *(f"k{d} * {taps.strides[2 + d]}" for d in range(n))])
        place = "weight" + "".join(f"[k{d}]" for d in dims)
        if taps.strides[0] == 1 and vector > 1:
            lines.append(f"{{ const Pack<{kind}, {vector}> taken = load_pack<{kind}, {vector}>({pointer} + ({at}));")
            lines.append(f"  for (int j = 0; j < {vector}; ++j) {place}[j] = wide(taken.v[j]); }}")
        else:
            one = f"wide({pointer}[{at} + j * {taps.strides[0]}])"
            lines.append(f"for (int j = 0; j < {vector}; ++j) {place}[j] = {one};")
        return lines

    def sums(self) -> list[str]:
        """Compute the sums of products in `acc`.

        Each row of the image is read once for all rows of the tile whose windows contain it.
        """
        op, x, tile, taps = self.conv.op, self.conv.operands[0].type, self.tile, self.taps
        assert isinstance(op, Conv)
        kind, number, n, vector = C_TYPES[x.dtype], compute_type(x.dtype), x.rank - 2, tile.vector
        image, window = self.arguments.read(self.conv.operands[0]), taps.shape[2:]
        stride, dilation, pad = op.strides[-1], op.dilations[-1], op.pads[n - 1]
        columns = (tile.strip - 1) * stride + (window[-1] - 1) * dilation + 1
        lines = [f"{number} acc[{tile.rows}][{tile.strip}][{vector}];"]
        zero = f"for (int r = 0; r < {tile.rows}; ++r) for (int s = 0; s < {tile.strip}; ++s)"
        lines.append(f"{zero} for (int j = 0; j < {vector}; ++j) acc[r][s][j] = 0;")
        closes: list[str] = []
        for d in range(n - 2):
            lines += ["#pragma unroll", f"for (int k{d} = 0; k{d} < {window[d]}; ++k{d}) {{"]
            lines.append(f"const int p{d} = (int)c{2 + d} * {op.strides[d]} - {op.pads[d]} + k{d} * {op.dilations[d]};")
            lines.append(f"if ((u32)p{d} >= {x.shape[2 + d]}u) continue;")
            closes.append("}")
        d, row = n - 2, "0"
        if n > 1:
            high = (tile.rows - 1) * op.strides[d] + (window[d] - 1) * op.dilations[d] + 1
            row = f"h / {op.dilations[d]}"
            lines += ["#pragma unroll", f"for (int high = 0; high < {high}; ++high) {{"]
            lines.append(f"const int p{d} = (int)band * {tile.rows * op.strides[d]} - {op.pads[d]} + high;")
            lines.append(f"if ((u32)p{d} >= {x.shape[-2]}u) continue;")
            closes.append("}")
        if not tile.held:
            assert tile.rows == 1, "a row of the image is in one window of the tile alone"
            if n > 1:
                lines.append(f"if (high % {op.dilations[d]} != 0) continue;")
                lines.append(f"const int k{d} = high / {op.dilations[d]};")
            lines += self.filters()
        place = Space(x.shape, ("c0", "c1", *(f"p{d}" for d in range(n)))).offset(x)
        lines += ["#pragma unroll", f"for (int q = 0; q < {columns}; ++q) {{"]
        lines.append(f"  const int p{n - 1} = (int)strip * {tile.strip * stride} - {pad} + q;")
        lines.append(f"  if ((u32)p{n - 1} >= {x.shape[-1]}u) continue;")
        lines.append(f"  const Pack<{kind}, {vector}> taken = load_pack<{kind}, {vector}>({image} + ({place}));")
        lines += ["  #pragma unroll", f"  for (int r = 0; r < {tile.rows}; ++r) {{"]
        if n > 1:
            lines.append(f"    const int h = high - r * {op.strides[d]};")
            by = op.dilations[d]
            lines.append(f"    if (h < 0 || h % {by} != 0 || h / {by} >= {window[d]}) continue;")
        lines += ["    #pragma unroll", f"    for (int s = 0; s < {tile.strip}; ++s) {{"]
        lines.append(f"      const int k = q - s * {stride};")
        lines.append(f"      if (k < 0 || k % {dilation} != 0 || k / {dilation} >= {window[-1]}) continue;")
        outer = "".join(f"[k{d}]" for d in range(n - 2)) + (f"[{row}]" if n > 1 else "")
        outer = outer if tile.held else ""
        weight = f"weight{outer}[k / {dilation}][j]"
        lines.append(f"      for (int j = 0; j < {vector}; ++j) acc[r][s][j] += wide(taken.v[j]) * {weight};")
        return [*lines, "    }", "  }", "}", *closes]
