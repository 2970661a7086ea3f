"""Generate group norm in one launch, for channels last: select the steps that fit, and their variants."""

from __future__ import annotations

import math
from dataclasses import replace

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import CLUSTERS, HALVES, VECTOR_BYTES, Kernel
from fusec.gpu.kernels.codegen.pointwise_code import stride_along
from fusec.gpu.kernels.norm.group_norm_source import WARP, GroupSource, GroupTiling
from fusec.gpu.kernels.norm.row_step import RowStep
from fusec.ir import DType, TensorType
from fusec.ops import GroupNorm
from fusec.schedule.program import inputs_of

CLUSTER = 8  # blocks of a cluster, at most: CUDA promises no larger ones, whatever the GPU
MEETING = 16  # blocks that share groups without a cluster, at most
THREADS = (320, 640)  # of a block, about
COALESCED_BYTES = 64  # of a pixel that a block reads, at least where groups allow it
# Quarters of the blocks that fill the GPU: with fewer than FEW the kernel is slow; ENOUGH keep it busy.
FEW, ENOUGH = 1, 3
VECTORS, MOST_VECTORS = 8, 16  # that a thread holds in registers, if that fills the GPU, and at most


def merges(type: TensorType, shape: tuple[int, ...]) -> bool:
    """Tell if the spatial dims of a tensor act as one dim, the last."""
    rank = len(shape)
    return all(
        stride_along(type, rank, d) == stride_along(type, rank, d + 1) * shape[d + 1] for d in range(2, rank - 1)
    )


def one_launch(step: RowStep, figures: GpuFigures) -> list[Kernel]:
    """Return the variants of a group norm with a prologue and an epilogue; none if it does not fit."""
    op, x = step.op, step.x.type
    if not isinstance(op, GroupNorm) or x.rank < 3 or not x.size or x.dtype not in (*HALVES, DType.F32):
        return []
    channels, vector, pixels = x.shape[1], VECTOR_BYTES // x.dtype.itemsize, math.prod(x.shape[2:])
    if x.strides[1] != 1 or channels % vector or pixels == 1:
        return []
    read = [*(inputs_of(step.prologue) or [step.x]), *(v for v in inputs_of(step.epilogue) if v is not step.y)]
    stored = (*step.prologue_outputs, *step.epilogue_outputs)
    types = [x, *(v.type for v in (*read, *stored) if v.type.size != 1)]
    if any(t.span >= 1 << 31 for t in types) or not all(merges(t, x.shape) for t in types):
        return []
    if any(stride % vector for t in types for stride in t.strides if stride != 1):
        return []
    if any(node.op.name == "gen_index" for node in (*step.prologue, *step.epilogue)):
        return []
    tilings = _tilings(x, channels // op.groups, vector, pixels, figures)
    found = (GroupSource(step, tiling) for tiling in tilings)
    return [each.kernel() for each in found if each.shared_bytes <= figures.static_bytes]


def _tilings(x: TensorType, members: int, vector: int, pixels: int, figures: GpuFigures) -> list[GroupTiling]:
    least = math.lcm(members, vector)  # channels that are whole groups and whole vectors
    if x.shape[1] % least:
        return []
    widths = [own for own in range(least, x.shape[1] + 1, least) if x.shape[1] % own == 0]
    own = next((own for own in widths if own * x.dtype.itemsize >= COALESCED_BYTES), widths[-1])
    lanes, teams = own // vector, x.size // (pixels * own)
    found: list[GroupTiling] = []
    for clustered, sizes in ((True, THREADS), (False, THREADS[:1])):
        for size in sizes if not clustered or figures.has(CLUSTERS) else ():
            whole = WARP // math.gcd(lanes, WARP)  # rows that are whole warps
            tiling = GroupTiling(own, vector, max(1, size // (lanes * whole)) * whole, 1, pixels, clustered)
            best = _fullest(tiling, teams, CLUSTER if clustered else MEETING, figures)
            if best is not None and (clustered or teams * best.blocks <= 2 * figures.processors):
                found.append(replace(best, clustered=clustered and best.blocks > 1))
    return list(dict.fromkeys(found))


def _fullest(tiling: GroupTiling, teams: int, most: int, figures: GpuFigures) -> GroupTiling | None:
    """Return the tiling with as few blocks as fill the GPU and can keep what they read; None if there is none."""
    best, quarter = None, figures.enough_blocks // 4
    while tiling.blocks <= most and tiling.rest > 0 and (tiling.each >= tiling.rows or tiling.blocks == 1):
        blocks = teams * tiling.blocks
        if tiling.turns <= MOST_VECTORS and tiling.own <= tiling.block <= 1024 and blocks >= FEW * quarter:
            best = tiling
            if tiling.turns <= VECTORS and blocks >= ENOUGH * quarter:
                break
        tiling = replace(tiling, blocks=2 * tiling.blocks)
    return best
