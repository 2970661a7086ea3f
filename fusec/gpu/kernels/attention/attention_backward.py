"""Match the gradients of attention over short sequences, whose heads fit into shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.attention.backward_source import AttentionBackwardSource, AttentionGradients
from fusec.gpu.kernels.attention.short_rows import MOST_KEYS, are_of_one_head, stored_view
from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.indexing import VIEW_OPS, source
from fusec.gpu.kernels.codegen.kernel import Kernel
from fusec.ir import DType, Node, Value
from fusec.ops import AttentionBackward


def attention_backward(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of attention's gradients without mask and bias, whose heads fit into shared memory; else None.

    Its operands and its results may be views.
    """
    found = match_attention_backward(nodes, outputs)
    if found is None or not figures.has(wgmma.ARCHITECTURE):
        return None
    sources = (AttentionBackwardSource(found, figures.processors, has_spare) for has_spare in (True, False))
    return next((each.kernel() for each in sources if each.shared_bytes <= figures.dynamic_bytes), None)


def match_attention_backward(nodes: Sequence[Node], outputs: Sequence[Value]) -> AttentionGradients | None:
    """Return the gradients that a step computes; None if the kernel cannot run it."""
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, AttentionBackward)), None)
    if at is None or any(not isinstance(n.op, VIEW_OPS) for n in nodes if n is not nodes[at]):
        return None
    node = nodes[at]
    op = node.op
    assert isinstance(op, AttentionBackward)
    if len(node.operands) != 6 or op.causal or not node.results[0].type.size:
        return None
    read = [found for value in node.operands if (found := source(value, nodes[:at])) is not None]
    written = [stored_view(node, nodes[at + 1 :], value) for value in outputs]
    if len(read) < 6 or None in written:
        return None
    stored = tuple(each for each in written if each is not None)
    views = tuple(view for _, view in read)
    *rows, sums = views
    if not are_of_one_head([*rows, *(view for *_, view in stored)]) or sums.dtype is not DType.F32:
        return None
    if not 0 < rows[2].shape[2] <= MOST_KEYS or any(stride < 0 for stride in sums.strides):
        return None
    return AttentionGradients(op, tuple(value for value, _ in read), views, stored)
