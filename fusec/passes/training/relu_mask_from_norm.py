"""Take the gradient of a relu after a batch norm in the norm's own backward op, which can recompute the relu's mask.

The norm reads its operand anyway, and from it sees where the relu was open. So the relu's result need not be read
again, and the gradient of a convolution before needs no epilogue and keeps its precompiled engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fusec.ir import HALVES, Graph, Node, Value
from fusec.ops import BatchNormBackward, BatchNormTrain, Pointwise
from fusec.passes.base import Options


@dataclass(frozen=True)
class ReluMaskFromNorm:
    """Move relu's gradient into the norm's backward op; the pass has no options."""

    name: ClassVar[str] = "mask_by_norm"

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
    for old, new in zip(node.results, made.results, strict=True):
        graph.set_type(new, old.type)
        graph.replace(old, new)
    graph.erase(node)
    graph.erase(gradient)


def _is(node: Node, name: str) -> bool:
    return isinstance(node.op, Pointwise) and node.op.name == name


def _is_relu_of(y: Value, x: Value) -> bool:
    return y is x or (y.node is not None and _is(y.node, "relu") and y.node.operands[0] is x)
