"""Scale the channels of a convolution, transposed convolution or matmul through its constant weight.

Weights are never changed in place, so a shared weight keeps its other uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from fusec.ir import Graph, Node, Value
from fusec.ops import FORWARD_CONVOLUTIONS, IMAGE_CONVOLUTIONS, Conv, ConvTranspose, FlippedConv, MatMul
from fusec.passes.rewriting.derived_constants import along, derive, overflows, product

Vector = np.ndarray[Any, Any]


def scale_outputs(graph: Graph, node: Node, factor: Vector, axis: int, before: Node) -> Value | None:
    """Multiply the node's result by `factor` along `axis` through its constant weight; None if no weight takes it."""
    place = weight_place(node, axis)
    if place is None:
        return None
    op, weight = node.op, node.operands[place]
    if isinstance(op, FORWARD_CONVOLUTIONS):
        shaped = along(factor, weight.type.rank, 0)
    elif isinstance(op, ConvTranspose):
        shaped = _transposed_filters(op, weight, factor)
    else:
        shaped = along(factor, weight.type.rank, weight.type.rank - (1 if place == 1 else 2))
    scaled = _scaled(graph, weight, shaped, before)
    if scaled is None:
        return None
    return _copy_of(graph, node, [scaled if i == place else v for i, v in enumerate(node.operands)], before)


def scale_inputs(graph: Graph, node: Node, x: Value, factor: Vector, before: Node) -> Value | None:
    """Rewrite the node on x * factor (per input channel; a matmul's last dim) as the node on `x`.

    Returns None if its weight does not take the factor.
    """
    op, weight = node.op, node.operands[1]
    rank = weight.type.rank
    if isinstance(op, Conv | FlippedConv):
        filters = factor.reshape(op.groups, 1, -1)
        shape = (op.groups, weight.type.shape[0] // op.groups, weight.type.shape[1])
        shaped = np.broadcast_to(filters, shape).reshape(*weight.type.shape[:2], *[1] * (rank - 2))
    elif isinstance(op, ConvTranspose):
        shaped = along(factor, rank, 0)
    else:
        shaped = along(factor, rank, rank - 2)
    scaled = _scaled(graph, weight, shaped, before)
    if scaled is None:
        return None
    return _copy_of(graph, node, [x, scaled], before)


def _copy_of(graph: Graph, node: Node, operands: Sequence[Value], before: Node) -> Value:
    result = node.result
    return graph.insert(
        node.op, operands, before=before, types=[result.type], names=[result.name], origin=node.origin
    ).result


def weight_place(node: Node, axis: int) -> int | None:
    """Return the index of the constant operand that varies with dim `axis` of the result; None if none does.

    Weights in 8 bits take no factor, because they would be rounded again.
    """
    op, rank = node.op, node.result.type.rank
    if isinstance(op, IMAGE_CONVOLUTIONS):
        return 1 if axis == 1 and node.operands[1].literal is not None else None
    assert isinstance(op, MatMul)
    place = {rank - 1: 1, rank - 2: 0}.get(axis)
    if place is None or node.operands[place].literal is None or not node.operands[place].type.dtype.is_float:
        return None
    return place


def _transposed_filters(op: ConvTranspose, weight: Value, factor: Vector) -> Vector:
    """Shape the factor of output channels for a weight [C, K/groups, window…]."""
    channels, per_group = weight.type.shape[:2]
    shape = (op.groups, channels // op.groups, per_group)
    spread = np.broadcast_to(factor.reshape(op.groups, 1, per_group), shape)
    return spread.reshape(channels, per_group, *[1] * (weight.type.rank - 2))


def _scaled(graph: Graph, weight: Value, factor: Vector, before: Node) -> Value | None:
    """Multiply the constant weight by the factor; None if one of its numbers would overflow."""
    assert weight.literal is not None
    scaling = partial(product, factor=factor)
    if overflows(weight.type, [weight.literal], scaling):
        return None
    return derive(graph, before, weight.type, [weight.literal], scaling, weight.literal)
