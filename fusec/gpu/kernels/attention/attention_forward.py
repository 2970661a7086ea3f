"""Attention of few features: heads of 40 are multiplied as 40, not as 64.

A warp holds queries and their sums in registers, and goes through keys and values a few at a time. What exponents are
counted from stays as it is until one grows above it: only then are sums scaled anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.attention.mma_source import PACK, Shares, WarpTiles
from fusec.gpu.kernels.attention.wgmma_source import GroupTiles
from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.indexing import MOVES, View, back, source
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import nested
from fusec.gpu.kernels.codegen.pointwise_code import decoded
from fusec.ir import Node, Value
from fusec.ops import Attention

MOST_FEATURES = 64
MARGIN = 4.0  # in powers of two, how far scores may grow before sums are scaled anew, less one
SHARED_BYTES = 224 << 10  # of a multiprocessor
WAYS = (
    Shares(8, 2, 128, 16, 2),
    Shares(16, 2, 128, 16, 1),
    Shares(16, 1, 128, 64, 1, grouped=True),
)


def attention(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """The kernel for attention of few features without a bias, through views of its operands and of what it gives;
    None if the step is no such thing."""
    found = taken(nodes, outputs)
    if found is None:
        return None
    best, *others = (found.kernel(way) for way in WAYS if found.tiles(way).shared_bytes * way.resident <= SHARED_BYTES)
    return replace(best, others=tuple(others))


def taken(nodes: Sequence[Node], outputs: Sequence[Value]) -> Source | None:
    """What a kernel is written from."""
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, Attention)), None)
    if at is None or len(outputs) != 1 or any(not isinstance(n.op, MOVES) for n in nodes if n is not nodes[at]):
        return None
    node, result = nodes[at], outputs[0]
    op = node.op
    assert isinstance(op, Attention)
    if len(node.operands) != 3 or op.guarded or not result.type.size or result.type.dtype not in HALVES:
        return None
    read = [found for value in node.operands if (found := source(value, nodes[:at])) is not None]
    written = _stored(node, nodes[at + 1 :], result)
    if len(read) < 3 or written is None or not all(map(_fits, [*(view for _, view in read), written])):
        return None
    (_, q), (_, k), (_, v) = read
    if not k.shape[2] or {q.dtype, k.dtype, v.dtype} != {result.type.dtype}:
        return None
    return Source(op, tuple(value for value, _ in read), (q, k, v), result, written)


def _stored(node: Node, behind: Sequence[Node], result: Value) -> View | None:
    """How attention's result lies in what is stored, through views; None if it does not."""
    value, view = result, View.of(result.type)
    for last in reversed(behind):
        found = back(last, view) if last.result is value else None
        if found is None:
            return None
        value, view = last.operands[0], found
    return view if value is node.result else None


def _fits(view: View) -> bool:
    """Whether rows are few octets, each side by side, and places are numbers of 32 bits."""
    reach = sum((size - 1) * abs(stride) for size, stride in zip(view.shape, view.strides, strict=True))
    steps = (*view.strides[:3], view.start, view.shape[3])
    return (
        view.strides[3] == 1 and not any(s % PACK for s in steps) and view.shape[3] <= MOST_FEATURES and reach < 1 << 31
    )


@dataclass(frozen=True, eq=False)
class Source:
    """An attention, with the values that it reads and how they are seen, and what it writes."""

    op: Attention
    read: tuple[Value, ...]
    views: tuple[View, ...]
    result: Value
    written: View

    def tiles(self, way: Shares) -> WarpTiles:
        """How it multiplies."""
        return (GroupTiles if way.grouped else WarpTiles)(way, self.views)

    def kernel(self, way: Shares) -> Kernel:
        """In one way to share it out."""
        tiles = self.tiles(way)
        q, k, _ = self.views
        (batch, heads, queries, _), (_, shared, keys, _) = q.shape, k.shape
        arguments = Arguments()
        blocks, rounds = ceil_div(queries, way.queries), ceil_div(keys, way.keys)
        lines = [
            "const u32 lane = threadIdx.x % 32u, g = lane / 4u, t = lane % 4u, block = blockIdx.x;",
            *self._block(blocks),
            f"const u32 group = head / {heads // shared}u;",
            f"const u32 first = part * {way.queries}u + threadIdx.x / 32u * {16 * way.tiles}u + g;",
        ]
        kind = C_TYPES[q.dtype]
        for name, value, view, head in zip("qkv", self.read, self.views, ("head", "group", "group"), strict=True):
            at = f"image * {view.strides[0]} + {head} * {view.strides[1]} + {view.start}"
            lines.append(f"const {kind}* {name} = {arguments.read(value)} + ({at});")
        lines += [*tiles.declared(), *tiles.queries()]
        lines += [f"float below[{way.tiles}][2];", *nested([("a", way.tiles), ("h", 2)], "below[a][h] = 0.0f;")]
        lines.append(f"const u32 rounds = {rounds}u;")
        if self.op.causal:  # keys behind the last query are left out
            lines[-1] = f"const u32 reach = (part * {way.queries}u + {way.queries - 1}u) / {way.keys}u + 1u;"
            lines.append(f"const u32 rounds = reach < {rounds}u ? reach : {rounds}u;")
        if way.grouped:  # blocks of a head, which run together, begin at different keys: more of the cache is at work
            lines.append(f"const u32 begin = {'0u' if self.op.causal else f'part * rounds / {blocks}u'};")
        lines += tiles.walked(self._weighed(way))
        lines += self._written(way, arguments)
        grid = batch * heads * blocks
        launch = arguments.launch("attention", lines, grid, way.threads, tiles.preamble(), way.resident)
        architecture = wgmma.ARCHITECTURE if way.grouped else ""
        return Kernel("attention", (replace(launch, resident_bytes=tiles.shared_bytes, architecture=architecture),))

    def _block(self, blocks: int) -> list[str]:
        """Which head and part of its queries a block has; of those with a causal mask the longest come first."""
        batch, heads = self.views[0].shape[:2]
        if not self.op.causal:
            return decoded("block", [("image", batch), ("head", heads), ("part", blocks)])
        lines = decoded("block", [("later", blocks), ("image", batch), ("head", heads)])
        return [*lines, f"const u32 part = {blocks - 1}u - later;"]

    def _weighed(self, way: Shares) -> list[str]:
        """The powers of scores, in the words that products take; sums scaled anew where scores grew."""
        kind, keys = C_TYPES[self.written.dtype], self.views[1].shape[2]
        loops = [("a", way.tiles), ("n", way.step // 8), ("h", 2)]
        score, scale = "scores[a][n][h * 2 + e]", f"{self.op.scale * math.log2(math.e)!r}f"
        lines = nested([*loops, ("e", 2)], f"{score} = fmaf({score}, {scale}, below[a][h]);")
        key = f"round * {way.keys}u + s * {way.step} + n * 8 + 2u * t + e"
        if keys % way.keys:
            lines.append(f"if (round == {keys // way.keys}u) {{")
            lines += [*nested([*loops, ("e", 2)], f"if ({key} >= {keys}u) {score} = -INFINITE;"), "}"]
        if self.op.causal:
            lines.append(f"if (round * {way.keys}u + {way.keys - 1}u > part * {way.queries}u) {{")
            hidden = f"if ({key} > first + a * 16 + h * 8) {score} = -INFINITE;"
            lines += [*nested([*loops, ("e", 2)], hidden), "}"]
        powers = ", ".join(f"quick_exp2(scores[a][n][h * 2 + {e}])" for e in (0, 1))
        raised = nested(loops, f"power[a][n][h] = word_of<{kind}>({powers});")
        lines += [f"u32 power[{way.tiles}][{way.step // 8}][2];", *raised, "u32 bits = 0u;"]
        lines += nested(loops, "bits |= power[a][n][h];")
        # the highest bit of an exponent is that of 2, in either type; NaN has it, too
        lines += ["if (any_of_warp(fresh || (bits & 0x40004000u) != 0u)) {", "bool nothing = false;"]
        lines += nested([("a", way.tiles), ("h", 2)], *self._grown(way))
        return [*lines, "fresh = any_of_warp(nothing);", *raised, "}"]

    def _grown(self, way: Shares) -> list[str]:
        """Count exponents of a row from a little above the largest, if that grew, or is the first to be finite."""
        loops, weight = [("n", way.step // 8), ("e", 2)], self.tiles(way).weight
        return [
            # NaN is the largest: a row of NaN has begun, and its warp need not look for its first score again
            "float most = scores[a][0][h * 2];",
            *nested(loops, "most = nmax(most, scores[a][n][h * 2 + e]);"),
            "most = nmax(most, __shfl_xor_sync(0xffffffffu, most, 1));",
            "most = nmax(most, __shfl_xor_sync(0xffffffffu, most, 2));",
            f"const bool none = most == -INFINITE, begins = !none && {weight}[h * 2] == 0.0f;",
            "nothing |= none;",
            f"most = begins || most > 0.0f ? most + {MARGIN}f : 0.0f;",
            # a row that begins has no sums yet: zero times what a low first score overflows to would be NaN
            "const float less = begins ? 1.0f : quick_exp2(-most);",
            "below[a][h] -= most;",
            *nested(loops, "scores[a][n][h * 2 + e] -= most;"),
            *nested([("e", 2)], f"{weight}[h * 2 + e] *= less;"),
            *nested([("b", self.written.shape[3] // PACK), ("e", 2)], "sums[a][b][h * 2 + e] *= less;"),
        ]

    def _written(self, way: Shares, arguments: Arguments) -> list[str]:
        """Sums of values by sums of weights."""
        view, kind, result = self.written, C_TYPES[self.written.dtype], arguments.write(self.result)
        at = f"image * {view.strides[0]} + head * {view.strides[1]} + at * {view.strides[2]} + {view.start} + 2u * t"
        pair = ", ".join(f"sums[a][b][2 * h + {e}] * part" for e in (0, 1))
        return nested(
            [("a", way.tiles), ("h", 2)],
            "const u32 at = first + a * 16 + h * 8;",
            f"const float part = 1.0f / {self.tiles(way).weight}[h * 2];",
            f"if (at < {view.shape[2]}u) {{",
            f"{kind}* to = {result} + ({at});",
            *nested([("b", view.shape[3] // PACK)], f"*(u32*)(to + {PACK} * b) = word_of<{kind}>({pair});"),
            "}",
        )
