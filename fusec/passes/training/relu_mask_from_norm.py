"""Take the gradient of a relu after a batch norm in the norm's own backward op, which can recompute the relu's mask.

The norm reads its operand anyway, and computes from it where the relu was positive. The relu's result is then not read
again. The gradient of a convolution before it needs no epilogue, and so it keeps its precompiled engines.
"""

from __future__ import annotations

from fusec.ir import HALVES, Graph, Node, Value
from fusec.ops import BatchNormBackward, BatchNormTrain, Pointwise
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import replace_node


class ReluMaskFromNorm(Pass):
    """Move relu's gradient into the norm's backward op."""

    name = "relu_mask_from_norm"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if node.op == BatchNormBackward():
                _masked(graph, node)


def _masked(graph: Graph, node: Node) -> None:
    loss, x, scale, mean, inverse = node.operands
    norm = mean.node
    if norm is None or not isinstance(norm.op, BatchNormTrain) or norm.results[1:] != (mean, inverse):
        return
    if norm.operands[:2] != (x, scale) or scale.type.dtype in HALVES:  # rounded statistics would give another mask
        return
    gradient = loss.node
    if gradient is None or not _is(gradient, "relu_backward") or loss.users != [node]:
        return
    dy, y = gradient.operands
    if dy.type.shape != x.type.shape or not _is_relu_of(y, norm.results[0]):
        return
    operands = [dy, *node.operands[1:], norm.operands[2]]
    made = graph.insert(BatchNormBackward(True), operands, before=node, origin=node.origin)
    replace_node(graph, node, made)
    graph.erase(gradient)


def _is(node: Node, name: str) -> bool:
    return isinstance(node.op, Pointwise) and node.op.name == name


def _is_relu_of(y: Value, x: Value) -> bool:
    return y is x or (y.node is not None and _is(y.node, "relu") and y.node.operands[0] is x)
