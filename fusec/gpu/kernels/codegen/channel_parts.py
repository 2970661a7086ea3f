"""What each node of a step is around an op over elements and per-channel (or per-column) numbers: before it, behind it,
or over what it has one number of for each channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fusec.ir import Node, Value


@dataclass(frozen=True)
class Part:
    """The nodes of a step: the anchor, whose first result and first operands (`elements`) have an element each and
    whose others are small; those before and behind it, `small` ones over its small results, and `sums` of what is
    behind it that are as small. Early outputs are made by those before, `kept` ones are small."""

    anchor: Node
    elements: tuple[Value, ...]
    before: tuple[Node, ...]
    behind: tuple[Node, ...]
    small: tuple[Node, ...]
    early: tuple[Value, ...]
    late: tuple[Value, ...]
    kept: tuple[Value, ...]
    sums: tuple[Node, ...] = ()
    unread: tuple[Value, ...] = ()  # operands of the anchor that are computed anew

    @property
    def x(self) -> Value:
        return self.elements[-1]

    @property
    def y(self) -> Value:
        return self.anchor.results[0]

    @property
    def parameters(self) -> tuple[Value, ...]:
        """One number for a channel each."""
        return tuple(v for v in self.anchor.operands[len(self.elements) :] if v not in self.unread)

    @cached_property
    def again(self) -> tuple[Node, ...]:
        """The nodes before that a second pass applies again: what the first one stored is read instead."""
        wanted = set(self.elements) - set(self.early)
        wanted |= {v for node in self.behind for v in node.operands if v not in self.early}
        found: list[Node] = []
        for node in reversed(self.before):
            if wanted.intersection(node.results):
                found.insert(0, node)
                wanted |= {v for v in node.operands if v not in self.early}
        return tuple(found)


def parted(
    nodes: Sequence[Node],
    outputs: Sequence[Value],
    anchor: Node,
    elements: int,
    is_sum: Callable[[Node], bool] = lambda node: False,
) -> Part | None:
    """What each node does in the step; None if one of them has no place in it. elements: so many operands of the anchor
    are no parameters. is_sum: whether a node adds up elements as the anchor does for its small results."""
    moved, parameters = anchor.operands[:elements], anchor.operands[elements:]
    x = moved[-1]
    made = {v for node in nodes for v in node.results}
    if x.type.size == 0 or any(v in made for v in parameters):
        return None
    before = _ancestors(nodes, moved)
    if anchor in before:
        return None
    statistics = set(anchor.results[1:])
    small: list[Node] = []
    behind: list[Node] = []
    sums: list[Node] = []
    for node in nodes:
        if node is anchor or node in before:
            continue
        if len(node.results) != 1:
            return None
        (result,) = node.results
        if is_sum(node):
            if node.operands[0] is not anchor.results[0] and node.operands[0].node not in behind:
                return None
            sums.append(node)
            statistics.add(result)
        elif result.type.shape == anchor.results[1].type.shape:
            small.append(node)
            statistics.add(result)
        elif result.type.shape == x.type.shape and not statistics.intersection(node.operands):
            behind.append(node)
        else:
            return None
    large = {v for node in (*before, *behind) for v in node.results} | {anchor.results[0], *moved}
    if any(large.intersection(node.operands) for node in small):
        return None
    early = [v for v in outputs if v.node in before]
    late = [v for v in outputs if v.node in behind or v is anchor.results[0]]
    if any(v.type.shape != x.type.shape for v in early):
        return None
    kept = [v for v in outputs if v in statistics]

    return Part(
        anchor, moved, tuple(before), tuple(behind), tuple(small), tuple(early), tuple(late), tuple(kept), tuple(sums)
    )


def _ancestors(nodes: Sequence[Node], values: Sequence[Value]) -> list[Node]:
    wanted, found = set(values), list[Node]()
    for node in reversed(nodes):
        if wanted.intersection(node.results):
            found.insert(0, node)
            wanted |= set(node.operands)
    return found
