"""Move dequantisation down past ops that commute with it, so that products read integers and ops move bytes.

The rules are exact, because they choose or order the same integers: a scale is one positive number, and it changes
neither which element is largest nor where an element goes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from fusec.ir import Array, Graph, Node, Op, Value
from fusec.ops import Pad, Transpose
from fusec.ops.shape import fills
from fusec.passes.quantization.affine_values import Dequantised, Factors, dequantise, dequantised
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import NoMatch, local


def one_scale(value: Value) -> Dequantised:
    """Return a dequantised value whose scale and zero point are one number each.

    Raises NoMatch if it is none.
    """
    found = dequantised(value)
    if found is None or found.scale.number is None or found.zero.number is None:
        raise NoMatch("not dequantised by one number", value)
    return found


@local(
    "expand",
    "max_pool",
    "reshape",
    "slice",
    "transpose",
    equation="f((q - z)*s) = (f(q) - z)*s for f that moves elements, and max_pool",
)
def dequantise_after(graph: Graph, node: Node) -> Value | None:
    """Move elements of 8 bits instead of floats."""
    found = dequantised(node.operands[0])
    if found is None:
        raise NoMatch("not dequantised", node.operands[0])
    return dequantise(graph, moved(graph, node, found), node)


def moved(graph: Graph, node: Node, found: Dequantised) -> Dequantised:
    """Move elements of 8 bits as a node moves their floats.

    Raises NoMatch if the node does not keep each element with its own scale.
    """
    scale, zero = found.scale, found.zero
    if scale.axis is not None or zero.axis is not None:
        if not isinstance(node.op, Transpose):
            raise NoMatch("several scales", node.operands[0])
        perm = node.op.perm
        scale, zero = (Factors(f.vector, None if f.axis is None else perm.index(f.axis)) for f in (scale, zero))
    literal = found.q.literal
    if literal is None:
        return Dequantised(graph.add(node.op, found.q, before=node), scale, zero)
    (type,) = node.op.infer(found.q.type)
    q = derive(graph, node, type, [literal], partial(_evaluated, op=node.op), literal)
    return Dequantised(q, scale, zero)


@recorded
def _evaluated(array: Array, op: Op) -> Array:
    return op.reference(np, array)[0]


@local("pad", equation="pad((q - z)*s, 0) = (pad(q, z) - z)*s")
def dequantise_after_pad(graph: Graph, node: Node) -> Value | None:
    found, op = one_scale(node.operands[0]), node.op
    assert isinstance(op, Pad) and found.zero.number is not None
    if op.mode == "constant" and op.value != 0:
        raise NoMatch("padded with another number than 0", node.operands[0])
    zero = found.zero.number if op.mode == "constant" else 0.0
    if not fills(found.q.type.dtype, zero):
        raise NoMatch(f"the zero point {zero} is no {found.q.type.dtype.value}", node.operands[0])
    padded = graph.add(replace(op, value=zero), found.q, before=node)
    return dequantise(graph, replace(found, q=padded), node)


@local("concat", equation="concat((q - z)*s, (p - z)*s) = (concat(q, p) - z)*s for equal scales and zero points")
def dequantise_after_concat(graph: Graph, node: Node) -> Value | None:
    found = [one_scale(v) for v in node.operands]
    first = found[0]
    for one in found:
        if one.q.type.dtype is not first.q.type.dtype:
            raise NoMatch("operands of different types", one.q)
        if not (one.scale.equals(first.scale) and one.zero.equals(first.zero)):
            raise NoMatch("operands with different scales or zero points", one.q)
    joined = graph.add(node.op, *(one.q for one in found), before=node)
    return dequantise(graph, replace(first, q=joined), node)


RULES = (dequantise_after, dequantise_after_pad, dequantise_after_concat)
