"""Constants that several programs hold in common: equal ones are one array, on the host and where a program runs.

They are kept by weak references: what the last program lets go of is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from fusec.ir import Array, Constant, Graph, Literal


class SharedWeights:
    """The constants of the programs of one model, by their contents."""

    def __init__(self) -> None:
        self._literals: weakref.WeakValueDictionary[tuple[str, str], Literal] = weakref.WeakValueDictionary()
        self._prepared: weakref.WeakValueDictionary[tuple[str, tuple[int, ...]], Array] = weakref.WeakValueDictionary()

    def share(self, graph: Graph) -> None:
        """Let the constants of a graph be those that are held already, where they are equal."""
        for node in graph.nodes:
            if isinstance(node.op, Constant):
                literal = node.op.literal
                held = self._literals.setdefault((literal.digest, literal.label), literal)
                if held is not literal:
                    graph.set_op(node, Constant(held))

    def prepared(self, literal: Literal, order: tuple[int, ...], make: Callable[[], Array]) -> Array:
        """The array a program reads for a literal in a memory order; `make` makes it if no program has it."""
        key = (literal.digest, order)
        array = self._prepared.get(key)
        if array is None:
            array = self._prepared[key] = make()
        return array
