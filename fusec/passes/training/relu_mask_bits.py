"""Store where a relu is positive in 2 bits, for the norm's backward that masks its gradient by that.

The relu's result has 16 bits and is far from the cache by then. The norm before the relu writes the mask in passing.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from fusec.ir import HALVES, DType, Graph, Node, Value
from fusec.ops import BatchNormBackward, BatchNormTrain, Cast, Pointwise, pw
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import replace_node

WORD = 16  # masks of 32 bits, which is the least that kernels copy asynchronously


class ReluMaskBits(Pass):
    """Replace relu_backward by a choice between the gradient and zero, by a mask of 2 bits."""

    name = "relu_mask_bits"

    def run(self, graph: Graph, options: Options) -> None:
        nodes = list(graph.nodes)
        after = dict(pairwise(nodes))
        masks: dict[Value, tuple[Value, Value]] = {}
        for node in nodes:
            if _is(node, "relu_backward") and _gains(node):
                y = node.operands[1]
                assert y.node is not None
                if y not in masks:
                    masks[y] = _mask(graph, y, after[y.node])
                _choose(graph, node, *masks[y])


def _is(node: Node | None, name: str) -> bool:
    return node is not None and isinstance(node.op, Pointwise) and node.op.name == name


def _gains(node: Node) -> bool:
    """Return True if kernels of norms write the mask and read it: the relu is that of a norm and a residual."""
    dy, y = node.operands
    relu = y.node
    if relu is None or not _is(relu, "relu") or y.type.dtype not in HALVES or dy.type != y.type:
        return False
    residual = relu.operands[0].node
    if y.type.rank < 3 or y.type.shape[1] % WORD or residual is None or not _is(residual, "add"):
        return False
    follows = any(v.node is not None and isinstance(v.node.op, BatchNormTrain) for v in residual.operands)
    return follows and any(isinstance(user.op, BatchNormBackward) for user in node.result.users)


def _mask(graph: Graph, y: Value, before: Node) -> tuple[Value, Value]:
    """Insert the mask of a relu's result; return it with a zero of that type."""
    assert y.node is not None
    zero = graph.constant(np.zeros((), y.type.dtype.numpy), before=before)
    positive = graph.insert(pw("cmp_gt"), [y, zero], before=before, origin=y.node.origin).result
    return graph.insert(Cast(DType.U2), [positive], before=before, origin=y.node.origin).result, zero


def _choose(graph: Graph, node: Node, mask: Value, zero: Value) -> None:
    """Take the gradient where the mask is 1."""
    chosen = graph.insert(Cast(DType.BOOL), [mask], before=node, origin=node.origin).result
    made = graph.insert(pw("where"), [chosen, node.operands[0], zero], before=node, origin=node.origin)
    replace_node(graph, node, made)
