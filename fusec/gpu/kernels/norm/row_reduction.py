"""Generate kernels for reductions, softmax and norms, with a prologue and an epilogue.

Some threads of a block share the elements of one number, over any dims and in any memory order. If the innermost dim is
reduced ("row"), a thread adds neighbours up. Otherwise ("column") each of the neighbours has a number of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fusec.gpu.kernels.codegen.copies_ahead import ASYNCHRONOUS
from fusec.gpu.kernels.codegen.equal_steps import once_for_equal_steps
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, Kernel, ceil_div
from fusec.gpu.kernels.codegen.row_plan import COALESCED_BYTES, RowPlan, RowShape, plan_rows
from fusec.gpu.kernels.norm.group_norm import one_launch
from fusec.gpu.kernels.norm.row_source import RowSource
from fusec.gpu.kernels.norm.row_step import RowStep, match_row_step
from fusec.ir import Node, Value
from fusec.ops import GroupNorm, InstanceNorm, Reduce

WAVES = 4  # blocks of a reduction that is split, by those that fill the GPU
MIN_TURNS = 4  # vectors that a thread of a chunk visits, at least, because each chunk costs a merge


class ReductionVariant(NamedTuple):
    """A variant of a reduction.

    shape: shape of a block. If fewer threads share a number, each visits more elements, and more chunks are merged.
    in_one_launch: the last block of a reduction merges its chunks, which saves the second launch.
    depth: turns whose elements are copied to shared memory ahead of their use, in one launch; 0 if they are loaded.
    """

    shape: RowShape
    in_one_launch: bool = False
    depth: int = 0


VARIANTS = (  # the first is the default
    ReductionVariant(RowShape(BLOCK, 4)),
    ReductionVariant(RowShape(BLOCK, 1)),
    ReductionVariant(RowShape(32, 4)),
    ReductionVariant(RowShape(32, 1)),
    ReductionVariant(RowShape(BLOCK, 4), in_one_launch=True),
    ReductionVariant(RowShape(BLOCK, 4, 32), in_one_launch=True),
    ReductionVariant(RowShape(BLOCK, 4, 8), in_one_launch=True),
    ReductionVariant(RowShape(BLOCK, 1, 16), in_one_launch=True, depth=4),
)


@once_for_equal_steps
def row_reduction(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a reduction, softmax or norm with pointwise ops around it; None for other steps."""
    step = match_row_step(nodes, outputs)
    if step is None:
        return None
    if step.y.type.size == 0:
        return Kernel(step.name, ())
    if step.x.type.size >= 1 << 31:
        return None
    found = (_kernel(step, figures, variant) for variant in VARIANTS)
    variants = [kernel for kernel in found if kernel is not None]
    plain = RowSource(step, plan_rows(step.op, step.x.type, step.moved, VARIANTS[0].shape, figures))
    if plain.may_be_packed and len(variants[0].launches) == 1:
        packed = replace(plain, packed_threads=figures.processor_threads * 3 // 4)
        variants.append(Kernel(step.name, (packed.launch(),)))
    if isinstance(step.op, GroupNorm):
        shapes = dict.fromkeys(variant.shape[:2] for variant in VARIANTS)
        by_channels = (_by_channels(step, step.op, RowShape(*shape), figures) for shape in shapes)
        together = [variant for variant in by_channels if variant is not None]
        narrow = step.x.type.shape[1] // step.op.groups * step.x.type.dtype.itemsize < COALESCED_BYTES
        variants = [*together, *variants] if narrow else [*variants, *together]
        variants += one_launch(step, figures)
    best, *others = variants
    return replace(best, others=tuple({k.key: k for k in others if k.key != best.key}.values()))


def chunked_blocks(figures: GpuFigures) -> tuple[int, int]:
    """Return the blocks below which a reduction is split into chunks, and the blocks to aim at.

    Fewer blocks would not fill the GPU.
    """
    return figures.enough_blocks, WAVES * figures.enough_blocks


def _kernel(step: RowStep, figures: GpuFigures, variant: ReductionVariant) -> Kernel | None:
    """Return a variant; None if elements would be copied ahead but are not."""
    plan = plan_rows(step.op, step.x.type, step.moved, variant.shape, figures)
    few, _ = chunked_blocks(figures)
    most = _most_chunks(plan, figures)
    in_one_launch = variant.in_one_launch and isinstance(step.op, Reduce)
    if not step.formula.merge or plan.blocks >= few or most < 2:
        return None if variant.depth else Kernel(step.name, (RowSource(step, plan).launch(),))
    plan = _split(plan, most)
    source = RowSource(step, plan, depth=variant.depth)
    launches = (source.one_launch(),) if in_one_launch else (RowSource(step, plan).partial(), source.merged())
    fits = 0 < source.copied_bytes <= figures.dynamic_bytes and figures.sm >= ASYNCHRONOUS
    return Kernel(step.name, launches, _scratch_bytes(step, plan)) if fits or not variant.depth else None


def _by_channels(step: RowStep, op: GroupNorm, shape: RowShape, figures: GpuFigures) -> Kernel | None:
    """Return a group norm that reads all channels of a pixel together, whatever their group.

    It needs contiguous channels. The results of the channels are then combined by groups.
    """
    channels = step.x.type.shape[1]
    plan = plan_rows(InstanceNorm(op.epsilon), step.x.type, step.moved, shape, figures)
    most = _most_chunks(plan, figures)
    if plan.row or plan.along != 1 or most < 1 or op.groups == channels or step.formula.merge != "moments":
        return None
    plan = _split(plan, most)
    source = RowSource(step, plan, members=channels // op.groups)
    return Kernel(step.name, (source.partial(), source.merged()), _scratch_bytes(step, plan))


def _most_chunks(plan: RowPlan, figures: GpuFigures) -> int:
    _, full = chunked_blocks(figures)
    return min(ceil_div(full, plan.blocks), plan.count // (plan.threads * MIN_TURNS))


def _split(plan: RowPlan, chunks: int) -> RowPlan:
    """Split a plan into at most `chunks` chunks, of which none is empty."""
    plan = replace(plan, chunks=chunks)
    return replace(plan, chunks=ceil_div(plan.count, plan.each))


def _scratch_bytes(step: RowStep, plan: RowPlan) -> int:
    item = 8 if step.formula.c_type in ("double", "i64", "u64") else 4
    return len(step.formula.passes) * plan.chunks * plan.groups * plan.width * item
