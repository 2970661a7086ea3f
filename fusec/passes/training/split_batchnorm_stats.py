"""Split the statistics off a batch norm in training where a convolution computes its image.

cuDNN may then compute them with the convolution (genstats), and the norm reads its image once. Kernels run the two ops
as fast as the norm.
"""

from __future__ import annotations

from fusec.ir import HALVES, Graph, Node, channels_last
from fusec.ops import BatchNormBySums, BatchNormTrain, ChannelSums, Conv
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import replace_node
from fusec.targets.target import STATIC_BYTES, Target, resident_cache_bytes


def resident_bytes(target: Target) -> int:
    """Return the size of an image that the norm's one launch hardly reads twice.

    The launch keeps the image on the chip, or finds it in the second-level cache (fusec.gpu.kernels.norm.
    batch_norm_resident). Measured on an H200, the split gains above this size. Below it, the convolution's only engine
    for sums loses more than the norm gains (benchmarks/results/channel_sums.json).
    """
    on_chip = target.processors * (target.shared_memory_bytes - STATIC_BYTES)
    return on_chip + resident_cache_bytes(target.l2_bytes)


class SplitBatchNormStats(Pass):
    """Split statistics off batch norms."""

    name = "split_batchnorm_stats"

    def run(self, graph: Graph, options: Options) -> None:
        largest = resident_bytes(options.target)
        for node in list(graph.nodes):
            if isinstance(node.op, BatchNormTrain) and _gains(node, largest):
                _split(graph, node, node.op.epsilon)


def _gains(node: Node, largest: int) -> bool:
    """Return True for 16-bit images of a convolution that exceed `largest` bytes.

    In 16 bits an element's own rounding exceeds the error of a variance by sums of squares, for means of up to
    hundreds of deviations.
    """
    x = node.operands[0]
    maker = x.node
    if maker is None or not isinstance(maker.op, Conv) or maker.op.groups != 1 or x.type.dtype not in HALVES:
        return False
    return x.type.nbytes > largest and x.type.order == channels_last(x.type.rank)


def _split(graph: Graph, node: Node, epsilon: float) -> None:
    x = node.operands[0]
    sums = graph.insert(ChannelSums(), [x], before=node, origin=node.origin)
    made = graph.insert(BatchNormBySums(epsilon), [*node.operands, *sums.results], before=node, origin=node.origin)
    replace_node(graph, node, made)
