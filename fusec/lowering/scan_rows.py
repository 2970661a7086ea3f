"""Find the dim along which the states of a scan are independent, so that blocks can share the rows.

The rows of a batch are the usual case. Values that no state reaches are read as a whole, whatever their dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from fusec.ir import Node, Value
from fusec.ops import (
    Cast,
    Concat,
    Expand,
    Gather,
    MatMul,
    Pad,
    Pointwise,
    Reduce,
    Relayout,
    Reshape,
    Scan,
    Slice,
    Split,
    Transpose,
)

RowDims = dict[Value, int]  # the dim that numbers the rows of a value; a block reads other values as a whole


class _MixesError(Exception):
    """A result depends on several rows."""


def row_dims(op: Scan) -> RowDims:
    """Return for values of the body the dim that numbers independent rows; empty if there is none."""
    inputs = op.body.graph.inputs
    states, sequences = inputs[: op.states], inputs[op.states : op.states + op.sequences]
    for dim in (0, 1):
        sizes = {v.type.shape[dim] for v in states if v.type.rank > dim}
        if len(sizes) != 1 or sizes <= {0, 1}:
            continue
        rank, count = max(v.type.rank for v in states), sizes.pop()
        same = [v for v in sequences if v.type.rank == rank and v.type.shape[dim] == count]
        for along in (same, ()):
            first = dict.fromkeys((*(v for v in states if v.type.rank > dim), *along), dim)
            found = _followed(op, first)
            if found is not None:
                return found
    return {}


def _followed(op: Scan, first: Mapping[Value, int]) -> RowDims | None:
    """Follow rows from the inputs of the body to its outputs; None if they meet other rows."""
    graph, rows = op.body.graph, dict(first)
    for node in graph.nodes:
        if not any(v in rows for v in node.operands):
            continue
        rule = next((rule for kinds, rule in _RULES if isinstance(node.op, kinds)), None)
        if rule is None:
            return None
        try:
            dims = {rule(node, index, rows[v]) for index, v in enumerate(node.operands) if v in rows}
        except _MixesError:
            return None
        if len(dims) != 1:
            return None
        rows.update(dict.fromkeys(node.results, dims.pop()))
    before = graph.inputs[: op.states]
    same = all(rows.get(a) == rows.get(b) for a, b in zip(before, graph.outputs, strict=False))
    return rows if same else None


def _pointwise(node: Node, index: int, dim: int) -> int:
    moved = dim + node.result.type.rank - node.operands[index].type.rank
    _require(node.result.type.shape[moved] == node.operands[index].type.shape[dim])
    return moved


def _reduce(node: Node, index: int, dim: int) -> int:
    op = cast(Reduce, node.op)
    _require(dim not in op.axes)
    return dim if op.keepdims else dim - sum(axis < dim for axis in op.axes)


def _reshape(node: Node, index: int, dim: int) -> int:
    old, new = node.operands[0].type.shape, node.result.type.shape
    before = math.prod(old[:dim])
    places = [d for d, size in enumerate(new) if size == old[dim] and math.prod(new[:d]) == before]
    _require(bool(places))
    return places[0]


def _transpose(node: Node, index: int, dim: int) -> int:
    return cast(Transpose, node.op).perm.index(dim)


def _along_axis(node: Node, index: int, dim: int) -> int:
    axis = int(cast(Any, node.op).axis)
    _require(dim != axis % node.operands[index].type.rank)
    return dim


def _slice(node: Node, index: int, dim: int) -> int:
    op = cast(Slice, node.op)
    whole = op.starts[dim] == 0 and op.steps[dim] == 1 and op.sizes[dim] == node.operands[0].type.shape[dim]
    _require(whole)
    return dim


def _pad(node: Node, index: int, dim: int) -> int:
    pads, rank = cast(Pad, node.op).pads, node.result.type.rank
    _require(pads[dim] == pads[rank + dim] == 0)
    return dim


def _gather(node: Node, index: int, dim: int) -> int:
    x, indices = (v.type.rank for v in node.operands)
    axis = cast(Gather, node.op).axis % x
    if index == 1:
        return axis + dim
    _require(dim != axis)
    return dim if dim < axis else dim + indices - 1


def _matmul(node: Node, index: int, dim: int) -> int:
    rank = node.operands[index].type.rank
    _require(dim != (rank - 1 if index == 0 else rank - 2))  # the depth
    return dim + node.result.type.rank - rank


def _require(holds: bool) -> None:
    if not holds:
        raise _MixesError


Rule = Callable[[Node, int, int], int]  # the dim of the result, from a node, the number of an operand and its dim
_RULES: tuple[tuple[tuple[type[Any], ...], Rule], ...] = (
    ((Pointwise, Cast, Expand), _pointwise),
    ((Relayout,), lambda node, index, dim: dim),
    ((Reduce,), _reduce),
    ((Reshape,), _reshape),
    ((Transpose,), _transpose),
    ((Concat, Split), _along_axis),
    ((Slice,), _slice),
    ((Pad,), _pad),
    ((Gather,), _gather),
    ((MatMul,), _matmul),
)
