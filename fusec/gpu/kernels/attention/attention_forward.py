"""Generate attention of few features: heads of 40 are multiplied as 40, not padded to 64.

A warp has queries and their sums in registers, and visits keys and values a few at a time. The offset of the exponents
changes only when a score exceeds it, because each change scales all sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.attention.mma_source import PACK, AttentionTiling, WarpTiles
from fusec.gpu.kernels.attention.score_bias import MOST_LOADED, ScoreBias, without_bias
from fusec.gpu.kernels.attention.wgmma_source import GroupTiles
from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.cuda_template import c_bool, cuda_template
from fusec.gpu.kernels.codegen.equal_steps import once_for_equal_steps
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.indexing import VIEW_OPS, View, expanded, source, view_of_operand
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import BYTES, PointwiseCode, Space, can_generate, split_index
from fusec.ir import Node, Value
from fusec.ops import Attention
from fusec.system.dataclass import dataclass

MOST_FEATURES = 64
MARGIN = 4.0  # scores may grow by this and one, as powers of two, before sums are scaled again
_CUDA = cuda_template(__package__, "attention_forward.cuh")
VARIANTS = (
    AttentionTiling(8, 2, 128, 16, 2),
    AttentionTiling(16, 2, 128, 16, 1),
    AttentionTiling(16, 1, 128, 64, 1, grouped=True),
)
SHORT = 256  # queries, and keys
ONE_STEP = 64  # keys whose scores registers hold together
RESIDENT_WARPS = 26  # of a multiprocessor: with more, registers are spilled


@once_for_equal_steps
def attention_forward(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of an attention, which has a bias only if it is short; None for other steps.

    Its operands and its result may be views. The result may be rounded to 8 bits by one scale.
    """
    found = match_attention(nodes, outputs)
    if found is None:
        return None
    (queries, keys) = (view.shape[2] for view in found.views[:2])
    tilings = [t for t in tilings_of(queries, keys) if not t.grouped or figures.has(wgmma.ARCHITECTURE)]
    if found.bias is not None:
        tilings = [t for t in tilings if not t.grouped and t.tiles * t.keys <= MOST_LOADED]
    room = [figures.dynamic_bytes // found.tiles(t).shared_bytes for t in tilings]  # blocks that fit
    fit = [replace(t, resident=min(t.resident, most)) for t, most in zip(tilings, room, strict=True) if most]
    return with_variants(found.kernel(tiling) for tiling in fit)


def tilings_of(queries: int, keys: int) -> tuple[AttentionTiling, ...]:
    """Return the tilings to time. Those of short sequences have no more warps than the queries of a head fill.

    They copy all keys in one round, or in two. One of them scores few keys in one step, and so looks for the largest
    score of a row once.
    """
    if max(queries, keys) > SHORT:
        return VARIANTS
    tiles, all_keys, half = ceil_div(queries, 16), ceil_div(keys, 16) * 16, ceil_div(keys, 32) * 16
    pairs, resident = ceil_div(tiles, 2), max(1, RESIDENT_WARPS // tiles)
    one_step = AttentionTiling(tiles, 1, all_keys, all_keys, resident)
    each, blocks = (2, 12 // pairs) if pairs <= 4 else (1, 3)
    return (
        AttentionTiling(tiles, 1, all_keys, 16, resident),
        one_step if all_keys <= ONE_STEP else AttentionTiling(tiles, 1, half, 16, resident),
        AttentionTiling(pairs, each, all_keys, 16, blocks),
    )


def match_attention(nodes: Sequence[Node], outputs: Sequence[Value]) -> AttentionSource | None:
    """Return the attention of a step, with its views; None if the kernel cannot run it."""
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, Attention)), None)
    if at is None or len(outputs) != 1:
        return None
    node, result = nodes[at], outputs[0]
    rounding = _rounding(node.result, nodes[at + 1 :])
    views = [*nodes[:at], *nodes[at + 1 + len(rounding) :]]
    if any(not isinstance(n.op, VIEW_OPS) for n in views):
        return None
    op, last = node.op, rounding[-1] if rounding else node
    assert isinstance(op, Attention)
    if not result.type.size or node.result.type.dtype not in HALVES:
        return None
    read = [found for value in node.operands if (found := source(value, nodes[:at])) is not None]
    written = _stored(last, nodes[at + 1 + len(rounding) :], result)
    if len(read) < len(node.operands) or written is None:
        return None
    if not all(map(_fits, [*(view for _, view in read[:3]), written])):
        return None
    (_, q), (_, k), (_, v) = read[:3]
    if not k.shape[2] or {q.dtype, k.dtype, v.dtype} != {node.result.type.dtype}:
        return None
    bias = _bias(op, read[3:], (*q.shape[:3], k.shape[2]))
    if bias is not None and (not bias.fits or max(q.shape[2], k.shape[2]) > SHORT):
        return None
    return AttentionSource(node, tuple(value for value, _ in read[:3]), (q, k, v), result, written, rounding, bias)


def _bias(op: Attention, read: Sequence[tuple[Value, View]], scores: tuple[int, ...]) -> ScoreBias | None:
    """Return the bias of an attention whose scores have this shape; None without one."""
    return next((ScoreBias(value, expanded(view, scores), op.hides) for value, view in read), None)


def _rounding(value: Value, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the pointwise ops that round a value to 8 bits, each with one number as its other operands."""
    found: list[Node] = []
    for node in nodes:
        others = [v for v in node.operands if v is not value]
        if not can_generate(node) or any(v.literal is None or v.type.size != 1 for v in others):
            return ()
        if len(others) == len(node.operands):
            return ()
        found.append(node)
        value = node.result
        if value.type.dtype in BYTES:
            return tuple(found)
    return ()


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
    """Tell if rows are few octets of contiguous elements, and offsets fit into 32 bits, which have no sign."""
    if any(stride < 0 for stride in view.strides):
        return False
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
    rounding: the ops that round it to 8 bits.
    bias: what is added to its scores.
    """

    node: Node
    read: tuple[Value, ...]
    views: tuple[View, ...]
    result: Value
    written: View
    rounding: tuple[Node, ...]
    bias: ScoreBias | None

    @property
    def op(self) -> Attention:
        assert isinstance(self.node.op, Attention)
        return self.node.op

    def tiles(self, tiling: AttentionTiling) -> WarpTiles:
        """Return the code of the products."""
        if tiling.grouped:
            return GroupTiles(tiling, self.views, causal=self.op.causal)
        return WarpTiles(tiling, self.views, () if self.bias is None else self.bias.load(tiling))

    def kernel(self, tiling: AttentionTiling) -> Kernel:
        """Return the kernel of one variant."""
        tiles = self.tiles(tiling)
        q, k, v = self.views
        (batch, heads, queries, _), (_, shared, keys, _) = q.shape, k.shape
        arguments = Arguments()
        pointers: list[str] = []
        for name, value, view, head in zip("qkv", self.read, self.views, ("head", "group", "group"), strict=True):
            at = f"image * {view.strides[0]} + {head} * {view.strides[1]} + {view.start}"
            pointers.append(f"const {C_TYPES[q.dtype]}* {name} = {arguments.read(value)} + ({at});")
        if self.bias is not None:
            view = self.bias.view
            at = f"image * {view.strides[0]} + head * {view.strides[1]} + {view.start}"
            pointers.append(f"const {C_TYPES[q.dtype]}* b = {arguments.read(self.bias.value)} + ({at});")
        blocks, result = ceil_div(queries, tiling.queries), self.written
        cuda = _CUDA.bind(
            **tiles.holes,
            WEIGHT=tiles.weight,
            QUERIES=tiling.queries,
            IS_CAUSAL=c_bool(self.op.causal),
            MARGIN=f"{MARGIN}f",
        )
        scale = f"{self.op.scale * math.log2(math.e)!r}f"
        added = without_bias(cuda, scale) if self.bias is None else self.bias.holes(cuda, scale)
        is_one_step = tiles.rounds == 1 and tiling.keys == tiling.step
        weigh = cuda.bind(**added)(
            "weigh", IS_ONE_STEP=c_bool(is_one_step), LAST_ROUND=keys // tiling.keys, RAISE=cuda("raise")
        )
        lines = cuda(
            "kernel",
            BLOCK_COORDINATES=self._block(blocks),
            SHARERS=heads // shared,
            POINTERS=pointers,
            DECLARE=tiles.declare(),
            QUERY_OCTETS=tiles.query_octets,
            READ_OCTETS=tiles.octets(0),
            QUERY_COUNT=queries,
            QUERY_STRIDE=q.strides[2],
            ROUNDS=tiles.rounds,
            LOOP=tiles.loop(weigh),
            IS_GUARDED=c_bool(self.op.guarded),
            KEY_COUNT=keys,
            VALUE_STRIDE=v.strides[2],
            RESULT=arguments.write(self.result),
            RESULT_TYPE=C_TYPES[self.result.type.dtype],
            STORE=self._store(arguments, tiles.octets(2)),
            RESULT_IMAGE=result.strides[0],
            RESULT_HEAD=result.strides[1],
            RESULT_QUERY=result.strides[2],
            RESULT_START=result.start,
        )
        dependent = bool(self.rounding)  # before a product of bytes, which copies its weights meanwhile
        launch = arguments.launch(
            "attention",
            [*arguments.begin(), *lines] if dependent else lines,
            batch * heads * blocks,
            tiling.threads,
            preamble=tiles.preamble(),
            resident=tiling.resident,
        )
        architecture = wgmma.ARCHITECTURE if tiling.grouped else ""
        launch = replace(launch, resident_bytes=tiles.shared_bytes, architecture=architecture, dependent=dependent)
        return Kernel("attention", (launch,))

    def _store(self, arguments: Arguments, octets: int) -> list[str]:
        """Store a row of `octets` octets of a result, of which a thread has pairs.

        What is rounded to 8 bits is rounded to 16 before, as in steps apart.
        """
        holes = {"RESULT_TYPE": C_TYPES[self.result.type.dtype], "VALUE_OCTETS": octets}
        if self.rounding:
            code = PointwiseCode(Space((1,), (None,)), arguments)
            code.define(self.node.result, "sums[a][b][2 * h + e] * share")
            code.compute(self.rounding)
            rounded = code.as_stored(self.rounding[-1].result)
            pair = _CUDA("pair_of_bytes", SCALES=code.head, ROUND=code.body, ROUNDED=rounded, **holes)
        else:
            pair = _CUDA("pair_of_halves", TYPE=holes["RESULT_TYPE"])
        pairs, steps = (2 if self.rounding else 1), (*self.written.strides[:3], self.written.start)
        if octets % (4 * pairs) or any(step % (PACK * pairs) for step in steps):
            pair_type = "u16" if self.rounding else "u32"
            return _CUDA("store_pairs", PAIR=pair, PAIR_TYPE=pair_type, QUERY_COUNT=self.views[0].shape[2], **holes)
        halves = "{{low_halves(words[0], words[1]), low_halves(words[2], words[3]), "
        halves += "high_halves(words[0], words[1]), high_halves(words[2], words[3])}}"
        ready = halves if self.rounding else "{{words[0], words[1], words[2], words[3]}}"
        count = self.views[0].shape[2]
        return _CUDA("store_octets", PAIR=pair, WORD_PAIRS=pairs, OCTETS=ready, QUERY_COUNT=count, **holes)

    def _block(self, blocks: int) -> list[str]:
        """Declare the head and the part of its queries that a block handles.

        With a causal mask the longest come first, because they would otherwise run alone at the end.
        """
        batch, heads = self.views[0].shape[:2]
        if not self.op.causal:
            return split_index("block", [("image", batch), ("head", heads), ("part", blocks)])
        lines = split_index("block", [("later", blocks), ("image", batch), ("head", heads)])
        return [*lines, f"const u32 part = {blocks - 1}u - later;"]
