"""Find graphs whose verdict follows from verdicts on other graphs, because a compilation takes up to a second.

Graphs that differ in their sizes alone mostly have one verdict. Of pointwise ops alone, cuDNN compiles what it lists.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable

from fusec.gpu.cudnn.legality.proof_graphs import build_seconds, call_kinds, proof_graphs
from fusec.gpu.cudnn.plans.engine_ids import Identity
from fusec.lowering.cudnn_graph import CudnnGraph


class SimilarGraphs:
    """Set of graphs in which a similar graph can be looked up.

    Two graphs are similar if only dims differ, all by one factor, as with another batch size.
    """

    def __init__(self) -> None:
        self._groups: dict[Hashable, dict[str, CudnnGraph]] = {}  # by what similar graphs share, then by key

    def add(self, graph: CudnnGraph) -> None:
        self._groups.setdefault(graph.size_free_key, {})[graph.key] = graph

    def remove(self, graph: CudnnGraph) -> None:
        self._groups.get(graph.size_free_key, {}).pop(graph.key, None)

    def of(self, graph: CudnnGraph) -> CudnnGraph | None:
        """Return the similar graph with the fewest changed dims, and of these the nearest in size; None without one."""
        found: list[tuple[int, float, str]] = []
        known = self._groups.get(graph.size_free_key, {})
        for key, other in known.items():
            count, by = _changes(other, graph)
            if count:
                found.append((count, max(by, 1 / by), key))
        return known[min(found)[2]] if found else None


def factor(known: CudnnGraph, graph: CudnnGraph) -> float:
    """Return by how much the dims of a graph exceed those of a similar graph."""
    return _changes(known, graph)[1]


def _changes(known: CudnnGraph, graph: CudnnGraph) -> tuple[int, float]:
    """Count the changed dims, and return their common factor. The count is 0 if there is no common factor."""
    count, new, old = 0, 0, 1
    for before, after in zip(known.tensors, graph.tensors, strict=True):
        if before.dims != after.dims:
            for a, b in zip(before.dims, after.dims, strict=True):
                if a != b:
                    if count and b * old != a * new:
                        return 0, 1.0
                    count, new, old = count + 1, b, a
    return count, new / old if count else 1.0


class BuiltPlans:
    """Plans that were compiled, by what they show of other graphs.

    A plan that was compiled for a graph builds for that graph in other sizes. A graph of pointwise calls alone builds
    if its engine was compiled for each kind of its calls, in one graph or in several: of the pointwise graphs that
    cuDNN lists plans for, it fails to compile some types of elements only (int64, float64).
    """

    def __init__(self) -> None:
        self._sizes: dict[Hashable, set[Identity]] = {}  # by `CudnnGraph.size_free_key`
        self._calls: dict[int, set[Hashable]] = {}  # kinds of pointwise calls, by engine
        self._tried: set[Hashable] = set()  # kinds of calls that a proof has had, also if it did not build

    def add(self, graph: CudnnGraph, plans: Iterable[Identity]) -> None:
        """Add plans that were compiled for a graph."""
        kinds = call_kinds(graph)
        for engine, knobs in plans:
            self._sizes.setdefault(graph.size_free_key, set()).add((engine, knobs))
            if kinds:
                self._calls.setdefault(engine, set()).update(kinds)

    def of(self, graph: CudnnGraph) -> tuple[list[Identity], list[int]]:
        """Return the plans, and the engines, that build for a graph if cuDNN lists them."""
        kinds = call_kinds(graph)
        engines = [engine for engine, seen in self._calls.items() if kinds and kinds <= seen]
        return sorted(self._sizes.get(graph.size_free_key, ())), engines

    def proofs(self, graphs: Collection[CudnnGraph]) -> list[CudnnGraph]:
        """Make graphs to build before these, if that is expected to save time: see `proof_graphs`."""
        first = [graph for graph in self.rounds(graphs)[0] if call_kinds(graph) and not any(self.of(graph))]
        seen = set[Hashable]().union(*self._calls.values())
        made = proof_graphs(first, seen | self._tried)
        shown = seen.union(*map(call_kinds, made))
        saved = [graph for graph in first if call_kinds(graph) <= shown]
        if sum(map(build_seconds, made)) >= sum(map(build_seconds, saved)):
            return []
        self._tried.update(shown)
        return made

    def rounds(self, graphs: Iterable[CudnnGraph]) -> list[list[CudnnGraph]]:
        """Split graphs in two rounds: the plans built for the first one spare those of the second a compilation.

        A build of 60 tensors takes 40 times as long as that of one call. So the first round takes those graphs of
        pointwise calls that have the most new kinds of calls for their build time.
        """
        first: dict[str, CudnnGraph] = {}
        second: dict[str, CudnnGraph] = {}
        shapes, kinds_of = set[Hashable](), dict[str, set[Hashable]]()
        by_key = {graph.key: graph for graph in graphs}
        for graph in sorted(by_key.values(), key=lambda graph: -len(graph.calls)):
            kinds = call_kinds(graph)
            if kinds and not any(self.of(graph)):
                kinds_of[graph.key] = kinds
                continue
            known = graph.size_free_key in shapes or any(self.of(graph))
            (second if known else first)[graph.key] = graph
            shapes.add(graph.size_free_key)
        seen = set[Hashable]().union(*self._calls.values())
        while kinds_of:
            key = max(kinds_of, key=lambda key: len(kinds_of[key] - seen) / build_seconds(by_key[key]))
            if kinds_of[key] <= seen:  # then so are those of all others
                second.update((key, by_key[key]) for key in kinds_of)
                break
            first[key] = by_key[key]
            seen |= kinds_of.pop(key)
        return [list(some.values()) for some in (first, second) if some]
