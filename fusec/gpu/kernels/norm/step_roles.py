"""Find the nodes of a step on which some of its values depend."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fusec.ir import Node, Value


def ancestors(nodes: Sequence[Node], values: Iterable[Value], known: Collection[Value] = ()) -> tuple[Node, ...]:
    """Return the nodes that the values depend on, in the order of the graph, without those before known values."""
    wanted, found = set(values) - set(known), list[Node]()
    for node in reversed(nodes):
        if wanted.intersection(node.results):
            found.insert(0, node)
            wanted |= set(node.operands) - set(known)
    return tuple(found)
