"""Which of the graphs known so far is this one, in another size? What cuDNN said of that is believed of this one."""

from __future__ import annotations

from fractions import Fraction

from fusec.cudnn_graph import CudnnGraph


class Relatives:
    """Graphs, and for another one that of them which it is in another size, if any: the same but for dims that are all
    larger, or all smaller, by one factor, as those are that a batch size is part of."""

    def __init__(self) -> None:
        self._by_kin: dict[str, dict[str, CudnnGraph]] = {}

    def add(self, graph: CudnnGraph) -> None:
        """Know a graph from now on."""
        self._by_kin.setdefault(graph.kin, {})[graph.key] = graph

    def remove(self, graph: CudnnGraph) -> None:
        """Know it no more."""
        self._by_kin.get(graph.kin, {}).pop(graph.key, None)

    def of(self, graph: CudnnGraph) -> CudnnGraph | None:
        """The known graph with the fewest dims that are others, of these the one nearest in size; None if there is
        none."""
        found: list[tuple[int, Fraction, str]] = []
        known = self._by_kin.get(graph.kin, {})
        for key, other in known.items():
            changes = _changes(other, graph)
            if len(set(changes)) == 1:
                factor = changes[0]
                found.append((len(changes), max(factor, 1 / factor), key))
        return known[min(found)[2]] if found else None


def factor(known: CudnnGraph, graph: CudnnGraph) -> Fraction:
    """How many times as large a relative's dims are."""
    return _changes(known, graph)[0]


def _changes(known: CudnnGraph, graph: CudnnGraph) -> list[Fraction]:
    """Of each dim that is another, new size by old, both of graphs that have `kin` in common."""
    pairs = zip(known.tensors, graph.tensors, strict=True)
    dims = (pair for old, new in pairs for pair in zip(old.dims, new.dims, strict=True))
    return [Fraction(new, old) for old, new in dims if new != old]
