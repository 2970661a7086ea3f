"""Constants that several programs hold in common: equal ones are one array, on the host and where a program runs.

They are kept by weak references: what the last program lets go of is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

from fusec.ir import Array, Constant, Graph, Literal, TensorType

Layout = tuple[tuple[int, ...], tuple[int, ...]]


def layout(type: TensorType) -> Layout:
    """What tells apart the ways that a literal lies in memory: a type's order, and the dims that this is one of, which
    may be pieces of the literal's."""
    return (type.shape, type.order) if type.order else ((), ())


class SharedWeights:
    """The constants of the programs of one model, by their contents."""

    def __init__(self) -> None:
        self._literals: weakref.WeakValueDictionary[tuple[str, str], Literal] = weakref.WeakValueDictionary()
        self._by_key: weakref.WeakValueDictionary[tuple[Hashable, str], Literal] = weakref.WeakValueDictionary()
        self._prepared: weakref.WeakValueDictionary[tuple[Hashable, Layout], Array] = weakref.WeakValueDictionary()

    def share(self, graph: Graph) -> None:
        """Let the constants of a graph be those that are held already, where they are equal; those made alike of the
        same ones are not even read."""
        for node in graph.nodes:
            if isinstance(node.op, Constant):
                literal = node.op.literal
                held = self._by_key.get((literal.key, literal.label))
                if held is None:
                    held = self._literals.setdefault((literal.digest, literal.label), literal)
                    self._by_key[literal.key, literal.label] = held
                if held is not literal:
                    graph.set_op(node, Constant(held))

    def is_prepared(self, literal: Literal, lies: Layout) -> bool:
        """Whether some program has the array already, as far as is known without reading the literal."""
        return (literal.key, lies) in self._prepared

    def prepared(self, literal: Literal, lies: Layout, make: Callable[[], Array]) -> Array:
        """The array a program reads for a literal in a memory layout; `make` makes it if no program has it."""
        array = self._prepared.get((literal.key, lies))
        if array is None:
            array = self._prepared.get((literal.digest, lies))
            if array is None:
                array = self._prepared[literal.digest, lies] = make()
            self._prepared[literal.key, lies] = array
        return array
