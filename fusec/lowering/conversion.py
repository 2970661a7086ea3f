"""Lower the rounding of floats to 8-bit integers: cuDNN's output converts, because no mode of it rounds.

The conversion rounds half to even and saturates, and makes 0 of NaN: all plans of engines 1, 2, 4 and 7 do so (H200,
cuDNN 9.19, benchmarks/checks/quantized_rounding.py). It is therefore the op sequence cast(clip(round(x) + zero)) for
limits that are those of i8. Narrower limits become max and min before it, which commute with rounding, because they are
whole numbers. A zero point is added before the rounding: that differs by one step for ties where it is odd.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.errors import LoweringError
from fusec.ir import DType, Node, Value
from fusec.lowering.graph_builder import CudnnBuilder
from fusec.lowering.pointwise import CallWriter
from fusec.ops import Cast

LOW, HIGH = -128.0, 127.0


def conversion(node: Node, stored: Sequence[Value] | dict[Value, tuple[str, tuple[int, ...]]]) -> list[Node] | None:
    """Return the nodes from a round to the cast that stores 8-bit integers, if nothing else uses their results."""
    nodes = [node]
    while not isinstance(nodes[-1].op, Cast):
        value = nodes[-1].result
        uses = value.uses
        if len(uses) != 1 or value in stored or not uses[0][0].results:
            return None
        user = uses[0][0]
        constants = all(v is value or v.literal is not None for v in user.operands)
        if user.op.name not in ("add", "clip", "cast") or not constants or "clip" in [n.op.name for n in nodes[1:-1]]:
            return None
        zero_points = (v.literal for v in user.operands if v is not value)
        if user.op.name == "add" and not all(z is not None and z.has_whole_numbers for z in zero_points):
            return None  # the cast truncates such a sum, and cuDNN would round it
        nodes.append(user)
    names = [n.op.name for n in nodes]
    last = nodes[-1]
    if last.op != Cast(DType.I8) or last.result not in stored or names[-2] != "clip" or names.count("clip") != 1:
        return None
    limits = nodes[-2].op.attributes
    whole = all(limits[k] == round(limits[k]) for k in ("min", "max") if abs(limits[k]) < 1e9)
    inside = LOW <= limits["min"] <= limits["max"] <= HIGH
    return nodes if whole and inside else None


def round_to_bytes(b: CudnnBuilder, node: Node) -> None:
    """Lower a round that a conversion to 8-bit integers follows.

    Raises LoweringError for any other round.
    """
    nodes = conversion(node, b.stored)
    if nodes is None:
        raise LoweringError("round: cuDNN rounds only where it stores 8-bit integers")
    (x,) = node.operands
    b.uids[node.result] = b.operand(x, b.foldings[node])
    clip = nodes[-2]
    b.conversions.update({clip: nodes, nodes[-1]: nodes})


def limit_bytes(b: CudnnBuilder, node: Node) -> None:
    """Lower the limits of a conversion: those of i8 are the conversion's own."""
    low, high = node.op.attributes["min"], node.op.attributes["max"]
    steps = CallWriter(b, node)
    (x,) = steps.operands
    if low == 0.0:
        x = steps.step("relu", x)
    elif low > LOW:
        x = steps.step("max", x, steps.number(low))
    if high < HIGH:
        x = steps.step("min", x, steps.number(high))
    b.uids[node.result] = x


def convert_to_bytes(b: CudnnBuilder, node: Node) -> None:
    """Store 8-bit integers: the call before the conversion does, if nothing else reads its result."""
    nodes, folding = b.conversions[node], b.foldings[node]
    (x,) = nodes[0].operands
    (value,) = node.operands
    uid = b.operand(value, folding)
    own = len(x.uses) == 1 and x not in b.stored
    made = [call for call in b.calls if uid in call.outputs]
    if made and made[-1].op == "pointwise" and (own or b.uids.get(x) != uid):
        b.store(node.result, uid, folding)
    else:
        steps = CallWriter(b, node)
        steps.last("identity", *steps.operands)
