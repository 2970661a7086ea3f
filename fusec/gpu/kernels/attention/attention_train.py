"""Match attention in training over short sequences, whose heads fit into shared memory twice."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.attention.short_rows import MOST_KEYS, are_of_one_head, stored_view
from fusec.gpu.kernels.attention.train_source import AttentionTrainSource
from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.indexing import VIEW_OPS, source
from fusec.gpu.kernels.codegen.kernel import Kernel, with_variants
from fusec.ir import Node, Value
from fusec.ops import AttentionTrain

MOST_QUERIES = 256  # of a block, with 64 for each warpgroup
PARTS = (32, 80)  # keys that queries visit together: fewer leave fewer zeros after the last key, more wait less often


def attention_train(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of attention in training without mask and bias, of up to 256 queries; None for other steps.

    Its operands and its results may be views.
    """
    if not figures.has(wgmma.ARCHITECTURE):
        return None
    found = [match_attention_train(nodes, outputs, figures.processors, part) for part in PARTS]
    fit = [each for each in found if each is not None and each.shared_bytes <= figures.dynamic_bytes]
    return with_variants(each.kernel() for each in fit)


def match_attention_train(
    nodes: Sequence[Node], outputs: Sequence[Value], processors: int, part: int
) -> AttentionTrainSource | None:
    """Return the attention of a step; None if the kernel cannot run it.

    processors: multiprocessors of the GPU.
    part: keys that queries visit together.
    """
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, AttentionTrain)), None)
    if at is None or any(not isinstance(n.op, VIEW_OPS) for n in nodes if n is not nodes[at]):
        return None
    node = nodes[at]
    op = node.op
    assert isinstance(op, AttentionTrain)
    if len(node.operands) != 3 or op.causal or not node.results[0].type.size:
        return None
    read = [found for value in node.operands if (found := source(value, nodes[:at])) is not None]
    stored = [stored_view(node, nodes[at + 1 :], value) for value in outputs]
    if len(read) < 3 or None in stored:
        return None
    written = {place: (value, view) for place, value, view in filter(None, stored)}
    q, k, v = (view for _, view in read)
    rows = [q, k, v, *(view for place, (_, view) in written.items() if place == 0)]
    sums = [view for place, (_, view) in written.items() if place == 1]
    if not are_of_one_head(rows) or any(s < 0 for view in sums for s in view.strides):
        return None
    if q.shape[2] > MOST_QUERIES or not 0 < k.shape[2] <= MOST_KEYS or len(written) != len(outputs):
        return None
    return AttentionTrainSource(op, tuple(value for value, _ in read), (q, k, v), written, processors, part)
