"""Batch norm by the batch's own statistics, and its backward: two passes over the elements, sums of a channel and what
is made of them, with pointwise ops before and behind, and what becomes of the statistics, on the way.

Sums are taken by chunks in an order that does not change from run to run; a small launch puts them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.channel_parts import Part, parted
from fusec.gpu.kernels.codegen.indexing import Laid
from fusec.gpu.kernels.codegen.kernel import BLOCK, Kernel, ceil_div, power_of_two
from fusec.gpu.kernels.codegen.pointwise_code import step, takes, widest
from fusec.gpu.kernels.codegen.row_plan import Axis, Plan
from fusec.gpu.kernels.norm.batch_norm_resident import WAYS, ResidentSource, shared_out
from fusec.gpu.kernels.norm.batch_norm_source import BySumsSource, ChannelSource
from fusec.ir import Node, TensorType, Value
from fusec.ops import BatchNormBackward, BatchNormBySums, BatchNormTrain, ChannelSums
from fusec.schedule.program import inputs_of

LANES = 32  # vectors of channels that a block goes through side by side, at most
SUM_BLOCKS, WRITE_BLOCKS = 528, 1056  # of a pass over a large tensor
UNROLLED = 4  # turns whose elements are asked for together
SUM_TURNS, WRITE_TURNS = 8, 4  # of a thread, at least, where there are several chunks


def channels(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """The kernel for a batch norm in training or its backward; None if the step is no such thing."""
    if any(node.op.name == "gen_index" for node in nodes):
        return None
    part = _part(nodes, outputs)
    if part is None or part.x.type.size >= 1 << 31:
        return None
    numbers = part.anchor.operands[len(part.elements) :]
    read = [v.type for v in inputs_of([*part.before, part.anchor]) if v.type.size != 1 and v not in numbers]
    early = [v.type for v in part.early]
    straight = [v for v in part.elements if v.node not in part.before]  # read as they are
    again = [v.type for v in (*inputs_of(part.again), *straight) if v.type.size != 1 and v not in numbers]
    behind = [v for v in inputs_of(part.behind) if v is not part.y]
    written = [v.type for v in (*behind, *part.late) if v.type.size != 1]  # perhaps in another order than x
    sums = _planned(part.x.type, [*read, *early], SUM_BLOCKS, SUM_TURNS)
    write = _planned(part.x.type, [*again, *early, *written], WRITE_BLOCKS, WRITE_TURNS)
    name, source = "+".join(node.op.name for node in nodes), ChannelSource(part, sums, write)
    if isinstance(part.anchor.op, BatchNormBySums) and not part.unread:
        if part.early:  # before the sums were taken, somewhere
            return None
        source = BySumsSource(part, write, write)
        return Kernel(name, source.launches(), source.scratch_bytes)
    common, others = _planned(part.x.type, [*read, *early, *again, *written], 1, 1), dict[str, Kernel]()
    for threads, unrolled in () if isinstance(part.anchor.op, ChannelSums) else WAYS:
        plan = shared_out(common, threads)
        if plan is not None:
            resident = ResidentSource(part, plan, plan, unrolled)
            other = Kernel(name, resident.launches(), resident.scratch_bytes)
            others[other.key] = other
    return Kernel(name, source.launches(), source.scratch_bytes, tuple(others.values()))


def _part(nodes: Sequence[Node], outputs: Sequence[Value]) -> Part | None:
    """What each node does; channel_sums and the norm by them are one batch norm."""
    sums = [node for node in nodes if isinstance(node.op, ChannelSums)]
    norms = [node for node in nodes if isinstance(node.op, (BatchNormTrain, BatchNormBySums, BatchNormBackward))]
    if len(nodes) == len(sums) == 1:
        return Part(sums[0], sums[0].operands, (), (), (), (), (), tuple(outputs))
    if len(norms) != 1 or not all(takes(node) for node in nodes if node not in (*sums, *norms)):
        return None
    (anchor,) = norms
    if not sums:
        return parted(nodes, outputs, anchor, 2 if isinstance(anchor.op, BatchNormBackward) else 1)
    results = sums[0].results
    if len(sums) > 1 or sums[0].operands != anchor.operands[:1] or anchor.operands[3:] != results:
        return None
    if any(user is not anchor for value in results for user in value.users):
        return None
    part = parted([node for node in nodes if node is not sums[0]], outputs, anchor, 1)
    return None if part is None else replace(part, unread=results)


def _planned(x: TensorType, types: Sequence[Laid], blocks: int, turns: int) -> Plan:
    """Who goes through which elements of x for sums over all but the channels; types: of all that is moved."""
    rank = x.rank
    groups: list[list[int]] = []
    for dim in (d for d in x.order or range(rank) if x.shape[d] != 1):
        outer = groups[-1][-1] if groups else 1
        if 1 not in (dim, outer) and all(step(t, rank, outer) == step(t, rank, dim) * x.shape[dim] for t in types):
            groups[-1].append(dim)
        else:
            groups.append([dim])
    axes = tuple(Axis(f"c{g[-1]}", g[-1], math.prod(x.shape[d] for d in g), g != [1]) for g in groups)
    row, vector = not axes or axes[-1].reduced, 1
    if axes:
        dims = [axis.dim for axis in reversed(axes)]
        vector = widest(axes[-1].size, types, [[step(t, rank, d) for d in dims] for t in types])
    count = math.prod(a.size for a in axes if a.reduced) // (vector if row else 1)
    numbers = math.prod(a.size for a in axes if not a.reduced) // (1 if row else vector)
    lanes = 1 if row else min(LANES, power_of_two(numbers))
    threads = min(BLOCK // lanes, power_of_two(count))
    lanes = max(lanes, 32 // threads)
    plan = Plan(axes, row, vector, threads, lanes, count, numbers, unrolled=UNROLLED, whole=threads * UNROLLED)
    plan = replace(plan, chunks=max(1, min(ceil_div(blocks, plan.blocks), count // (threads * turns))))
    return replace(plan, chunks=ceil_div(count, plan.each))
