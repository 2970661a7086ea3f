"""Generate kernels for batch norm in training and its backward, with pointwise ops around them.

Two passes visit the elements: one sums each channel, one computes results from these sums. Sums are taken by chunks and
merged by a small launch, in a fixed order, so every run gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.dilated import dilated_view, dilates
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.indexing import Strided
from fusec.gpu.kernels.codegen.kernel import BLOCK, Kernel, ceil_div, power_of_two
from fusec.gpu.kernels.codegen.pointwise_code import can_generate, stride_along, widest_vector
from fusec.gpu.kernels.codegen.row_plan import Axis, RowPlan
from fusec.gpu.kernels.norm.batch_norm.batch_norm_resident import VARIANTS, BatchNormResident, plan_resident
from fusec.gpu.kernels.norm.batch_norm.batch_norm_source import BatchNormBySumsSource, BatchNormSource
from fusec.gpu.kernels.norm.batch_norm.batch_norm_streamed import BatchNormStreamed
from fusec.gpu.kernels.norm.norm_step import NormStep, match_norm_step
from fusec.ir import DType, Node, TensorType, Value
from fusec.ops import BatchNormBackward, BatchNormBySums, BatchNormTrain, ChannelSums, Dilate
from fusec.schedule.program import inputs_of

LANES = 32  # vectors of channels that a block visits together, at most
SUM_WAVES, WRITE_WAVES = 4, 8  # blocks for each multiprocessor, of a pass over a large tensor
UNROLLED = 4  # turns whose loads are issued together
SUM_TURNS, WRITE_TURNS = 8, 4  # of a thread, at least, if there are several chunks
MOST_SUM_BYTES = 48 << 10  # of a block's sums and factors: a source declares no more shared memory than that
MOST_OF_TWO = 512  # threads of a block for two norms; 1024 leave too few registers, and were slower on an H200


def batch_norm(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a batch norm in training or its backward; None for other steps."""
    if any(node.op.name == "gen_index" for node in nodes):
        return None
    types = {value.type.dtype for node in nodes for value in (*node.operands, *node.results)}
    if any(dtype.is_narrow and dtype is not DType.U2 for dtype in types):  # masks of relus have 2 bits
        return None
    step = _match(nodes, outputs)
    if step is None or step.x.type.size >= 1 << 31:
        return None
    apart = dilates(nodes)
    if apart is None or any(v.type.shape[1] != step.x.type.shape[1] for v in apart):
        return None

    def stored(values: Iterable[Value]) -> list[Strided]:
        """Return how values are stored that are read or written element by element."""
        return [dilated_view(apart[v]) if v in apart else v.type for v in values if v.type.size != 1 or v in apart]

    read = stored(v for v in inputs_of([*step.prologue, *step.anchors]) if v not in step.numbers)
    prologue_outputs = [v.type for v in step.prologue_outputs]
    straight = [v for v in step.elements if v.node not in step.prologue]  # read without a prologue
    again = stored(v for v in (*inputs_of(step.second_prologue), *straight) if v not in step.numbers)
    epilogue = [v for v in inputs_of(step.epilogue) if v.node not in step.anchors]
    written = stored((*epilogue, *step.epilogue_outputs))  # perhaps in another memory order than x
    sums = _plan(step.x.type, [*read, *prologue_outputs], SUM_WAVES * figures.processors, SUM_TURNS)
    write = _plan(step.x.type, [*again, *prologue_outputs, *written], WRITE_WAVES * figures.processors, WRITE_TURNS)
    name, source = "+".join(node.op.name for node in nodes), BatchNormSource(step, sums, write)
    if isinstance(step.anchor.op, BatchNormBySums) and not step.recomputed:
        if step.prologue_outputs:  # the sums were taken from them in another step
            return None
        source = BatchNormBySumsSource(step, write, write)
        return Kernel(name, source.launches(), source.scratch_bytes)
    common, others = _plan(step.x.type, [*read, *prologue_outputs, *again, *written], 1, 1), dict[str, Kernel]()
    for threads, unrolled, lanes in () if isinstance(step.anchor.op, ChannelSums) else VARIANTS:
        plan = plan_resident(common, threads, lanes, figures)
        if plan is not None and (step.second is None or plan.block <= MOST_OF_TWO):
            streamed = BatchNormStreamed(step, plan, plan, unrolled, figures)
            # measured on an H200: copies ahead are as fast as loads for small images, and faster for others
            one = streamed if streamed.exists else BatchNormResident(step, plan, plan, unrolled, figures)
            other = Kernel(name, one.launches(), one.scratch_bytes)
            if one.sum_bytes <= MOST_SUM_BYTES:
                others[other.key] = other
    return Kernel(name, source.launches(), source.scratch_bytes, tuple(others.values()))


def _match(nodes: Sequence[Node], outputs: Sequence[Value]) -> NormStep | None:
    """Sort the nodes by role. channel_sums and the norm by these sums count as one batch norm."""
    sums = [node for node in nodes if isinstance(node.op, ChannelSums)]
    norms = [node for node in nodes if isinstance(node.op, (BatchNormTrain, BatchNormBySums, BatchNormBackward))]
    if len(nodes) == len(sums) == 1:
        return NormStep(sums[0], sums[0].operands, (), (), (), (), (), tuple(outputs))
    if not all(can_generate(node) or isinstance(node.op, Dilate) for node in nodes if node not in (*sums, *norms)):
        return None
    if len(norms) == 2 and not sums and _have_equal_gradient(*norms):
        return match_norm_step(nodes, outputs, norms[0], 2, second=norms[1])
    if len(norms) != 1:
        return None
    (anchor,) = norms
    if not sums:
        return match_norm_step(nodes, outputs, anchor, 2 if isinstance(anchor.op, BatchNormBackward) else 1)
    results = sums[0].results
    if len(sums) > 1 or sums[0].operands != anchor.operands[:1] or anchor.operands[3:] != results:
        return None
    if any(user is not anchor for value in results for user in value.users):
        return None
    step = match_norm_step([node for node in nodes if node is not sums[0]], outputs, anchor, 1)
    return None if step is None else replace(step, recomputed=results)


def _have_equal_gradient(first: Node, second: Node) -> bool:
    """Tell if two norms are the last of a block and that of its shortcut: the gradient of their sum is that of both.

    One kernel then reads it once. It keeps sums and factors of both norms, so masks of relus have no place in it.
    """
    (dy, x), (other_dy, other_x) = (norm.operands[:2] for norm in (first, second))
    return (
        first.op == second.op == BatchNormBackward() and dy is other_dy and x.type == other_x.type and x is not other_x
    )


def _plan(x: TensorType, types: Sequence[Strided], blocks: int, turns: int) -> RowPlan:
    """Plan sums over all dims but the channels.

    types: all tensors that are read or written element by element.
    blocks: blocks that fill the GPU.
    turns: the fewest turns of a thread, if there are several chunks.
    """
    rank = x.rank
    groups: list[list[int]] = []
    for dim in (d for d in x.order or range(rank) if x.shape[d] != 1):
        outer = groups[-1][-1] if groups else 1
        if 1 not in (dim, outer) and all(
            stride_along(t, rank, outer) == stride_along(t, rank, dim) * x.shape[dim] for t in types
        ):
            groups[-1].append(dim)
        else:
            groups.append([dim])
    axes = tuple(Axis(f"c{g[-1]}", g[-1], math.prod(x.shape[d] for d in g), g != [1]) for g in groups)
    row, vector = not axes or axes[-1].reduced, 1
    if axes:
        dims = [axis.dim for axis in reversed(axes)]
        vector = widest_vector(axes[-1].size, types, [[stride_along(t, rank, d) for d in dims] for t in types])
    count = math.prod(a.size for a in axes if a.reduced) // (vector if row else 1)
    numbers = math.prod(a.size for a in axes if not a.reduced) // (1 if row else vector)
    lanes = 1 if row else min(LANES, power_of_two(numbers))
    threads = min(BLOCK // lanes, power_of_two(count))
    lanes = max(lanes, 32 // threads)
    plan = RowPlan(axes, row, vector, threads, lanes, count, numbers, unrolled=UNROLLED, whole=threads * UNROLLED)
    plan = replace(plan, chunks=max(1, min(ceil_div(blocks, plan.blocks), count // (threads * turns))))
    return replace(plan, chunks=ceil_div(count, plan.each))
