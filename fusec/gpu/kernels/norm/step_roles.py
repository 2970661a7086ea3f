"""Find the nodes of a step on which some of its values depend."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.ir import Node, Value


def ancestors(nodes: Sequence[Node], values: Sequence[Value]) -> tuple[Node, ...]:
    """Return the nodes that the values depend on, in the order of the graph."""
    wanted, found = set(values), list[Node]()
    for node in reversed(nodes):
        if wanted.intersection(node.results):
            found.insert(0, node)
            wanted |= set(node.operands)
    return tuple(found)
