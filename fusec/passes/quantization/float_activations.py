"""Leave out the rounding of activations to integers, so that a quantised model computes in floats with rounded weights.

A caller asks for it with `ROUND_ACTIVATIONS` in `disable`, because results then differ by half a step of each
activation, and by what saturated. Limits from 0 stay, because tools leave out a relu or clip that they imply.

Where tensors are stored in 16 bits, integers of 16 bits are always left out: fp16 and bf16 hold neither them nor the
reciprocals of their scales, and round by more than half of their step, near the limits. All limits stay. Integers with
limits of fewer bits are rounded, because their step exceeds that of the floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.ir import BYTES, DType, Graph, Node, Value
from fusec.ops import Pad, pw
from fusec.passes.quantization.affine_values import Dequantised, dequantised, quantised
from fusec.passes.quantization.move_rounding import MOVES

FINE = 1 << 11  # steps up to a limit; fp16 has as many from a power of two to the next


def keep_floats(graph: Graph, types: Sequence[DType] = BYTES) -> None:
    """Replace dq(q(x)) by x, also where ops that move elements, or max_pool, are between q and dq."""
    for node in list(graph.nodes):
        found = dequantised(node.result, types) if node.op.name == "mul" else None
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
    rounded = quantised(q.node, (q.type.dtype,))
    if rounded is None or not (rounded.scale.equals(found.scale) and rounded.zero.equals(found.zero)):
        return None
    x, all_limits = rounded.x, q.type.dtype not in BYTES
    if all_limits and max(zero - rounded.low, rounded.high - zero) < FINE:
        return None
    limited = x.node is not None and x.node.op.name in ("relu", "clip")
    if not all_limits and (rounded.low != zero or limited):
        return x
    low, high = ((limit - zero) * scale for limit in (rounded.low, rounded.high))
    return graph.add(pw("clip", min=low, max=high), x, before=before)
