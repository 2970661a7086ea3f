"""Model the time of a step in microseconds: bytes over bandwidth or operations over peak, and a launch.

The model compares covers of the same nodes. On a GPU, measured times replace it. Each penalty is a measurement, named
next to it; benchmarks/kernels/fusion_penalties.py repeats them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusec.ir import DType, Node
from fusec.ops import (
    FORWARD_CONVOLUTIONS,
    IMAGE_CONVOLUTIONS,
    Attention,
    AttentionBackward,
    AttentionTrain,
    ChannelSums,
    ConvTranspose,
    ConvWgrad,
    DeformConv,
    MatMul,
    PackedMatMul,
    Pointwise,
)
from fusec.ops.matmul import SUMMED_IN
from fusec.plans import engine_numbers
from fusec.plans.verdict import Legal
from fusec.schedule.program import inputs_of, outputs_of
from fusec.targets.target import Target

# MobileNetV2's 17 depthwise layers, batch 32: plain 0.280 ms, with bias and relu fused 3.68 ms (engine 0 only).
DEPTHWISE_FUSED = 3.68 / 0.280
# 32x64x56x56, 1x1 to 256, residual, bias, relu: best precompiled plan 0.0446 ms, without those 0.0511 ms.
RUNTIME_COMPILED = 0.0511 / 0.0446
PENALISED = IMAGE_CONVOLUTIONS  # whose time depends on the engines that cuDNN offers
_PEAKS = {DType.F16: "fp16", DType.BF16: "bf16", DType.I8: "fp16", DType.F8E4M3: "fp16"}
BYTE_RATE = 2  # tensor cores multiply numbers of 8 bits twice as fast as fp16 (data sheets of all targets)


def step_us(nodes: Sequence[Node], target: Target, verdict: Legal | None = None) -> float:
    """Return the modelled time of one step; without a verdict, as if the best engines ran it."""
    return limit_us(nodes, target) * penalty(nodes, verdict) + target.launch_us


def limit_us(nodes: Sequence[Node], target: Target) -> float:
    """Return the roofline time of a step: of its bytes or of its operations, whichever is more."""
    moved = sum(v.type.device_bytes for v in (*inputs_of(nodes), *outputs_of(nodes)))
    work = sum(map(flops, nodes))
    peak = target.flops[_precision(nodes)] * (BYTE_RATE if _reads_bytes(nodes) else 1)
    return max(moved / target.memory_bandwidth, work / peak) * 1e6


def saved_in_bytes_us(moved: int, work: int, storage: DType, target: Target) -> float:
    """Return how much less time a product or a move of floats would take in 8 bits.

    moved: elements that are read and written. work: operations. storage: the type of the floats.
    """
    peak = target.flops[_PEAKS.get(storage, "fp32")]
    wide = max(moved * storage.itemsize / target.memory_bandwidth, work / peak)
    narrow = max(moved / target.memory_bandwidth, work / (target.flops["fp16"] * BYTE_RATE))
    return (wide - narrow) * 1e6


def _reads_bytes(nodes: Sequence[Node]) -> bool:
    return any(flops(n) and n.operands[0].type.dtype in SUMMED_IN for n in nodes)


def _precision(nodes: Sequence[Node]) -> str:
    """Name the peak rate that applies: of the 16-bit type that a product reads, else fp32.

    The model does not know if tf32 is allowed. That matters to products alone.
    """
    product = next((n for n in nodes if flops(n)), nodes[0])
    return _PEAKS.get(product.operands[0].type.dtype, "fp32")


def penalty(nodes: Sequence[Node], verdict: Legal | None = None) -> float:
    """Return the ratio of a step's time to its roofline, relative to the best engines for its anchor."""
    conv = next((n for n in nodes if isinstance(n.op, PENALISED)), None)
    if conv is None or len(nodes) == 1:
        return 1.0
    if conv.operands[0].type.dtype is DType.I8:  # cuDNN has no fast precompiled engine to lose
        return 1.0
    if is_depthwise(conv):
        return DEPTHWISE_FUSED
    if isinstance(nodes[-1].op, ChannelSums) and verdict is not None and not is_fast(verdict):
        return DEPTHWISE_FUSED  # not measured; assumed as slow, because only the generic engine is offered there too
    return RUNTIME_COMPILED if verdict is not None and not is_fast(verdict) else 1.0


def is_fast(verdict: Legal) -> bool:
    """Tell if cuDNN offers a precompiled engine other than the generic one, or was not asked."""
    return not verdict.plans or any(p.precompiled and p.engine != engine_numbers.GENERIC for p in verdict.plans)


def is_depthwise(node: Node) -> bool:
    """Tell if a convolution has one group per channel."""
    return isinstance(node.op, IMAGE_CONVOLUTIONS) and node.op.groups == node.operands[0].type.shape[1] > 1


def flops(node: Node) -> int:
    """Count multiplications and additions of a product; pointwise ops count 0, because memory traffic hides them."""
    if isinstance(node.op, Pointwise):
        return 0
    size = sum(v.type.size for v in node.results)
    if isinstance(node.op, (*FORWARD_CONVOLUTIONS, DeformConv)):
        return 2 * size * math.prod(node.operands[1].type.shape[1:])
    if isinstance(node.op, ConvTranspose):
        return 2 * node.operands[0].type.size * math.prod(node.operands[1].type.shape[1:])
    if isinstance(node.op, ConvWgrad):
        return 2 * node.operands[1].type.size * math.prod(node.result.type.shape[1:])
    if isinstance(node.op, (Attention, AttentionTrain)):
        q, k, v = (value.type.shape for value in node.operands[:3])
        return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])
    if isinstance(node.op, AttentionBackward):
        q, k, v = (value.type.shape for value in node.operands[1:4])
        return 2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3])
    if isinstance(node.op, (MatMul, PackedMatMul)):
        return 2 * size * node.operands[0].type.shape[-1]
    return 0
