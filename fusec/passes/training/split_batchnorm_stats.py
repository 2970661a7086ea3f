"""Split the statistics off a batch norm in training where a convolution computes its image.

cuDNN may then compute them with the convolution (genstats), and the norm reads its image once. Kernels run the two ops
as fast as the norm.
"""

from __future__ import annotations

from fusec.ir import HALVES, Graph, Node, channels_last
from fusec.ops import BatchNormBySums, BatchNormTrain, ChannelSums, Conv
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import replace_node
from fusec.targets.target import Target

RESERVED_BYTES = 3 << 10  # of a block's shared memory, because the norm stores no elements there
L2_SHARE = 2 / 5  # of the second-level cache, which still holds elements that the norm has read


def resident_bytes(target: Target) -> int:
    """Return the size of an image that the norm's one launch hardly reads twice.

    The launch keeps the image on the chip, or finds it in the second-level cache (fusec.gpu.kernels.norm.
    batch_norm_resident). Measured on an H200, the split gains above this size. Below it, the convolution's only engine
    for sums loses more than the norm gains (benchmarks/results/channel_sums.json).
    """
    on_chip = target.processors * (target.shared_memory_bytes - RESERVED_BYTES)
    return on_chip + int(target.l2_bytes * L2_SHARE)


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
