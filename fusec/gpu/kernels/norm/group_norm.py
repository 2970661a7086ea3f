"""Group norm where channels lie innermost, in one launch: which steps it fits, and the ways to share it out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.kernel import HALVES, VECTOR_BYTES, Kernel
from fusec.gpu.kernels.codegen.mma_tiles import PROCESSORS, SHARED_BYTES
from fusec.gpu.kernels.codegen.pointwise_code import step
from fusec.gpu.kernels.norm.group_norm_source import WARP, GroupSource, Share
from fusec.ir import DType, Node, TensorType, Value
from fusec.ops import GroupNorm
from fusec.schedule.program import inputs_of

CLUSTER = 8  # blocks of one, at most
MEETING = 16  # blocks that share groups without a cluster, at most
THREADS = (320, 640)  # of a block, about
COALESCED_BYTES = 64  # of a pixel that a block reads, at least where groups allow it
FEW, ENOUGH = 32, 96  # blocks, with less of which it is not worth it, or which fill the GPU
KEPT, MOST_KEPT = 8, 16  # vectors that a thread keeps: where the GPU is full by then, and at most


def merges(type: TensorType, shape: tuple[int, ...]) -> bool:
    """Whether a tensor goes through the spatial dims as if they were one, the last."""
    rank = len(shape)
    return all(step(type, rank, d) == step(type, rank, d + 1) * shape[d + 1] for d in range(2, rank - 1))


def one_launch(
    anchor: Node, before: Sequence[Node], behind: Sequence[Node], early: Sequence[Value], late: Sequence[Value]
) -> list[Kernel]:
    """The ways to do it so, with pointwise ops before and behind that store some of their results."""
    op, x = anchor.op, anchor.operands[0].type
    if not isinstance(op, GroupNorm) or x.rank < 3 or not x.size or x.dtype not in (*HALVES, DType.F32):
        return []
    channels, vector, pixels = x.shape[1], VECTOR_BYTES // x.dtype.itemsize, math.prod(x.shape[2:])
    if x.strides[1] != 1 or channels % vector or pixels == 1:
        return []
    read = [v for v in (*(inputs_of(before) or anchor.operands[:1]), *inputs_of(behind)) if v is not anchor.result]
    types = [x, *(v.type for v in (*read, *early, *late) if v.type.size != 1)]
    if any(t.span >= 1 << 31 for t in types) or not all(merges(t, x.shape) for t in types):
        return []
    if any(stride % vector for t in types for stride in t.strides if stride != 1):
        return []
    if any(node.op.name == "gen_index" for node in (*before, *behind)):
        return []
    shares = _shares(x, channels // op.groups, vector, pixels)
    found = (GroupSource(anchor, op, before, behind, early, late, share) for share in shares)
    return [each.kernel() for each in found if each.shared_bytes <= SHARED_BYTES]


def _shares(x: TensorType, members: int, vector: int, pixels: int) -> list[Share]:
    least = math.lcm(members, vector)  # channels that are whole groups and whole vectors
    if x.shape[1] % least:
        return []
    widths = [own for own in range(least, x.shape[1] + 1, least) if x.shape[1] % own == 0]
    own = next((own for own in widths if own * x.dtype.itemsize >= COALESCED_BYTES), widths[-1])
    lanes, teams = own // vector, x.size // (pixels * own)
    found: list[Share] = []
    for clustered, sizes in ((True, THREADS), (False, THREADS[:1])):
        for size in sizes:
            whole = WARP // math.gcd(lanes, WARP)  # rows that are whole warps
            share = Share(own, vector, max(1, size // (lanes * whole)) * whole, 1, pixels, clustered)
            best = _fullest(share, teams, CLUSTER if clustered else MEETING)
            if best is not None and (clustered or teams * best.blocks <= 2 * PROCESSORS):
                found.append(replace(best, clustered=clustered and best.blocks > 1))
    return list(dict.fromkeys(found))


def _fullest(share: Share, teams: int, most: int) -> Share | None:
    """With as few blocks as fill the GPU and can keep what they read."""
    best = None
    while share.blocks <= most and share.rest > 0 and (share.each >= share.rows or share.blocks == 1):
        if share.turns <= MOST_KEPT and share.own <= share.block <= 1024 and teams * share.blocks >= FEW:
            best = share
            if share.turns <= KEPT and teams * share.blocks >= ENOUGH:
                break
        share = replace(share, blocks=2 * share.blocks)
    return best
