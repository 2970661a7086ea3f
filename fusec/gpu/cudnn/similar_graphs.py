"""Find graphs that differ in their sizes alone, because cuDNN's answer for one holds for the others."""

from __future__ import annotations

from collections.abc import Hashable

from fusec.lowering.cudnn_graph import CudnnGraph


class SimilarGraphs:
    """Set of graphs in which a similar graph can be looked up.

    Two graphs are similar if some dims differ by one common factor, as with another batch size, and nothing else does.
    """

    def __init__(self) -> None:
        self._by_kin: dict[Hashable, dict[str, CudnnGraph]] = {}

    def add(self, graph: CudnnGraph) -> None:
        self._by_kin.setdefault(graph.kin, {})[graph.key] = graph

    def remove(self, graph: CudnnGraph) -> None:
        self._by_kin.get(graph.kin, {}).pop(graph.key, None)

    def of(self, graph: CudnnGraph) -> CudnnGraph | None:
        """Return the similar graph with the fewest changed dims, of these the nearest in size; None without one."""
        found: list[tuple[int, float, str]] = []
        known = self._by_kin.get(graph.kin, {})
        for key, other in known.items():
            count, by = _changes(other, graph)
            if count:
                found.append((count, max(by, 1 / by), key))
        return known[min(found)[2]] if found else None


def factor(known: CudnnGraph, graph: CudnnGraph) -> float:
    """Return by how much the dims of a graph exceed those of a similar graph."""
    return _changes(known, graph)[1]


def _changes(known: CudnnGraph, graph: CudnnGraph) -> tuple[int, float]:
    """Count the changed dims and return their common factor; no dims if factors differ. The graphs have one `kin`."""
    count, new, old = 0, 0, 1
    for before, after in zip(known.tensors, graph.tensors, strict=True):
        if before.dims != after.dims:
            for a, b in zip(before.dims, after.dims, strict=True):
                if a != b:
                    if count and b * old != a * new:
                        return 0, 1.0
                    count, new, old = count + 1, b, a
    return count, new / old if count else 1.0
