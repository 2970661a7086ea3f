"""Test weights that programs share: equal ones are stored once for each layout that steps read."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Hashable
from functools import partial
from typing import Any

import numpy as np

from fusec.execution.shared_weights import SharedWeights, layout
from fusec.execution.step_binding import Constants
from fusec.ir import Constant, DType, Graph, Literal, TensorType
from fusec.lowering.packing import pack


def test_an_array_is_prepared_once_for_each_memory_order() -> None:
    weights, array = SharedWeights(), np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    same, other = Literal.of(array), Literal.of(array + 1)
    rows, columns = (layout(TensorType((2, 3, 4), DType.F32, order)) for order in ((), (0, 2, 1)))
    first = weights.prepared(Literal.of(array), rows, lambda: array.copy())
    turned = weights.prepared(same, columns, lambda: array.transpose(0, 2, 1).copy())
    assert turned is not first and turned.shape == (2, 4, 3)
    assert weights.prepared(same, rows, lambda: array.copy()) is first
    assert weights.prepared(same, columns, lambda: array.copy()) is turned
    assert weights.prepared(other, rows, lambda: array + 1) is not first
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None, "what no program holds is let go of"


def test_dims_in_pieces_are_another_array() -> None:
    """In rows they are the same one; in an order of their pieces they lie as these are ordered."""
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    constants, literal = Constants(SharedWeights(), partial(pack, np)), Literal.of(array)
    whole = constants(literal, TensorType((4, 6), DType.F32))
    assert constants(literal, TensorType((2, 2, 6), DType.F32)) is whole
    turned = constants(literal, TensorType((4, 2, 3), DType.F32, (1, 0, 2)))
    tiles = constants(literal, TensorType((2, 2, 6), DType.F32, (1, 0, 2)))
    np.testing.assert_array_equal(turned, array.reshape(4, 2, 3).transpose(1, 0, 2).reshape(-1))
    np.testing.assert_array_equal(tiles, array.reshape(2, 2, 6).transpose(1, 0, 2).reshape(-1))
    assert len(constants.arrays) == 3


def test_derived_constants_are_shared_by_key_without_being_loaded() -> None:
    """Those that are derived from something else than shared constants are compared by content."""
    loaded: list[str] = []

    def program(source: Literal, hidden: Literal) -> tuple[Graph, list[Literal]]:
        graph = Graph()

        def derived(name: str, key: Hashable, factor: float) -> Literal:
            def load() -> np.ndarray[Any, Any]:
                loaded.append(name)
                return source.array * np.float32(factor)

            return Literal(source.type, load, name, key)

        type = source.type
        literals = [
            source,
            derived("twice", ("twice", type, source.key), 2),
            derived("four times", ("twice", type, ("twice", type, source.key)), 4),
            derived("unknown", ("hidden", type, ("also", hidden.key)), 3),
        ]
        for literal in literals:
            graph.add(Constant(literal), name=literal.label)
        return graph, literals

    weights, array = SharedWeights(), np.arange(6, dtype=np.float32)
    held: list[list[Literal]] = []
    for _ in range(2):
        source = Literal.of(array, "w")
        first = Graph()
        node = first.add(Constant(source), name="w").node
        weights.share(first)
        assert node is not None
        assert isinstance(node.op, Constant)
        graph, literals = program(node.op.literal, Literal.of(array, "hidden"))
        weights.share(graph)
        held.append([n.op.literal for n in graph.nodes if isinstance(n.op, Constant)])
        held[-1] += [source, *literals]
    assert all(one is other for one, other in zip(held[0][:4], held[1][:4], strict=True))
    assert loaded == ["unknown", "unknown"]
    place = layout(TensorType((6,), DType.F32))
    twice = weights.prepared(held[0][1], place, lambda: 2 * array)
    assert weights.prepared(held[1][1], place, lambda: 2 * array) is twice
    assert loaded == ["unknown", "unknown"]
