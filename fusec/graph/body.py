"""Define the attribute of an op that holds a graph: the body of a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusec.ir import Graph


class Body:
    """The graph of one step of a loop. Bodies are equal if they have the same text.

    The graph must not change any more. Its constants are as small as those whose numbers text shows.
    """

    __slots__ = ("graph", "text")

    def __init__(self, graph: Graph):
        self.graph = graph
        self.text = " ".join(line.strip() for line in str(graph).split("\n"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Body) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text
