"""Reductions, softmax and norms: some threads of a block share the elements that go into one number, whatever dims and
memory order they come from; pointwise ops before and behind are done on the way.

Where the innermost dim is reduced ("row"), neighbours are added up within a thread; else ("column") each of them has
a number of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Kernel, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import takes
from fusec.gpu.kernels.codegen.row_plan import COALESCED_BYTES, Plan, planned
from fusec.gpu.kernels.norm.formulas import Formula, formula
from fusec.gpu.kernels.norm.group_norm import one_launch
from fusec.gpu.kernels.norm.row_source import RowSource
from fusec.ir import Node, Op, Value
from fusec.ops import AvgPool, GroupNorm, InstanceNorm, LayerNorm, MaxPool, Reduce, RmsNorm, Softmax
from fusec.schedule.program import inputs_of

ANCHORS = (Reduce, Softmax, LayerNorm, RmsNorm, InstanceNorm, GroupNorm, AvgPool, MaxPool)
# A reduction with fewer blocks than the first is cut into chunks, until there are as many as the second; a thread of a
# chunk goes through some vectors at least.
FEW_BLOCKS, FULL_BLOCKS, MIN_TURNS = 128, 512, 4
# Threads of a block, turns unrolled, threads that share a number where neighbours have their own (few of them go
# through long stretches, and leave more chunks to put together), and whether the last block of a reduction by chunks
# puts these together rather than a second launch; where nothing is measured, the first.
WAYS = (
    (BLOCK, 4, BLOCK, False),
    (BLOCK, 1, BLOCK, False),
    (32, 4, BLOCK, False),
    (32, 1, BLOCK, False),
    (BLOCK, 4, BLOCK, True),
    (BLOCK, 4, 8, True),
)


def rows(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """The kernel for a reduction, softmax or norm with pointwise ops around it; None if the step is no such thing."""
    anchors = [node for node in nodes if isinstance(node.op, ANCHORS)]
    if len(anchors) != 1 or not all(takes(node) for node in nodes if node is not anchors[0]):
        return None
    (anchor,) = anchors
    op = _meant(anchor)
    if op is None:
        return None
    x, y = anchor.operands[0], anchor.result
    before, behind = _split(nodes, anchor)
    what = formula(anchor, op)
    made = {v for node in nodes for v in node.results}
    if what is None or x.type.dtype not in C_TYPES or any(v in made for v in anchor.operands[1:]):
        return None
    early = [v for v in outputs if v.node in before]
    late = [v for v in outputs if v not in early]
    if any(v.type.shape != x.type.shape for v in early) or any(v.type.shape != y.type.shape for v in late):
        return None
    name = "+".join(node.op.name for node in nodes)
    if any(v.node in before for node in behind for v in node.operands):
        return None
    if y.type.size == 0:
        return Kernel(name, ())
    if x.type.size >= 1 << 31:
        return None
    read = [
        v.type for v in (*inputs_of([*before, anchor]), *early) if v.type.size != 1 and v not in anchor.operands[1:]
    ]
    written = [] if isinstance(op, Reduce) else [v.type for v in (*inputs_of(behind), *late) if v is not y]
    moved = [*read, *(t for t in written if t.size != 1)]

    def by_channels(block: int, unrolled: int) -> Kernel | None:
        """A group norm whose channels lie side by side, so that all of a pixel are read in one go, whatever their
        group: what each comes to is put together by groups."""
        assert isinstance(op, GroupNorm)
        plan = planned(InstanceNorm(op.epsilon), x.type, moved, block, unrolled)
        most = min(ceil_div(FULL_BLOCKS, plan.blocks), plan.count // (plan.threads * MIN_TURNS))
        if plan.row or plan.along != 1 or most < 1 or op.groups == x.type.shape[1] or what.merge != "moments":
            return None
        plan = replace(plan, chunks=most)
        plan = replace(plan, chunks=ceil_div(plan.count, plan.each))
        of = replace(source(plan), members=x.type.shape[1] // op.groups)
        return Kernel(name, (of.partial(), of.merged()), _scratch_bytes(what, plan))

    def kernel(block: int, unrolled: int, column: int, at_once: bool) -> Kernel:
        plan = planned(op, x.type, moved, block, unrolled, column)
        most = min(ceil_div(FULL_BLOCKS, plan.blocks), plan.count // (plan.threads * MIN_TURNS))
        if not what.merge or plan.blocks >= FEW_BLOCKS or most < 2:
            return Kernel(name, (source(plan).launch(),))
        plan = replace(plan, chunks=most)
        plan = replace(plan, chunks=ceil_div(plan.count, plan.each))  # none of them empty
        if at_once and isinstance(op, Reduce):
            return Kernel(name, (source(plan).at_once(),), _scratch_bytes(what, plan))
        return Kernel(name, (source(plan).partial(), source(plan).merged()), _scratch_bytes(what, plan))

    def source(plan: Plan) -> RowSource:
        return RowSource(anchor, op, what, plan, before, behind, early, late)

    ways = [kernel(*way) for way in WAYS]
    plain = source(planned(op, x.type, moved, *WAYS[0][:3]))
    if plain.may_be_packed and len(ways[0].launches) == 1:
        ways.append(Kernel(name, (replace(plain, packed=True).launch(),)))
    if isinstance(op, GroupNorm):
        shapes = dict.fromkeys((block, unrolled) for block, unrolled, _, _ in WAYS)
        together = [way for way in (by_channels(*shape) for shape in shapes) if way is not None]
        narrow = x.type.shape[1] // op.groups * x.type.dtype.itemsize < COALESCED_BYTES
        ways = [*together, *ways] if narrow else [*ways, *together]
        ways += one_launch(anchor, before, behind, early, late)
    best, *others = ways
    return replace(best, others=tuple({k.key: k for k in others if k.key != best.key}.values()))


def _scratch_bytes(what: Formula, plan: Plan) -> int:
    item = 8 if what.c_type in ("double", "i64", "u64") else 4
    return len(what.passes) * plan.chunks * plan.groups * plan.width * item


def _meant(anchor: Node) -> Op | None:
    """The op; of a pool with one window over everything the reduction it is, of another pool None."""
    op, x = anchor.op, anchor.operands[0].type
    if not isinstance(op, (AvgPool, MaxPool)):
        return op
    whole = op.window == x.shape[2:] and not any(op.pads) and set(op.dilations) == {1}
    kind = "mean" if isinstance(op, AvgPool) else "max"
    return Reduce(kind, tuple(range(2, x.rank))) if whole and x.size else None


def _split(nodes: Sequence[Node], anchor: Node) -> tuple[list[Node], list[Node]]:
    """The nodes that the anchor depends on, and the others."""
    wanted = {anchor.operands[0]}
    before: list[Node] = []
    for node in reversed(nodes[: list(nodes).index(anchor)]):
        if any(v in wanted for v in node.results):
            before.insert(0, node)
            wanted |= set(node.operands)
    return before, [node for node in nodes if node is not anchor and node not in before]
