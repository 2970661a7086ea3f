"""Which of the graphs known so far is this one, in another size? What cuDNN said of that is believed of this one."""

from __future__ import annotations

from collections.abc import Hashable

from fusec.lowering.cudnn_graph import CudnnGraph


class SimilarGraphs:
    """Graphs, and for another one that of them which it is in another size, if any: the same but for dims that are all
    larger, or all smaller, by one factor, as those are that a batch size is part of."""

    def __init__(self) -> None:
        self._by_kin: dict[Hashable, dict[str, CudnnGraph]] = {}

    def add(self, graph: CudnnGraph) -> None:
        """Know a graph from now on."""
        self._by_kin.setdefault(graph.kin, {})[graph.key] = graph

    def remove(self, graph: CudnnGraph) -> None:
        """Know it no more."""
        self._by_kin.get(graph.kin, {}).pop(graph.key, None)

    def of(self, graph: CudnnGraph) -> CudnnGraph | None:
        """The known graph with the fewest dims that are others, of these the one nearest in size; None if there is
        none."""
        found: list[tuple[int, float, str]] = []
        known = self._by_kin.get(graph.kin, {})
        for key, other in known.items():
            count, by = _changes(other, graph)
            if count:
                found.append((count, max(by, 1 / by), key))
        return known[min(found)[2]] if found else None


def factor(known: CudnnGraph, graph: CudnnGraph) -> float:
    """How many times as large a relative's dims are."""
    return _changes(known, graph)[1]


def _changes(known: CudnnGraph, graph: CudnnGraph) -> tuple[int, float]:
    """How many dims are others, and by which factor; none if by several. Of graphs that have `kin` in common."""
    count, new, old = 0, 0, 1
    for before, after in zip(known.tensors, graph.tensors, strict=True):
        if before.dims != after.dims:
            for a, b in zip(before.dims, after.dims, strict=True):
                if a != b:
                    if count and b * old != a * new:
                        return 0, 1.0
                    count, new, old = count + 1, b, a
    return count, new / old if count else 1.0
