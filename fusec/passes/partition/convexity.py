"""Decide which nodes may be merged: the condensation (one vertex per partition) must stay acyclic.

Vertices stay in topological order while partitions form, so each question is a search between two positions. networkx
would build the condensation anew for each merge: at 10,000 nodes, one condensation costs six times the time of all
7,500 merges here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fusec.ir import Constant, Graph, Node, Value

# A search that has seen this many vertices gives up and answers "not convex": always safe, and it keeps
# partitioning linear where there are thousands of nodes between the two ends of a long skip connection.
SEARCH_LIMIT = 4096


class Wiring:
    """Numbers and edges of the computing nodes of a graph (constants left out), in graph order."""

    def __init__(self, graph: Graph):
        self.nodes: list[Node] = [n for n in graph.nodes if not isinstance(n.op, Constant)]
        self.index: dict[Node, int] = {n: i for i, n in enumerate(self.nodes)}
        self.preds: list[tuple[int, ...]] = [self._numbers(v.node for v in n.operands) for n in self.nodes]
        self.succs: list[tuple[int, ...]] = [self._numbers(u for v in n.results for u, _ in v.uses) for n in self.nodes]
        returned = set(graph.outputs)
        self.returned: list[bool] = [any(v in returned for v in n.results) for n in self.nodes]

    def _numbers(self, nodes: Iterator[Node | None]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.index[n] for n in nodes if n in self.index))

    def producer(self, value: Value) -> int | None:
        """Return the number of the node that computes a value; None for inputs and constants."""
        return None if value.node is None else self.index.get(value.node)


class Condensation:
    """Partitions formed so far as merged vertices, other nodes as single vertices, in a topological order."""

    def __init__(self, wiring: Wiring):
        self.wiring = wiring
        self.place = list(range(len(wiring.nodes)))  # by vertex; a merged vertex is named by one of its nodes
        self.vertex = list(range(len(wiring.nodes)))  # by node
        self._merged: dict[int, tuple[int, ...]] = {}

    def members(self, vertex: int) -> tuple[int, ...]:
        return self._merged.get(vertex, (vertex,))

    def stays_convex(self, inside: Collection[int], node: int) -> bool:
        """Tell if unmerged nodes `inside`, convex so far, stay convex with `node`.

        They do if no path between them runs through a vertex outside.
        """
        if not inside:
            return True
        places = [self.place[i] for i in inside]
        at = self.place[node]
        return not (
            self._path_outside(node, inside, self.wiring.preds, min(places), at)
            or self._path_outside(node, inside, self.wiring.succs, at, max(places))
        )

    def _path_outside(
        self, start: int, inside: Collection[int], adjacent: Sequence[tuple[int, ...]], low: int, high: int
    ) -> bool:
        """Tell if a path leaves `start`, visits vertices placed between low and high, and ends inside."""
        place, vertex = self.place, self.vertex
        seen = {vertex[a] for a in adjacent[start] if a not in inside and low < place[vertex[a]] < high}
        stack = list(seen)
        while stack:
            if len(seen) > SEARCH_LIMIT:
                return True
            for member in self.members(stack.pop()):
                for a in adjacent[member]:
                    if a in inside:
                        return True
                    v = vertex[a]
                    if v not in seen and low < place[v] < high:
                        seen.add(v)
                        stack.append(v)
        return False

    def merge(self, nodes: Collection[int]) -> None:
        """Make one vertex of unmerged nodes that are convex, and repair the order around it.

        Vertices they depend on move before, vertices that depend on them move after (Pearce and Kelly's dynamic
        topological order).
        """
        if len(nodes) == 1:
            return
        inside = sorted(nodes, key=self.place.__getitem__)
        low, high = self.place[inside[0]], self.place[inside[-1]]
        before = self._reach(inside, self.wiring.preds, low, high)
        after = self._reach(inside, self.wiring.succs, low, high)
        assert not set(before) & set(after), "merging what is not convex"
        places = sorted(self.place[v] for v in (*before, *inside, *after))
        for v, place in zip((*before, *inside, *after), places, strict=True):
            self.place[v] = place
        first = inside[0]
        for i in inside:
            self.vertex[i] = first
        self._merged[first] = tuple(inside)

    def _reach(self, inside: Sequence[int], adjacent: Sequence[tuple[int, ...]], low: int, high: int) -> list[int]:
        """List vertices outside that are reached from `inside` between low and high, in order."""
        place, vertex = self.place, self.vertex
        own = set(inside)
        seen: set[int] = set()
        stack = list(inside)
        while stack:
            for member in self.members(stack.pop()):
                for a in adjacent[member]:
                    v = vertex[a]
                    if v not in own and v not in seen and low < place[v] < high:
                        seen.add(v)
                        stack.append(v)
        return sorted(seen, key=place.__getitem__)
