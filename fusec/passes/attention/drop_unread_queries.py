"""Compute attention only for the queries whose results are read.

A vision transformer classifies by one token, so its last attention needs one query for each image. In the backward half
of a training step the gradients of all other queries are zero, and a pad adds them. Every query still sees all keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fusec.ir import Graph, Node, Value
from fusec.ops import Attention, AttentionBackward, AttentionTrain, Pad, Slice
from fusec.passes.attention.row_views import Rows, axis_after, axis_before, slice_rows, view_again
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import NoMatch, erase_unused, substitute

LEAST_SHARE = 2  # at most one query of so many is read; otherwise all are computed
FEWEST_TRAINED = 2  # queries, because cuDNN 9.19 refuses one in training
QUERIES = 2  # axis of [batch, heads, queries, features]
DY, Q, Y, SUMS = 0, 1, 4, 5  # operands of AttentionBackward


class DropUnreadQueries(Pass):
    """Slice the queries of attention instead of its result."""

    name = "drop_unread_queries"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if isinstance(node.op, (Attention, AttentionTrain)):
                try:
                    reads = _Reads(node)
                except NoMatch:
                    continue
                _compute_rows(graph, node, reads)


@dataclass
class _Reads:
    """The rows of an attention's result that are read. Raises NoMatch unless these are few.

    slices: the slices that read them, and the axis of their rows.
    backward: the gradient of the attention, if it has one.
    """

    attention: Node
    slices: list[tuple[Node, int]] = field(default_factory=list[tuple[Node, int]])
    backward: Node | None = None

    def __post_init__(self) -> None:
        op, (q, k) = self.attention.op, self.attention.operands[:2]
        assert isinstance(op, (Attention, AttentionTrain))
        queries, keys = (v.type.shape[QUERIES] for v in (q, k))
        for result in self.attention.results:
            self._follow(result, QUERIES)
        ranges = [_read_by(node, axis) for node, axis in self.slices]
        if self.backward is not None:
            ranges.append(_Padded(self.backward).rows)
        if not ranges:
            raise NoMatch("nothing reads rows")
        self.rows = ranges[0]
        for other in ranges[1:]:
            self.rows = self.rows.joined(other)
        if self.backward is not None and self.rows.count < FEWEST_TRAINED:
            self.rows = Rows(min(self.rows.start, max(queries - FEWEST_TRAINED, 0)), FEWEST_TRAINED)
        if not 0 < self.rows.count * LEAST_SHARE <= queries:
            raise NoMatch("most rows are read")
        if op.causal and self.rows.start < keys - 1:
            raise NoMatch("the causal mask depends on the place of a query")

    def _follow(self, value: Value, axis: int) -> None:
        """Find the slices that read a result, through views."""
        for user, place in value.uses:
            if (after := axis_after(user, axis)) is not None:
                self._follow(user.result, after)
            elif isinstance(user.op, Slice) and user.op.steps[axis] == 1:
                self.slices.append((user, axis))
            elif isinstance(user.op, AttentionBackward) and self._is_own(user, place):
                self.backward = user
            else:
                raise NoMatch("all rows are read", value)

    def _is_own(self, backward: Node, place: int) -> bool:
        """Tell if a node is the only gradient of the attention and reads its results as such."""
        y, *sums = self.attention.results
        same = self.backward in (None, backward) and backward.operands[1:4] == self.attention.operands[:3]
        return same and place in (Y, SUMS) and [backward.operands[Y], backward.operands[SUMS]] == [y, *sums]


def _read_by(node: Node, axis: int) -> Rows:
    assert isinstance(node.op, Slice)
    return Rows(node.op.starts[axis], node.op.sizes[axis])


class _Padded:
    """The gradient of an attention's result, which a pad and views make. Raises NoMatch if no pad adds its rows.

    rows: those that the pad does not add.
    """

    def __init__(self, backward: Node):
        self.views: list[tuple[Node, int]] = []  # the last first
        value, axis = backward.operands[DY], QUERIES
        while value.node is not None and (inner := axis_before(value.node, axis)) is not None:
            self.views.append((value.node, axis))
            value, axis = value.node.operands[0], inner
        pad = value.node
        if pad is None or not isinstance(pad.op, Pad) or pad.op.mode != "constant" or pad.op.value != 0:
            raise NoMatch("rows of the gradient may not be zero", value)
        (self.rest,), self.axis, rank = pad.operands, axis, value.type.rank
        ends = {axis, axis + rank}
        if any(count < 0 or (count and place not in ends) for place, count in enumerate(pad.op.pads)):
            raise NoMatch("the pad adds more than rows", value)
        self.rows = Rows(pad.op.pads[axis], self.rest.type.shape[axis])

    def again(self, graph: Graph, rows: Rows, before: Node) -> Value:
        """Insert the gradient of some rows, which contain those that are not zero."""
        value = self.rest
        if rows != self.rows:
            added = (self.rows.start - rows.start, rows.stop - self.rows.stop)
            value = graph.add(_pad(value.type.rank, self.axis, *added), value, before=before)
        for view, axis in reversed(self.views):
            value = view_again(graph, view, value, axis, before)
        return value


def _pad(rank: int, axis: int, start: int, end: int) -> Pad:
    pads = [0] * (2 * rank)
    pads[axis], pads[axis + rank] = start, end
    return Pad(tuple(pads))


def _compute_rows(graph: Graph, node: Node, reads: _Reads) -> None:
    """Compute attention and its gradients for the rows that are read."""
    rows, queries = reads.rows, node.operands[0].type.shape[QUERIES]
    q, k, v, *bias = node.operands
    few = slice_rows(graph, q, QUERIES, rows, node)
    for place, mask in enumerate(bias):
        if mask.type.rank > 1 and mask.type.shape[-2] == queries:
            bias[place] = slice_rows(graph, mask, mask.type.rank - 2, rows, node)
    assert isinstance(node.op, (Attention, AttentionTrain))
    made = graph.insert(replace(node.op, causal=False), [few, k, v, *bias], before=node, origin=node.origin)
    if reads.backward is not None:
        _differentiate_rows(graph, reads.backward, made, rows)
    for read, axis in reads.slices:
        assert isinstance(read.op, Slice)
        starts = [*read.op.starts]
        starts[axis] -= rows.start
        value = _result_again(graph, read.operands[0], axis, made, read)
        part = graph.add(Slice(tuple(starts), read.op.sizes, read.op.steps), value, before=read)
        substitute(graph, read.result, part, fresh=True)


def _result_again(graph: Graph, value: Value, axis: int, made: Node, before: Node) -> Value:
    """Insert the views that make a value of attention's result again, for the rows that are computed."""
    view = value.node
    inner = None if view is None else axis_before(view, axis)
    if view is None or inner is None:
        return made.results[value.index]
    return view_again(graph, view, _result_again(graph, view.operands[0], inner, made, before), axis, before)


def _differentiate_rows(graph: Graph, backward: Node, made: Node, rows: Rows) -> None:
    """Compute the gradients from some rows; the gradient of the other queries is zero."""
    dy = _Padded(backward).again(graph, rows, backward)
    op, bias = backward.op, made.operands[3:]
    assert isinstance(op, AttentionBackward)
    operands = [dy, *made.operands[:3], *made.results, *bias]
    few = graph.insert(replace(op, causal=False), operands, before=backward, origin=backward.origin)
    queries = backward.operands[Q].type.shape[QUERIES]
    all_rows = graph.add(_pad(4, QUERIES, rows.start, queries - rows.stop), few.results[0], before=backward)
    for old, new in zip(backward.results, (all_rows, *few.results[1:]), strict=True):
        graph.set_type(new, old.type)
        graph.replace(old, new)
    erase_unused(graph, backward)
