"""Share equal constants among programs: one array on the host, and one on the device.

References are weak, so a constant is freed with the last program that uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import cast

from fusec.ir import Array, Constant, Graph, Literal, TensorType, digest_all

Layout = tuple[tuple[int, ...], tuple[int, ...]]


def layout(type: TensorType) -> Layout:
    """Return the key of an array of a literal on the device: dims and memory order; both empty if row-major."""
    return (type.shape, type.order) if type.order else ((), ())


class SharedWeights:
    """Constants of the programs of one model: those of the model by content, those derived from them by their key.

    Programs share the constants of the model before they derive others. So equal ones have equal keys then, and are not
    loaded to compare them.
    """

    def __init__(self) -> None:
        self._literals: weakref.WeakValueDictionary[tuple[str, str], Literal] = weakref.WeakValueDictionary()
        self._by_key: weakref.WeakValueDictionary[tuple[Hashable, str], Literal] = weakref.WeakValueDictionary()
        self._compared: weakref.WeakValueDictionary[Hashable, Literal] = weakref.WeakValueDictionary()  # by content
        self._prepared: weakref.WeakValueDictionary[tuple[Hashable, Layout], Array] = weakref.WeakValueDictionary()

    def share(self, graph: Graph) -> None:
        """Replace the constants of a graph by equal ones of other programs.

        A constant that was derived in the same way from the same data is recognised by its key, without being loaded.
        """
        constants = [(node, node.op.literal) for node in graph.nodes if isinstance(node.op, Constant)]
        new = (literal for _, literal in constants if (literal.key, literal.label) not in self._by_key)
        digest_all(literal for literal in new if not self._is_derived(literal.key))
        for node, literal in constants:
            held = self._by_key.get((literal.key, literal.label))
            if held is None:
                held = literal
                if not self._is_derived(literal.key):
                    held = self._literals.setdefault((literal.digest, literal.label), literal)
                    self._compared[held.key] = held
                self._by_key[literal.key, literal.label] = held
            if held is not literal:
                graph.set_op(node, Constant(held))

    def _is_derived(self, key: Hashable) -> bool:
        """Tell if the key of a constant says how it was derived from constants that were compared by their content."""
        return isinstance(key, tuple) and all(map(self._is_known, cast("tuple[Hashable, ...]", key)))

    def _is_known(self, part: Hashable) -> bool:
        """Tell if a part of a key is equal in other programs, unlike the key of a constant that was not compared."""
        return part in self._compared or (
            self._is_derived(part) if isinstance(part, tuple) else type(part) is not object
        )

    def is_prepared(self, literal: Literal, order: Layout) -> bool:
        """Tell if a program has a literal in a layout on the device, by its key and without loading it."""
        return (literal.key, order) in self._prepared

    def prepared(self, literal: Literal, order: Layout, make: Callable[[], Array]) -> Array:
        """Return the array of a literal in a layout on the device; `make` makes it if no program has it."""
        array, by_key = self._prepared.get((literal.key, order)), self._is_derived(literal.key)
        if array is None and not by_key:
            array = self._prepared.get((literal.digest, order))
        if array is None:
            array = make()
            if not by_key:
                self._prepared[literal.digest, order] = array
        self._prepared[literal.key, order] = array
        return array
