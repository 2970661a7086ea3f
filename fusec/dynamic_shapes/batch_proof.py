"""Prove that rows of several callers may run as one batch: in any order, next to any other rows.

Padding needs less, because a padded row keeps its index. In a batch, no row may depend on its index either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from fusec.errors import ModelError
from fusec.frontends.padding_proof import crops, rows_of
from fusec.frontends.padding_rules import RowPlace
from fusec.ir import Constant, Graph, Node, Value, print_node, quote
from fusec.ops import Cast, Pointwise, Scan

# Ops that join operands dim by dim, counted from the right. All others take one operand with rows, and parameters.
_ALIGNED = ("matmul", "concat", "attention", "rotary", "linear_scan")


def require_batches(graphs: Sequence[Graph]) -> None:
    """Check that dim 0 of all inputs and outputs is a batch whose rows do not depend on each other or on their index.

    graphs: one model for several sizes of the batch, in ascending order. They must compute the same for a row.

    Raises ModelError if that is not proved. The message tells the input, output or node.
    """
    for graph in graphs:
        size = _size(graph)
        if size > 1:
            _require_equal_rows(graph, rows_of(graph, _axes(graph), size), size)
    for small, large in pairwise(graphs):
        crops(small, large, _axes(small), _size(small), _size(large))


def _axes(graph: Graph) -> Mapping[str, Sequence[int]]:
    return {value.name: (0,) for value in graph.inputs}


def _size(graph: Graph) -> int:
    """Return the size of the batch. Raises ModelError if an input or output has another one, or none."""
    size = 0
    for kind, values in (("input", graph.inputs), ("output", graph.outputs)):
        for value in values:
            first = value.type.shape[0] if value.type.rank else 0
            size = size or first
            if not first or first != size:
                raise ModelError(f"{kind} {quote(value.name)} {value.type} has no batch of {size} as dim 0")
    if not size:
        raise ModelError("the model has no inputs")
    return size


def _require_equal_rows(graph: Graph, rows: Mapping[Value, RowPlace], size: int) -> None:
    _require_equal_nodes(graph, rows, size)
    for name, value in zip(graph.output_names, graph.outputs, strict=True):
        if rows.get(value) != RowPlace(0) or value.type.shape[0] != size:
            raise ModelError(f"output {quote(name)} does not have the batch as dim 0")


def _require_equal_nodes(graph: Graph, rows: Mapping[Value, RowPlace], size: int) -> None:
    for node in graph.nodes:
        place = next((rows[v] for v in node.results if v in rows), None)
        if isinstance(node.op, Scan):
            _require_equal_states(node, node.op, rows, size)
            _require_equal_nodes(node.op.body.graph, rows, size)
        elif place is not None:
            _require_equal_operands(node, rows, place, size)


def _require_equal_states(node: Node, op: Scan, rows: Mapping[Value, RowPlace], size: int) -> None:
    """Check the first states of a loop in which only later states have rows: they must be equal for all rows."""
    for value, state in zip(node.operands[: op.states], op.body.graph.inputs, strict=False):
        place = rows.get(state)
        if place is not None and value not in rows and not _repeats(value, place.axis, place.outer, size):
            raise ModelError(f"rows meet different numbers of operand {quote(value.name)} in {print_node(node)}")


def _require_equal_operands(node: Node, rows: Mapping[Value, RowPlace], place: RowPlace, size: int) -> None:
    """Check the operands that the rows of a node share: they must be equal for all rows."""
    if node.op.name == "gen_index" and node.op.attributes["axis"] % node.results[0].type.rank == place.axis:
        raise ModelError(f"a result depends on the number of its row in {print_node(node)}")
    if not isinstance(node.op, Pointwise | Cast) and node.op.name not in _ALIGNED:
        return
    from_right = place.axis - node.results[0].type.rank
    if node.op.name == "matmul" and from_right >= -2:  # rows are those of a matrix, so the other operand is summed over
        return
    for value in node.operands:
        axis = value.type.rank + from_right
        if value in rows or axis < 0 or value.type.shape[axis] == 1 or _repeats(value, axis, place.outer, size):
            continue
        raise ModelError(f"rows meet different numbers of operand {quote(value.name)} in {print_node(node)}")


def _repeats(value: Value, axis: int, outer: int, size: int) -> bool:
    """Tell if a value is the same for all rows along an axis."""
    node = value.node
    if node is None:
        return False
    if isinstance(node.op, Constant):
        array = node.op.attributes["literal"].array
        if not array.size:
            return True
        rows = array.reshape(*array.shape[:axis], outer, size, -1)
        first = rows.take([0], axis=axis + 1)
        return bool(np.all((rows == first) | ((rows != rows) & (first != first))))
    if node.op.name == "expand" and outer == 1:
        operand = node.operands[0]
        before = operand.type.rank - value.type.rank + axis
        return before < 0 or operand.type.shape[before] == 1
    return False
