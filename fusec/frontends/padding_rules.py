"""Follow the rows of a padded dim through each op: where they are in its result, or why the op mixes them.

Messages call the dim "it", as those of `padding_proof`, which applies these rules to a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from fusec.ir import Node, Value
from fusec.ops.recurrent import Recurrent
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class RowPlace:
    """Position of the dim in a value: dim `axis` consists of `outer` groups of rows."""

    axis: int
    outer: int = 1


class MixesError(Exception):
    """Reason why an op does not keep the rows separate."""


class RowTracker:
    """Tracks the dim through two graphs of one model: for n rows, and for more.

    twin: maps values of the smaller graph to those of the larger one.
    rows: the place of the dim in the values that have it.
    """

    def __init__(self, n: int):
        self.n = n
        self.twin: dict[Value, Value] = {}
        self.rows: dict[Value, RowPlace] = {}

    def aligned(self, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
        """Return the row of the result of an op that broadcasts: dims are counted from the right."""
        rank = node.results[0].type.rank
        found: set[tuple[int, int, int]] = set()
        for value, row in zip(node.operands, rows, strict=True):
            if row is not None:
                inner = value.type.shape[row.axis] // (row.outer * self.n)
                found.add((row.axis - value.type.rank, row.outer, inner))
        if len(found) > 1:
            raise MixesError("rows meet other rows")
        ((axis, outer, _),) = found
        return RowPlace(rank + axis, outer)

    def only(self, rows: Sequence[RowPlace | None], operand: int = 0) -> RowPlace:
        """Return the row of one operand, and check that no other operand has one."""
        row = rows[operand]
        if row is None or any(r is not None for i, r in enumerate(rows) if i != operand):
            raise MixesError("rows meet other rows")
        return row


Rule = Callable[[RowTracker, Node, Sequence[RowPlace | None]], RowPlace]


def _images(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    """Follow the batch dim. Images are separate from each other; channels and pixels are not."""
    row = tracker.only(rows)
    if row.axis != 0:
        raise MixesError("it is not the batch dim")
    return row


def _resize(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row = _images(tracker, node, rows)
    if node.op.attributes["scales"][0] != 1.0:
        raise MixesError("it is resized")
    return row


def _matmul(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    a, b = node.operands
    left, right = rows
    if left is not None and left.axis == a.type.rank - 1:
        raise MixesError("it is summed over")
    if right is not None and right.axis == b.type.rank - 2:
        raise MixesError("it is summed over")
    matrices = [r is not None and r.axis >= v.type.rank - 2 for r, v in zip(rows, node.operands, strict=True)]
    if any(matrices):
        row = tracker.only(rows, matrices.index(True))
        return RowPlace(node.result.type.rank - (node.operands[matrices.index(True)].type.rank - row.axis), row.outer)
    return tracker.aligned(node, rows)


def _packed_matmul(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row = tracker.only(rows)
    if row.axis == node.operands[0].type.rank - 1:
        raise MixesError("it is summed over")
    return row


def _norm_from(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row = tracker.only(rows)
    if row.axis >= node.op.attributes["axis"] % node.operands[0].type.rank:
        raise MixesError("it is normalised over")
    return row


def _reduce(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row, rank = tracker.only(rows), node.operands[0].type.rank
    axes = {a % rank for a in node.op.attributes["axes"]}
    if row.axis in axes:
        raise MixesError("it is reduced")
    return row if node.op.attributes["keepdims"] else RowPlace(row.axis - sum(a < row.axis for a in axes), row.outer)


def _not_along(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    """Check that an op works along another axis."""
    row = tracker.only(rows) if len(rows) == 1 else _same(rows)
    if row.axis == node.op.attributes["axis"] % node.operands[0].type.rank:
        raise MixesError(f"{node.op.name} works along it")
    return row


def _linear_scan(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row = tracker.aligned(node, rows)
    if row.axis == int(node.op.attributes["axis"]) % node.result.type.rank:
        raise MixesError("linear_scan works along it")
    return row


def _same(rows: Sequence[RowPlace | None]) -> RowPlace:
    found = {row for row in rows if row is not None}
    if len(found) > 1:
        raise MixesError("rows meet other rows")
    return found.pop()


def _reshape(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    """Follow rows through a reshape. A row stays a row if a new dim consists of whole rows of `step` elements."""
    row, shape = tracker.only(rows), node.operands[0].type.shape
    step = math.prod(shape[row.axis :]) // (row.outer * tracker.n)
    if not step:
        raise MixesError("a row is empty")
    for axis, size in enumerate(node.result.type.shape):
        after = math.prod(node.result.type.shape[axis + 1 :])
        rows_end = step * tracker.n
        if after and step % after == 0 and (after * size) % rows_end == 0 and (size > 1 or tracker.n == 1):
            # with one row, several axes could be the dim: the right one is larger in the larger graph
            if tracker.n == 1 and tracker.twin[node.result].type.shape[axis] == size:
                continue
            return RowPlace(axis, after * size // rows_end)
    raise MixesError("it is split or joined")


def _transpose(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row = tracker.only(rows)
    return RowPlace(node.op.attributes["perm"].index(row.axis), row.outer)


def _slice(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row, a = tracker.only(rows), node.op.attributes
    whole = (0, node.operands[0].type.shape[row.axis], 1)
    if (a["starts"][row.axis], a["sizes"][row.axis], a["steps"][row.axis]) != whole:
        raise MixesError("it is sliced")
    return row


def _pad(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row, pads = tracker.only(rows), node.op.attributes["pads"]
    if pads[row.axis] or pads[row.axis + len(pads) // 2]:
        raise MixesError("it is padded by the model itself")
    return row


def _gather(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    data, indices = node.operands
    axis = node.op.attributes["axis"] % data.type.rank
    if rows[0] is None:
        row = tracker.only(rows, 1)
        return RowPlace(axis + row.axis, row.outer)
    row = tracker.only(rows)
    if row.axis == axis:
        raise MixesError("rows are gathered")
    return row if row.axis < axis else RowPlace(row.axis + indices.type.rank - 1, row.outer)


def _attention(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    """Follow the batch or the queries, which are separate. Keys are summed over, and heads may be shared."""
    query, *others = rows[:3]
    bias = rows[3] if len(rows) > 3 else None
    if query is None or query.axis not in (0, 2) or (query.axis == 2 and query.outer > 1):
        raise MixesError("it is neither the batch nor the queries")
    if any(other != (query if query.axis == 0 else None) for other in others):
        raise MixesError("rows meet other rows")
    if bias is not None and RowPlace(bias.axis + 4 - node.operands[3].type.rank, bias.outer) != query:
        raise MixesError("rows meet other rows")
    return query


def _rotary(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row = tracker.aligned(node, rows)
    if row.axis == node.result.type.rank - 1:
        raise MixesError("its halves are exchanged")
    return row


def _recurrent(tracker: RowTracker, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    """Follow the batch, whose sequences are separate. It is dim 1 of x, the states and all results, 0 of lengths."""
    op = cast("Recurrent", node.op)
    _, lengths = op.places([v.type.dtype for v in node.operands])
    batch = {0: 1, **dict.fromkeys(range(2, 2 + op.states), 1)} | ({} if lengths is None else {lengths: 0})
    axes = {place: row.axis for place, row in enumerate(rows) if row is not None}
    if axes != batch:
        raise MixesError("it is not the batch dim")
    return _same([row and RowPlace(1, row.outer) for row in rows])


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("conv", "conv_flipped", "conv_transpose", "max_pool", "avg_pool"), _images),
    **dict.fromkeys(("batch_norm", "instance_norm", "group_norm", "lrn"), _images),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm_from),
    **dict.fromkeys(("softmax", "concat", "split", "top_k", "cumulate"), _not_along),
    "linear_scan": _linear_scan,
    "resize": _resize,
    "matmul": _matmul,
    "packed_matmul": _packed_matmul,
    "attention": _attention,
    "rotary": _rotary,
    "recurrent": _recurrent,
    "reduce": _reduce,
    "reshape": _reshape,
    "transpose": _transpose,
    "relayout": lambda tracker, node, rows: tracker.only(rows),
    "expand": lambda tracker, node, rows: tracker.aligned(node, rows),
    "slice": _slice,
    "pad": _pad,
    "gather": _gather,
}
