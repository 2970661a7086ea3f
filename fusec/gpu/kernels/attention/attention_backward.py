"""Match the gradients of attention over short sequences, whose heads fit into shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.attention.backward_source import AttentionBackwardSource, AttentionGradients
from fusec.gpu.kernels.attention.short_rows import has_short_rows, stored_view
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.indexing import VIEW_OPS, source
from fusec.gpu.kernels.codegen.kernel import HALVES, Kernel, with_variants
from fusec.ir import DType, Node, Value
from fusec.ops import AttentionBackward

VARIANTS = ((1, 16), (2, 8))  # tiles of sixteen rows that a warp has together, and warps of a block, at most


def attention_backward(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of attention's gradients without a bias, whose heads fit into shared memory; else None.

    Its operands and its results may be views.
    """
    found = match_attention_backward(nodes, outputs)
    if found is None:
        return None
    sources = [AttentionBackwardSource(found, tiles, warps) for tiles, warps in VARIANTS]
    fit = [each for each in sources if each.shared_bytes <= figures.dynamic_bytes]
    return with_variants(each.kernel() for each in fit)


def match_attention_backward(nodes: Sequence[Node], outputs: Sequence[Value]) -> AttentionGradients | None:
    """Return the gradients that a step computes; None if the kernel cannot run it."""
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, AttentionBackward)), None)
    if at is None or any(not isinstance(n.op, VIEW_OPS) for n in nodes if n is not nodes[at]):
        return None
    node = nodes[at]
    op = node.op
    assert isinstance(op, AttentionBackward)
    if len(node.operands) != 6 or node.results[0].type.dtype not in HALVES or not node.results[0].type.size:
        return None
    read = [found for value in node.operands if (found := source(value, nodes[:at])) is not None]
    written = [stored_view(node, nodes[at + 1 :], value) for value in outputs]
    if len(read) < 6 or None in written:
        return None
    stored = tuple(each for each in written if each is not None)
    views = tuple(view for _, view in read)
    *rows, sums = views
    if not all(map(has_short_rows, (*rows, *(view for *_, view in stored)))) or sums.dtype is not DType.F32:
        return None
    same_heads = rows[1].shape[1] == rows[2].shape[1]
    if not same_heads or not rows[2].shape[2] or any(s < 0 for s in sums.strides):
        return None
    return AttentionGradients(op, tuple(value for value, _ in read), views, stored)
