"""Generate the gradients of layer and RMS norm, with pointwise ops around them.

The kernel computes dx row by row. It also sums over rows, for the gradients of scale, bias and a later bias. Some
threads share a row and keep it in registers; each sums its columns over the rows that it visits. A small launch merges
these sums in a fixed order. Rows may be copied to shared memory before their turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.indexing import Strided
from fusec.gpu.kernels.codegen.kernel import BLOCK, Kernel, ceil_div, power_of_two
from fusec.gpu.kernels.codegen.pointwise_code import can_generate, merged_dims, stride_along, widest_vector
from fusec.gpu.kernels.codegen.row_plan import Axis, RowPlan
from fusec.gpu.kernels.norm.layer_norm_backward_source import LayerNormBackwardSource, columns_bytes
from fusec.gpu.kernels.norm.norm_step import NormStep, match_norm_step
from fusec.ir import Node, Value
from fusec.ops import LayerNormBackward, Reduce
from fusec.schedule.program import inputs_of

# Each: numbers of a row that a thread keeps, of each of four kinds; blocks for each multiprocessor at most (more blocks
# leave more sums to merge); rows copied ahead; whether blocks wait for each other and merge the sums, which saves the
# second launch. The first is the default.
VARIANTS = (
    (24, 1, 0, False),
    (16, 2, 0, False),
    (8, 4, 0, False),
    (24, 1, 1, False),
    (24, 1, 1, True),
    (24, 1, 2, False),
    (24, 1, 2, True),
    (16, 2, 2, False),
    (16, 2, 2, True),
)
MOST = 512  # threads for a row
SHARED_BYTES = 40 << 10  # for the column sums of a block's rows, of the 48 KB of static memory that every GPU has


def layer_norm_backward(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a layer_norm_backward with nodes around it; None for other steps."""
    anchors = [node for node in nodes if isinstance(node.op, LayerNormBackward)]
    if len(anchors) != 1 or any(node.op.name == "gen_index" for node in nodes):
        return None
    (anchor,) = anchors
    if anchor.op.attributes["axis"] % anchor.operands[1].type.rank == 0:
        return None  # one row: the parameters are as large as x
    step = match_norm_step(nodes, outputs, anchor, 2, lambda node: _is_row_sum(node, anchor))
    if step is None or step.x.type.size >= 1 << 31:
        return None
    if not all(can_generate(node) for node in nodes if node is not anchor and node not in step.sum_nodes):
        return None
    if any(v.node in step.prologue for node in step.epilogue for v in node.operands):
        return None
    name, made = "+".join(node.op.name for node in nodes), list[Kernel]()
    for held, waves, ahead, cooperative in VARIANTS:
        plan = _plan(step, held)
        if plan is not None and plan.lanes * columns_bytes(step) <= SHARED_BYTES:
            source = LayerNormBackwardSource(step, plan, waves * figures.processors, ahead, figures)
            if source.is_possible and (not cooperative or source.may_be_cooperative):
                launches = (source.one_launch(),) if cooperative else (source.rows(), source.columns())
                made.append(Kernel(name, launches, source.scratch_bytes))
    kernels = {kernel.key: kernel for kernel in made}
    return replace(made[0], others=tuple(kernels.values())[1:]) if made else None


def _is_row_sum(node: Node, anchor: Node) -> bool:
    """Tell if a node sums over rows to the shape of the scale, as the gradient of a bias does."""
    axis, scale = anchor.op.attributes["axis"] % anchor.operands[1].type.rank, anchor.operands[2].type
    return node.op == Reduce("sum", tuple(range(axis)), False) and node.result.type.shape == scale.shape


def _plan(step: NormStep, held: int) -> RowPlan | None:
    """Plan how threads share rows; None if rows are longer than threads can keep.

    held: numbers of a row that a thread keeps.
    """
    x, axis = step.x.type, step.anchor.op.attributes["axis"] % step.x.type.rank
    read = inputs_of([*step.prologue, *step.epilogue])
    types: list[Strided] = [
        v.type for v in (*step.elements, *read, *step.prologue_outputs, *step.epilogue_outputs) if v.type.size != 1
    ]
    sizes = [d for d in range(x.rank) if x.shape[d] != 1]
    leading = merged_dims(x.shape, [d for d in sizes if d < axis], types) if any(d < axis for d in sizes) else []
    trailing = merged_dims(x.shape, [d for d in sizes if d >= axis], types) if any(d >= axis for d in sizes) else []
    axes = tuple(
        Axis(f"c{g[-1]}", g[-1], math.prod(x.shape[d] for d in g), reduced)
        for groups, reduced in ((leading, False), (trailing, True))
        for g in groups
    )
    vector = 1
    if trailing:
        dims = [a.dim for a in reversed(axes)]
        moved = [step.parameters[0].type, *types]
        vector = widest_vector(axes[-1].size, moved, [[stride_along(t, x.rank, d) for d in dims] for t in moved])
    size = math.prod(x.shape[axis:])
    count = size // vector
    threads = max(32, power_of_two(ceil_div(count, max(1, held // vector))))
    if threads > MOST:
        return None
    lanes = max(1, BLOCK // threads)
    return RowPlan(axes, True, vector, threads, lanes, count, x.size // size)
