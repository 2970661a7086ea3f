"""Generate kernels for reductions, softmax and norms, with a prologue and an epilogue.

Some threads of a block share the elements of one number, over any dims and in any memory order. If the innermost dim is
reduced ("row"), a thread adds neighbours up. Otherwise ("column") each of the neighbours has a number of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Kernel, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import can_generate
from fusec.gpu.kernels.codegen.row_plan import COALESCED_BYTES, RowPlan, plan_rows
from fusec.gpu.kernels.norm.formulas import Formula, formula_of
from fusec.gpu.kernels.norm.group_norm import one_launch
from fusec.gpu.kernels.norm.row_source import RowSource
from fusec.ir import Node, Op, Value
from fusec.ops import AvgPool, GroupNorm, InstanceNorm, LayerNorm, MaxPool, Reduce, RmsNorm, Softmax
from fusec.schedule.program import inputs_of

ANCHORS = (Reduce, Softmax, LayerNorm, RmsNorm, InstanceNorm, GroupNorm, AvgPool, MaxPool)
# A reduction with fewer than FEW_BLOCKS is split into chunks until there are FULL_BLOCKS, because few blocks do not
# fill the GPU. A thread of a chunk visits at least MIN_TURNS vectors, because each chunk costs a merge.
FEW_BLOCKS, FULL_BLOCKS, MIN_TURNS = 128, 512, 4
# Each: threads of a block; turns unrolled; the most threads that share a number where neighbours have their own (fewer
# threads visit more elements each, and leave more chunks to merge); whether the last block of a reduction merges its
# chunks, which saves the second launch. The first is the default.
VARIANTS = (
    (BLOCK, 4, BLOCK, False),
    (BLOCK, 1, BLOCK, False),
    (32, 4, BLOCK, False),
    (32, 1, BLOCK, False),
    (BLOCK, 4, BLOCK, True),
    (BLOCK, 4, 8, True),
)


def rows(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """Return the kernel of a reduction, softmax or norm with pointwise ops around it; None for other steps."""
    anchors = [node for node in nodes if isinstance(node.op, ANCHORS)]
    if len(anchors) != 1 or not all(can_generate(node) for node in nodes if node is not anchors[0]):
        return None
    (anchor,) = anchors
    op = _reduction_op(anchor)
    if op is None:
        return None
    x, y = anchor.operands[0], anchor.result
    prologue, epilogue = _split_nodes(nodes, anchor)
    formula = formula_of(anchor, op)
    made = {v for node in nodes for v in node.results}
    if formula is None or x.type.dtype not in C_TYPES or any(v in made for v in anchor.operands[1:]):
        return None
    prologue_outputs = [v for v in outputs if v.node in prologue]
    epilogue_outputs = [v for v in outputs if v not in prologue_outputs]
    if any(v.type.shape != x.type.shape for v in prologue_outputs) or any(
        v.type.shape != y.type.shape for v in epilogue_outputs
    ):
        return None
    name = "+".join(node.op.name for node in nodes)
    if any(v.node in prologue for node in epilogue for v in node.operands):
        return None
    if y.type.size == 0:
        return Kernel(name, ())
    if x.type.size >= 1 << 31:
        return None
    read = [
        v.type
        for v in (*inputs_of([*prologue, anchor]), *prologue_outputs)
        if v.type.size != 1 and v not in anchor.operands[1:]
    ]
    written = (
        [] if isinstance(op, Reduce) else [v.type for v in (*inputs_of(epilogue), *epilogue_outputs) if v is not y]
    )
    moved = [*read, *(t for t in written if t.size != 1)]

    def by_channels(block: int, unrolled: int) -> Kernel | None:
        """Return a group norm that reads all channels of a pixel together, whatever their group.

        It needs contiguous channels. The results of the channels are then combined by groups.
        """
        assert isinstance(op, GroupNorm)
        plan = plan_rows(InstanceNorm(op.epsilon), x.type, moved, block, unrolled)
        most = min(ceil_div(FULL_BLOCKS, plan.blocks), plan.count // (plan.threads * MIN_TURNS))
        if plan.row or plan.along != 1 or most < 1 or op.groups == x.type.shape[1] or formula.merge != "moments":
            return None
        plan = replace(plan, chunks=most)
        plan = replace(plan, chunks=ceil_div(plan.count, plan.each))
        of = replace(source(plan), members=x.type.shape[1] // op.groups)
        return Kernel(name, (of.partial(), of.merged()), _scratch_bytes(formula, plan))

    def kernel(block: int, unrolled: int, column: int, in_one_launch: bool) -> Kernel:
        plan = plan_rows(op, x.type, moved, block, unrolled, column)
        most = min(ceil_div(FULL_BLOCKS, plan.blocks), plan.count // (plan.threads * MIN_TURNS))
        if not formula.merge or plan.blocks >= FEW_BLOCKS or most < 2:
            return Kernel(name, (source(plan).launch(),))
        plan = replace(plan, chunks=most)
        plan = replace(plan, chunks=ceil_div(plan.count, plan.each))  # so that no chunk is empty
        if in_one_launch and isinstance(op, Reduce):
            return Kernel(name, (source(plan).one_launch(),), _scratch_bytes(formula, plan))
        return Kernel(name, (source(plan).partial(), source(plan).merged()), _scratch_bytes(formula, plan))

    def source(plan: RowPlan) -> RowSource:
        return RowSource(anchor, op, formula, plan, prologue, epilogue, prologue_outputs, epilogue_outputs)

    variants = [kernel(*variant) for variant in VARIANTS]
    plain = source(plan_rows(op, x.type, moved, *VARIANTS[0][:3]))
    if plain.may_be_packed and len(variants[0].launches) == 1:
        variants.append(Kernel(name, (replace(plain, packed=True).launch(),)))
    if isinstance(op, GroupNorm):
        shapes = dict.fromkeys((block, unrolled) for block, unrolled, _, _ in VARIANTS)
        together = [variant for variant in (by_channels(*shape) for shape in shapes) if variant is not None]
        narrow = x.type.shape[1] // op.groups * x.type.dtype.itemsize < COALESCED_BYTES
        variants = [*together, *variants] if narrow else [*variants, *together]
        variants += one_launch(anchor, prologue, epilogue, prologue_outputs, epilogue_outputs)
    best, *others = variants
    return replace(best, others=tuple({k.key: k for k in others if k.key != best.key}.values()))


def _scratch_bytes(formula: Formula, plan: RowPlan) -> int:
    item = 8 if formula.c_type in ("double", "i64", "u64") else 4
    return len(formula.passes) * plan.chunks * plan.groups * plan.width * item


def _reduction_op(anchor: Node) -> Op | None:
    """Return the anchor's op, or the reduction that a pool over the whole image is; None for other pools."""
    op, x = anchor.op, anchor.operands[0].type
    if not isinstance(op, (AvgPool, MaxPool)):
        return op
    whole = op.window == x.shape[2:] and not any(op.pads) and set(op.dilations) == {1}
    kind = "mean" if isinstance(op, AvgPool) else "max"
    return Reduce(kind, tuple(range(2, x.rank))) if whole and x.size else None


def _split_nodes(nodes: Sequence[Node], anchor: Node) -> tuple[list[Node], list[Node]]:
    """Return the prologue (the nodes that the anchor depends on), and the other nodes."""
    wanted = {anchor.operands[0]}
    prologue: list[Node] = []
    for node in reversed(nodes[: list(nodes).index(anchor)]):
        if any(v in wanted for v in node.results):
            prologue.insert(0, node)
            wanted |= set(node.operands)
    return prologue, [node for node in nodes if node is not anchor and node not in prologue]
