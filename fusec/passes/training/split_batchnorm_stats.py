"""The statistics of a batch norm in training as ops of their own where a convolution makes its image: cuDNN may take
them with the convolution (genstats), and the norm then reads its image once. Kernels do both as they do the norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fusec.ir import Graph, Node, channels_last
from fusec.lowering.virtual_rounding import HALVES
from fusec.ops import BatchNormBySums, BatchNormTrain, ChannelSums, Conv
from fusec.passes.base import Options

# What the norm's one launch keeps on chip, or finds in the second-level cache once more, it hardly reads twice
# (fusec.gpu.kernels.norm.batch_norm_resident). Beyond that an H200 gains; up to it, the convolution's only engine for
# sums loses more than the norm gains (benchmarks/results/channel_sums.json).
KEPT_BYTES = (132 * 224 << 10) + (24 << 20)


@dataclass(frozen=True)
class SumsInFront:
    """See the module."""

    name: ClassVar[str] = "sums_in_front"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if isinstance(node.op, BatchNormTrain) and _gains(node):
                _split(graph, node, node.op.epsilon)


def _gains(node: Node) -> bool:
    """In 16 bits alone: there an element's own rounding is more than what is lost with a variance by sums of squares,
    for means of up to hundreds of deviations."""
    x = node.operands[0]
    maker = x.node
    if maker is None or not isinstance(maker.op, Conv) or maker.op.groups != 1 or x.type.dtype not in HALVES:
        return False
    return x.type.nbytes > KEPT_BYTES and x.type.order == channels_last(x.type.rank)


def _split(graph: Graph, node: Node, epsilon: float) -> None:
    x = node.operands[0]
    sums = graph.insert(ChannelSums(), [x], before=node, origin=node.origin)
    made = graph.insert(BatchNormBySums(epsilon), [*node.operands, *sums.results], before=node, origin=node.origin)
    for old, new in zip(node.results, made.results, strict=True):
        graph.set_type(new, old.type)
        graph.replace(old, new)
    graph.erase(node)
