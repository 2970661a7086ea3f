"""Leave out the rounding of activations to 8 bits, so that a quantised model computes in floats with rounded weights.

A caller asks for it with `ROUND_ACTIVATIONS` in `disable`, because results then differ by half a step of each
activation, and by what saturated. Limits from 0 stay, because tools leave out a relu or clip that they imply.
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir import Graph, Node, Value
from fusec.ops import Pad, pw
from fusec.passes.quantization.affine_values import Dequantised, dequantised, quantised
from fusec.passes.quantization.move_rounding import MOVES


def keep_floats(graph: Graph) -> None:
    """Replace dq(q(x)) by x, also where ops that move elements, or max_pool, are between q and dq."""
    for node in list(graph.nodes):
        found = dequantised(node.result) if node.op.name == "mul" else None
        value = None if found is None else _unrounded(graph, found, found.q, node)
        if value is not None:
            graph.replace(node.result, value)


def _unrounded(graph: Graph, found: Dequantised, q: Value, before: Node) -> Value | None:
    """Return the floats of which `q` are the integers; None if they are not rounded here, or by another scale."""
    scale, zero = found.scale.number, found.zero.number
    if q.node is None or scale is None or zero is None:
        return None
    if isinstance(q.node.op, MOVES):
        op = q.node.op
        parts = [_unrounded(graph, found, operand, before) for operand in q.node.operands]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        if isinstance(op, Pad):
            op = replace(op, value=(op.value - zero) * scale)
        return graph.add(op, *known, before=before)
    rounded = quantised(q.node)
    if rounded is None or not (rounded.scale.equals(found.scale) and rounded.zero.equals(found.zero)):
        return None
    x = rounded.x
    if rounded.low != zero or (x.node is not None and x.node.op.name in ("relu", "clip")):
        return x
    return graph.add(pw("clip", min=0.0, max=(rounded.high - zero) * scale), x, before=before)
