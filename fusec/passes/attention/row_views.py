"""Follow rows through transposes and reshapes, and slice them before such views."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusec.ir import Graph, Node, Value
from fusec.ops import Reshape, Slice, Split, Transpose

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """A range of rows."""

    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count

    def joined(self, other: Rows) -> Rows:
        """Return the smallest range that contains both."""
        start = min(self.start, other.start)
        return Rows(start, max(self.stop, other.stop) - start)


def row_axis(source: Shape, shape: Shape, axis: int) -> int | None:
    """Return the axis of a reshape's result that is an axis of its operand; None if it is split or joined."""
    before, found = math.prod(source[:axis]), 1
    for place, size in enumerate(shape):
        if found == before and size == source[axis]:
            return place
        found *= size
    return None


def axis_after(view: Node, axis: int) -> int | None:
    """Return the axis of a transpose's or reshape's result that is an axis of its operand; None for other nodes."""
    if isinstance(view.op, Transpose):
        return view.op.perm.index(axis)
    return row_axis(view.operands[0].type.shape, view.op.shape, axis) if isinstance(view.op, Reshape) else None


def axis_before(view: Node, axis: int) -> int | None:
    """Return the axis of a transpose's or reshape's operand that is an axis of its result; None for other nodes."""
    if isinstance(view.op, Transpose):
        return view.op.perm[axis]
    return row_axis(view.op.shape, view.operands[0].type.shape, axis) if isinstance(view.op, Reshape) else None


def view_again(graph: Graph, view: Node, rows: Value, axis: int, before: Node) -> Value:
    """Insert a transpose or reshape of some rows. axis: of the rows in the result."""
    op = view.op
    if isinstance(op, Reshape):
        count = rows.type.size * op.shape[axis] // math.prod(op.shape)
        op = Reshape((*op.shape[:axis], count, *op.shape[axis + 1 :]))
    return graph.insert(op, [rows], before=before, origin=view.origin).result


def slice_rows(graph: Graph, value: Value, axis: int, rows: Rows, before: Node) -> Value:
    """Insert a slice of rows before the views that make a value, as one slice with those it follows."""
    view = value.node
    if view is not None and (inner := axis_before(view, axis)) is not None:
        return view_again(graph, view, slice_rows(graph, view.operands[0], inner, rows, before), axis, before)
    starts, sizes = [0] * value.type.rank, [*value.type.shape]
    if view is not None and isinstance(view.op, Slice) and set(view.op.steps) == {1}:
        starts, value = [*view.op.starts], view.operands[0]
    elif view is not None and isinstance(view.op, Split):
        starts[view.op.axis] = sum(view.op.sizes[: value.index])
        value = view.operands[0]
    starts[axis] += rows.start
    sizes[axis] = rows.count
    return graph.add(Slice(tuple(starts), tuple(sizes), (1,) * len(starts)), value, before=before)
