"""Find the dims that a value numbers, so that random indices can be drawn in range."""

from __future__ import annotations

from fusec.ir import Value
from fusec.ops import Gather, Scan


def indexed_sizes(value: Value) -> list[int]:
    """Return the sizes of the dims whose rows a value numbers, also in bodies of loops that read it."""
    found: list[int] = []
    for node, place in value.uses:
        if isinstance(node.op, Gather) and place == 1:
            found.append(node.operands[0].type.shape[node.op.axis])
        elif isinstance(node.op, Scan):
            found += indexed_sizes(node.op.body.graph.inputs[place])
    return found
