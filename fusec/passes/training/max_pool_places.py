"""Store where the maxima of a pool are, for its gradient, which then need not look for them in the pool's operand.

A place has one byte for each window. The operand is several times as large, and its memory is free after the pool.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fusec.ir import Graph, Node
from fusec.ops import MaxPool, MaxPoolBackward, MaxPoolTrain
from fusec.ops.training import MOST_PLACES
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import replace_node


class MaxPoolPlaces(Pass):
    """Replace max_pool and max_pool_backward of one operand by max_pool_train and a gradient at its places."""

    name = "max_pool_places"

    def run(self, graph: Graph, options: Options) -> None:
        position = {node: number for number, node in enumerate(graph.nodes)}
        for pool in position:
            if isinstance(pool.op, MaxPool) and math.prod(pool.op.window) <= MOST_PLACES:
                gradients = [user for user in pool.operands[0].users if _is_gradient(user, pool)]
                if gradients:
                    _store(graph, pool, gradients, min(pool, *gradients, key=position.__getitem__))


def _is_gradient(node: Node, pool: Node) -> bool:
    """Tell if a node is the gradient of this pool."""
    if not isinstance(node.op, MaxPoolBackward) or node.op.image or node.operands[1] is not pool.operands[0]:
        return False
    assert isinstance(pool.op, MaxPool)
    return node.op.geometry == pool.op.geometry


def _store(graph: Graph, pool: Node, gradients: list[Node], first: Node) -> None:
    """Replace a pool and its gradients. first: the first of these nodes."""
    assert isinstance(pool.op, MaxPool)
    (x,), old, geometry = pool.operands, pool.result, pool.op.geometry
    y, places = graph.insert(MaxPoolTrain(*geometry), [x], before=first, origin=pool.origin).results
    graph.set_type(y, old.type)
    graph.set_type(places, replace(places.type, order=old.type.order))
    graph.replace(old, y)
    graph.erase(pool)
    for node in gradients:
        backward = MaxPoolBackward(*geometry, image=x.type.shape[2:])
        made = graph.insert(backward, [node.operands[0], places], before=node, origin=node.origin)
        replace_node(graph, node, made)
