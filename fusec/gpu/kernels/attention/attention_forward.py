"""Generate attention of few features: heads of 40 are multiplied as 40, not padded to 64.

A warp keeps queries and their sums in registers, and visits keys and values a few at a time. The offset of the
exponents
changes only when a score exceeds it, because each change scales all sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.attention.mma_source import PACK, AttentionTiling, WarpTiles
from fusec.gpu.kernels.attention.wgmma_source import GroupTiles
from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.gpu_figures import MOST_SHARED_BYTES
from fusec.gpu.kernels.codegen.indexing import VIEW_OPS, View, source, view_of_operand
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import unrolled_loops
from fusec.gpu.kernels.codegen.pointwise_code import split_index
from fusec.ir import Node, Value
from fusec.ops import Attention

MOST_FEATURES = 64
MARGIN = 4.0  # scores may grow by this and one, as powers of two, before sums are scaled again
VARIANTS = (
    AttentionTiling(8, 2, 128, 16, 2),
    AttentionTiling(16, 2, 128, 16, 1),
    AttentionTiling(16, 1, 128, 64, 1, grouped=True),
)


def attention(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """Return the kernel of an attention without a bias; None for other steps.

    Its operands and its result may be views.
    """
    found = match_attention(nodes, outputs)
    if found is None:
        return None
    best, *others = (
        found.kernel(tiling)
        for tiling in VARIANTS
        if found.tiles(tiling).shared_bytes * tiling.resident <= MOST_SHARED_BYTES
    )
    return replace(best, others=tuple(others))


def match_attention(nodes: Sequence[Node], outputs: Sequence[Value]) -> AttentionSource | None:
    """Return the attention of a step, with its views; None if the kernel cannot run it."""
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, Attention)), None)
    if at is None or len(outputs) != 1 or any(not isinstance(n.op, VIEW_OPS) for n in nodes if n is not nodes[at]):
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
    return AttentionSource(op, tuple(value for value, _ in read), (q, k, v), result, written)


def _stored(node: Node, epilogue: Sequence[Node], result: Value) -> View | None:
    """Return the view of attention's result in what is stored; None if elements have to move."""
    value, view = result, View.of(result.type)
    for last in reversed(epilogue):
        found = view_of_operand(last, view) if last.result is value else None
        if found is None:
            return None
        value, view = last.operands[0], found
    return view if value is node.result else None


def _fits(view: View) -> bool:
    """Tell if rows are few octets of contiguous elements, and offsets fit into 32 bits."""
    reach = sum((size - 1) * abs(stride) for size, stride in zip(view.shape, view.strides, strict=True))
    steps = (*view.strides[:3], view.start, view.shape[3])
    return (
        view.strides[3] == 1 and not any(s % PACK for s in steps) and view.shape[3] <= MOST_FEATURES and reach < 1 << 31
    )


@dataclass(frozen=True, eq=False)
class AttentionSource:
    """An attention, the values that it reads, and the view of its result.

    read, views: queries, keys and values.
    written: the view of attention's result in `result`.
    """

    op: Attention
    read: tuple[Value, ...]
    views: tuple[View, ...]
    result: Value
    written: View

    def tiles(self, tiling: AttentionTiling) -> WarpTiles:
        """Return the code of the products."""
        return (GroupTiles if tiling.grouped else WarpTiles)(tiling, self.views)

    def kernel(self, tiling: AttentionTiling) -> Kernel:
        """Return the kernel of one variant."""
        tiles = self.tiles(tiling)
        q, k, _ = self.views
        (batch, heads, queries, _), (_, shared, keys, _) = q.shape, k.shape
        arguments = Arguments()
        blocks, rounds = ceil_div(queries, tiling.queries), ceil_div(keys, tiling.keys)
        lines = [
            "const u32 lane = threadIdx.x % 32u, g = lane / 4u, t = lane % 4u, block = blockIdx.x;",
            *self._block(blocks),
            f"const u32 group = head / {heads // shared}u;",
            f"const u32 first = part * {tiling.queries}u + threadIdx.x / 32u * {16 * tiling.tiles}u + g;",
        ]
        kind = C_TYPES[q.dtype]
        for name, value, view, head in zip("qkv", self.read, self.views, ("head", "group", "group"), strict=True):
            at = f"image * {view.strides[0]} + {head} * {view.strides[1]} + {view.start}"
            lines.append(f"const {kind}* {name} = {arguments.read(value)} + ({at});")
        lines += [*tiles.declare(), *tiles.queries()]
        lines += [
            f"float below[{tiling.tiles}][2];",
            *unrolled_loops([("a", tiling.tiles), ("h", 2)], "below[a][h] = 0.0f;"),
        ]
        lines.append(f"const u32 rounds = {rounds}u;")
        if self.op.causal:  # keys after the last query are left out
            lines[-1] = f"const u32 reach = (part * {tiling.queries}u + {tiling.queries - 1}u) / {tiling.keys}u + 1u;"
            lines.append(f"const u32 rounds = reach < {rounds}u ? reach : {rounds}u;")
        if tiling.grouped:  # blocks begin at different keys, because they then read from more of the cache
            lines.append(f"const u32 begin = {'0u' if self.op.causal else f'part * rounds / {blocks}u'};")
        lines += tiles.loop_over_rounds(self._weigh(tiling))
        lines += self._store_result(tiling, arguments)
        grid = batch * heads * blocks
        launch = arguments.launch(
            "attention", lines, grid, tiling.threads, preamble=tiles.preamble(), resident=tiling.resident
        )
        architecture = wgmma.ARCHITECTURE if tiling.grouped else ""
        return Kernel("attention", (replace(launch, resident_bytes=tiles.shared_bytes, architecture=architecture),))

    def _block(self, blocks: int) -> list[str]:
        """Declare the head and the part of its queries that a block handles.

        With a causal mask the longest come first, because they would otherwise run alone at the end.
        """
        batch, heads = self.views[0].shape[:2]
        if not self.op.causal:
            return split_index("block", [("image", batch), ("head", heads), ("part", blocks)])
        lines = split_index("block", [("later", blocks), ("image", batch), ("head", heads)])
        return [*lines, f"const u32 part = {blocks - 1}u - later;"]

    def _weigh(self, tiling: AttentionTiling) -> list[str]:
        """Turn scores into weights, as words that products take; scale sums where scores grew."""
        kind, keys = C_TYPES[self.written.dtype], self.views[1].shape[2]
        loops = [("a", tiling.tiles), ("n", tiling.step // 8), ("h", 2)]
        score, scale = "scores[a][n][h * 2 + e]", f"{self.op.scale * math.log2(math.e)!r}f"
        lines = unrolled_loops([*loops, ("e", 2)], f"{score} = fmaf({score}, {scale}, below[a][h]);")
        key = f"round * {tiling.keys}u + s * {tiling.step} + n * 8 + 2u * t + e"
        if keys % tiling.keys:
            lines.append(f"if (round == {keys // tiling.keys}u) {{")
            lines += [*unrolled_loops([*loops, ("e", 2)], f"if ({key} >= {keys}u) {score} = -INFINITE;"), "}"]
        if self.op.causal:
            lines.append(f"if (round * {tiling.keys}u + {tiling.keys - 1}u > part * {tiling.queries}u) {{")
            hidden = f"if ({key} > first + a * 16 + h * 8) {score} = -INFINITE;"
            lines += [*unrolled_loops([*loops, ("e", 2)], hidden), "}"]
        powers = ", ".join(f"quick_exp2(scores[a][n][h * 2 + {e}])" for e in (0, 1))
        raised = unrolled_loops(loops, f"power[a][n][h] = word_of<{kind}>({powers});")
        lines += [f"u32 power[{tiling.tiles}][{tiling.step // 8}][2];", *raised, "u32 bits = 0u;"]
        lines += unrolled_loops(loops, "bits |= power[a][n][h];")
        # Numbers from 2 on, and NaN, have the highest bit of the exponent, in either type.
        lines += ["if (any_of_warp(fresh || (bits & 0x40004000u) != 0u)) {", "bool nothing = false;"]
        lines += unrolled_loops([("a", tiling.tiles), ("h", 2)], *self._rescale(tiling))
        return [*lines, "fresh = any_of_warp(nothing);", *raised, "}"]

    def _rescale(self, tiling: AttentionTiling) -> list[str]:
        """Set a row's offset a little above its largest score, if that grew or is the first finite one."""
        loops, weight = [("n", tiling.step // 8), ("e", 2)], self.tiles(tiling).weight
        return [
            # NaN counts as the largest, so a row of NaN has begun and its warp does not look for a first score again.
            "float most = scores[a][0][h * 2];",
            *unrolled_loops(loops, "most = nmax(most, scores[a][n][h * 2 + e]);"),
            "most = nmax(most, __shfl_xor_sync(0xffffffffu, most, 1));",
            "most = nmax(most, __shfl_xor_sync(0xffffffffu, most, 2));",
            f"const bool none = most == -INFINITE, begins = !none && {weight}[h * 2] == 0.0f;",
            "nothing |= none;",
            f"most = begins || most > 0.0f ? most + {MARGIN}f : 0.0f;",
            # A row that begins has no sums yet. A low first score may overflow, and zero times infinity would be NaN.
            "const float less = begins ? 1.0f : quick_exp2(-most);",
            "below[a][h] -= most;",
            *unrolled_loops(loops, "scores[a][n][h * 2 + e] -= most;"),
            *unrolled_loops([("e", 2)], f"{weight}[h * 2 + e] *= less;"),
            *unrolled_loops([("b", self.written.shape[3] // PACK), ("e", 2)], "sums[a][b][h * 2 + e] *= less;"),
        ]

    def _store_result(self, tiling: AttentionTiling, arguments: Arguments) -> list[str]:
        """Divide sums of values by sums of weights, and store them."""
        view, kind, result = self.written, C_TYPES[self.written.dtype], arguments.write(self.result)
        at = f"image * {view.strides[0]} + head * {view.strides[1]} + at * {view.strides[2]} + {view.start} + 2u * t"
        pair = ", ".join(f"sums[a][b][2 * h + {e}] * part" for e in (0, 1))
        return unrolled_loops(
            [("a", tiling.tiles), ("h", 2)],
            "const u32 at = first + a * 16 + h * 8;",
            f"const float part = 1.0f / {self.tiles(tiling).weight}[h * 2];",
            f"if (at < {view.shape[2]}u) {{",
            f"{kind}* to = {result} + ({at});",
            *unrolled_loops([("b", view.shape[3] // PACK)], f"*(u32*)(to + {PACK} * b) = word_of<{kind}>({pair});"),
            "}",
        )
