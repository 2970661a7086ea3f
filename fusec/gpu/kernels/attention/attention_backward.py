"""Match the gradients of attention over short sequences, whose heads fit into shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.attention.backward_source import AttentionBackwardSource, AttentionGradients
from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.indexing import VIEW_OPS, View, source, view_of_operand
from fusec.gpu.kernels.codegen.kernel import Kernel
from fusec.ir import DType, Node, Value
from fusec.ops import AttentionBackward

OCTET = 8  # neighbours of a row that one copy moves
MOST_FEATURES = 64  # more sums than these do not fit into the registers of a thread
MOST_KEYS = 256  # gradients of scores with more of them do not fit into the registers of a thread


def attention_backward(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of attention's gradients without mask and bias, whose heads fit into shared memory; else None.

    Its operands and its results may be views.
    """
    found = match_attention_backward(nodes, outputs)
    if found is None or not figures.has(wgmma.ARCHITECTURE):
        return None
    kernel = AttentionBackwardSource(found, figures.processors)
    return kernel.kernel() if kernel.shared_bytes <= figures.dynamic_bytes else None


def match_attention_backward(nodes: Sequence[Node], outputs: Sequence[Value]) -> AttentionGradients | None:
    """Return the gradients that a step computes; None if the kernel cannot run it.

    In bf16, scores may be beyond fp32 before they are scaled.
    """
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, AttentionBackward)), None)
    if at is None or any(not isinstance(n.op, VIEW_OPS) for n in nodes if n is not nodes[at]):
        return None
    node = nodes[at]
    op = node.op
    assert isinstance(op, AttentionBackward)
    if len(node.operands) != 6 or op.causal or not node.results[0].type.size:
        return None
    read = [found for value in node.operands if (found := source(value, nodes[:at])) is not None]
    written = [_stored(node, nodes[at + 1 :], value) for value in outputs]
    if len(read) < 6 or None in written:
        return None
    stored = tuple(each for each in written if each is not None)
    views = tuple(view for _, view in read)
    *rows, sums = views
    if not all(map(_has_short_rows, (*rows, *(view for *_, view in stored)))) or sums.dtype is not DType.F32:
        return None
    if len({view.shape[1] for view in rows}) != 1 or len({view.shape[3] for view in rows}) != 1:
        return None
    if not 0 < rows[2].shape[2] <= MOST_KEYS or any(stride < 0 for stride in sums.strides):
        return None
    return AttentionGradients(op, tuple(value for value, _ in read), views, stored)


def _stored(node: Node, epilogue: Sequence[Node], output: Value) -> tuple[int, Value, View] | None:
    """Return the result of a node that an output views: its place, the output, and the view of the result.

    epilogue: the views after the node. Returns None if elements have to move.
    """
    value, view = output, View.of(output.type)
    for last in reversed(epilogue):
        if value is last.results[0]:
            found = view_of_operand(last, view)
            if found is None:
                return None
            value, view = last.operands[0], found
    return (value.index, output, view) if value.node is node else None


def _has_short_rows(view: View) -> bool:
    """Tell if rows are few pairs of octets of contiguous fp16, and offsets fit into 32 bits without a sign."""
    if view.dtype is not DType.F16 or view.strides[3] != 1 or any(stride < 0 for stride in view.strides):
        return False
    reach = view.start + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    aligned = not any(s % OCTET for s in (*view.strides[:3], view.start))
    return aligned and view.shape[3] % (2 * OCTET) == 0 and view.shape[3] <= MOST_FEATURES and reach < 1 << 31
