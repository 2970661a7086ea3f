"""Share equal constants among programs: one array on the host, and one where programs run.

Weak references hold them, so a constant is freed with the last program that uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

from fusec.ir import Array, Constant, Graph, Literal, TensorType

Layout = tuple[tuple[int, ...], tuple[int, ...]]


def layout(type: TensorType) -> Layout:
    """Return what tells two arrays of one literal apart: the layout and the dims.

    The dims may be those of a part of the literal.
    """
    return (type.shape, type.order) if type.order else ((), ())


class SharedWeights:
    """Constants of the programs of one model, by content."""

    def __init__(self) -> None:
        self._literals: weakref.WeakValueDictionary[tuple[str, str], Literal] = weakref.WeakValueDictionary()
        self._by_key: weakref.WeakValueDictionary[tuple[Hashable, str], Literal] = weakref.WeakValueDictionary()
        self._prepared: weakref.WeakValueDictionary[tuple[Hashable, Layout], Array] = weakref.WeakValueDictionary()

    def share(self, graph: Graph) -> None:
        """Replace constants of a graph by equal ones that are stored already.

        A constant derived in the same way from the same one is recognised by its key, and not even read.
        """
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
        """Tell if some program has the array already, as far as the literal's key tells without reading it."""
        return (literal.key, lies) in self._prepared

    def prepared(self, literal: Literal, lies: Layout, make: Callable[[], Array]) -> Array:
        """Return the array a program reads for a literal in a layout; `make` makes it if no program has it."""
        array = self._prepared.get((literal.key, lies))
        if array is None:
            array = self._prepared.get((literal.digest, lies))
            if array is None:
                array = self._prepared[literal.digest, lies] = make()
            self._prepared[literal.key, lies] = array
        return array
