"""What a step costs, in microseconds: bytes over bandwidth or operations over peak, and a launch.

A model, for choosing between covers of the same nodes; where a GPU is at hand, measured times replace it.
Each penalty is a measurement, named beside it; benchmarks/penalties.py makes it anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusec.ir import DType, Node
from fusec.ops import (
    Attention,
    AttentionBackward,
    AttentionTrain,
    ChannelSums,
    Conv,
    ConvTranspose,
    ConvWgrad,
    MatMul,
)
from fusec.plans.verdict import Legal
from fusec.schedule.program import inputs_of, outputs_of
from fusec.targets.target import Target

# MobileNetV2's 17 depthwise layers, batch 32: plain 0.280 ms, with bias and relu fused 3.68 ms (engine 0 only).
DEPTHWISE_FUSED = 3.68 / 0.280
# 32x64x56x56, 1x1 to 256, residual, bias, relu: best precompiled plan 0.0446 ms, without those 0.0511 ms.
RUNTIME_COMPILED = 0.0511 / 0.0446
# The generic precompiled engine: offered for relu6, sigmoid, tanh, elu after a bias, and slower than the
# runtime-compiled ones offered beside it.
GENERIC_ENGINE = 0
_PEAKS = {DType.F16: "fp16", DType.BF16: "bf16"}


def step_us(nodes: Sequence[Node], target: Target, verdict: Legal | None = None) -> float:
    """Modelled time of one step; without a verdict, as if the best engines took it."""
    return limit_us(nodes, target) * penalty(nodes, verdict) + target.launch_us


def limit_us(nodes: Sequence[Node], target: Target) -> float:
    """What a step takes at least: the time of its bytes or of its operations, whichever is more."""
    moved = sum(v.type.nbytes for v in (*inputs_of(nodes), *outputs_of(nodes)))
    work = sum(map(flops, nodes))
    peak = target.flops[_precision(nodes)]
    return max(moved / target.memory_bandwidth, work / peak) * 1e6


def _precision(nodes: Sequence[Node]) -> str:
    """Whose peak applies: that of the 16-bit type a product reads. Everything else counts as fp32; that
    tf32 may be allowed is not seen here, and matters to products alone."""
    product = next((n for n in nodes if flops(n)), nodes[0])
    return _PEAKS.get(product.operands[0].type.dtype, "fp32")


def penalty(nodes: Sequence[Node], verdict: Legal | None = None) -> float:
    """How much longer than its roofline a step takes, compared with the best engines for its anchor."""
    conv = next((n for n in nodes if isinstance(n.op, (Conv, ConvTranspose))), None)
    if conv is None or len(nodes) == 1:
        return 1.0
    if is_depthwise(conv):
        return DEPTHWISE_FUSED
    if isinstance(nodes[-1].op, ChannelSums) and verdict is not None and not is_fast(verdict):
        return DEPTHWISE_FUSED  # the generic engine alone there, too: not measured, and not hoped for
    return RUNTIME_COMPILED if verdict is not None and not is_fast(verdict) else 1.0


def is_fast(verdict: Legal) -> bool:
    """Say whether a precompiled engine other than the generic one is offered; assumed where cuDNN was not asked."""
    return not verdict.plans or any(p.precompiled and p.engine != GENERIC_ENGINE for p in verdict.plans)


def is_depthwise(node: Node) -> bool:
    """Whether each channel is convolved for itself."""
    return isinstance(node.op, (Conv, ConvTranspose)) and node.op.groups == node.operands[0].type.shape[1] > 1


def flops(node: Node) -> int:
    """Multiplications and additions of a product; what pointwise ops add is hidden behind it or behind the
    memory traffic."""
    size = sum(v.type.size for v in node.results)
    if isinstance(node.op, Conv):
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
    if isinstance(node.op, MatMul):
        return 2 * size * node.operands[0].type.shape[-1]
    return 0
