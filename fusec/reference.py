"""Evaluate a graph op by op with NumPy or CuPy. Its results define what every other execution must compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.ir import Array, DType, Graph, Node, Value, quote
from fusec.ops import Scan
from fusec.ops.pointwise import keeps_number


def evaluate_node(node: Node, operands: list[Array], xp: Any = np) -> tuple[Array, ...]:
    """Return the results of one node. Raises ExecutionError that names the node."""
    try:
        return node.op.reference(xp, *operands)
    except (ValueError, TypeError, IndexError, MemoryError) as error:
        raise ExecutionError(f"{node!r}: {error}") from error


def evaluate(
    graph: Graph, arrays: Mapping[str, Array], xp: Any = np, precision: DType | None = None
) -> dict[str, Array]:
    """Return the graph's outputs by name, from its inputs by name.

    Each result is rounded to its own dtype. With `precision`, such as DType.F64, all floating-point values have that
    dtype, and casts to floats do not round to another. Values are freed after their last use.
    """
    outputs, held = set(graph.outputs), dict[Value, Array]()
    for value in graph.inputs:
        if value.name not in arrays:
            raise ExecutionError(f"no array for graph input {quote(value.name)}")
        array = xp.asarray(arrays[value.name])
        if array.shape != value.type.shape:
            raise ExecutionError(f"graph input {value!r} was given an array of shape {list(array.shape)}")
        both_float = DType.of(array.dtype).is_float and value.type.dtype.is_float
        if array.dtype != value.type.dtype.numpy and not (precision and both_float):
            raise ExecutionError(f"graph input {value!r} was given an array of {array.dtype}")
        held[value] = _raised(array, precision)
    left = {value: len(value.uses) for value in graph.values()}
    for node in graph.nodes:
        operands = [held[v] for v in node.operands]
        if precision and keeps_number(node):
            results = (operands[0].astype(precision.numpy, copy=False),)
        elif precision and isinstance(node.op, Scan):
            results = node.op.evaluate(xp, operands, precision.numpy)
        else:
            results = evaluate_node(node, operands, xp)
        for value, array in zip(node.results, results, strict=True):
            if value.uses:
                held[value] = _raised(array, precision)
        for value in node.operands:
            left[value] -= 1
            if left[value] == 0 and value not in outputs:
                del held[value]
    return {name: held[v] for name, v in zip(graph.output_names, graph.outputs, strict=True)}


def _raised(array: Array, precision: DType | None) -> Array:
    if precision is None or not DType.of(array.dtype).is_float:
        return array
    return array.astype(precision.numpy, copy=False)
