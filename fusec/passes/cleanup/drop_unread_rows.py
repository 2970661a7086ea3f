"""Compute only the rows that are read, where a slice reads few rows of what is computed row by row.

A vision transformer classifies by one token, so its last layer needs one row of each image. The slice moves up past
products with a matrix, norms of rows and pointwise ops. Nothing else may read these, but for slices of the same rows,
as in the backward half of a training step.
"""

from __future__ import annotations

from dataclasses import field

from fusec.ir import Graph, Node, Value, positions
from fusec.ops import POINTWISE_OPS, LayerNorm, MatMul, RmsNorm, Slice
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import substitute
from fusec.system.dataclass import dataclass

LEAST_SHARE = 2  # rows for each row that is read, at least; otherwise the slice stays where it is


class DropUnreadRows(Pass):
    """Move slices of few rows up past ops that work row by row."""

    name = "drop_unread_rows"

    def run(self, graph: Graph, options: Options) -> None:
        for node in reversed(list(graph.nodes)):
            if isinstance(node.op, Slice) and _reads_few_rows(node):
                rows = _ReadRows(graph, node)
                if any(isinstance(each.op, (MatMul, LayerNorm, RmsNorm)) for each in rows.nodes):
                    rows.move()


def _reads_few_rows(node: Node) -> bool:
    """Tell if a slice reads few rows of a value that nothing else reads."""
    (x,), op = node.operands, node.op
    assert isinstance(op, Slice)
    whole_rows = x.type.rank > 1 and op.sizes[-1] == x.type.shape[-1] and op.starts[-1] == 0 and op.steps[-1] == 1
    few = 0 < node.result.type.size * LEAST_SHARE <= x.type.size
    return whole_rows and few and all(user is node for user in x.users)


@dataclass
class _ReadRows:
    """The ops before a slice that work row by row.

    moved: for each value, its slice, if one was made.
    """

    graph: Graph
    end: Node
    moved: dict[Value, Value] = field(default_factory=dict[Value, Value])

    def __post_init__(self) -> None:
        self.shape = self.end.operands[0].type.shape[:-1]
        self.place = positions(self.graph)
        self.nodes: list[Node] = []  # the last first
        found, waiting = {self.end}, [self.end]
        while waiting:
            for value in waiting.pop().operands:  # each value is looked at again after each of its readers
                node = value.node
                if node is None or node in found or not all(u in found or self._is_same(u) for u in value.users):
                    continue
                if len(node.results) == 1 and self._is_row_by_row(node):
                    found.add(node)
                    self.nodes.append(node)
                    waiting.append(node)

    def _is_same(self, node: Node) -> bool:
        """Tell if a later node slices the same rows of another value."""
        op, end = node.op, self.end.op
        if not isinstance(op, Slice) or node.operands[0].type.shape[:-1] != self.shape:
            return False
        if self.place.get(node, -1) < self.place[self.end]:
            return False
        assert isinstance(end, Slice)
        same = [getattr(op, name)[:-1] == getattr(end, name)[:-1] for name in ("starts", "sizes", "steps")]
        return all(same) and (op.starts[-1], op.sizes[-1], op.steps[-1]) == (0, node.operands[0].type.shape[-1], 1)

    def _is_row_by_row(self, node: Node) -> bool:
        """Tell if each row of an op's result depends on the same rows of its operands, or on whole constants."""
        rank = len(self.shape) + 1
        if node.result.type.shape[:-1] != self.shape:
            return False
        first, *others = node.operands or (node.result,)
        if isinstance(node.op, MatMul):
            return first.type.shape[:-1] == self.shape and others[0].type.rank == 2
        if isinstance(node.op, (LayerNorm, RmsNorm)):
            return node.op.axis % rank == rank - 1 and all(v.type.rank == 1 for v in others)
        return isinstance(node.op, POINTWISE_OPS) and "axis" not in node.op.attributes

    def move(self) -> None:
        """Compute the rows that are read by new ops, so that the old ops have no reader."""
        for node in reversed(self.nodes):
            first, *others = node.operands
            whole = isinstance(node.op, (MatMul, LayerNorm, RmsNorm))
            operands = [self._rows_of(first), *(v if whole else self._rows_of(v) for v in others)]
            made = self.graph.insert(node.op, operands, before=self.end, origin=node.origin)
            self.moved[node.result] = made.result
            for user in tuple(node.result.users):
                if user is not self.end and self._is_same(user):
                    substitute(self.graph, user.result, made.result)
        substitute(self.graph, self.end.result, self.moved[self.end.operands[0]], fresh=True)

    def _rows_of(self, value: Value) -> Value:
        """Return the rows of an operand, which may be broadcast."""
        if value not in self.moved:
            self.moved[value] = self._sliced(value)
        return self.moved[value]

    def _sliced(self, value: Value) -> Value:
        op, lead = self.end.op, len(self.shape) + 1 - value.type.rank
        assert isinstance(op, Slice)
        starts, sizes, steps = ([*each[lead:]] for each in (op.starts, op.sizes, op.steps))
        for dim, size in enumerate(value.type.shape):
            if size == 1 or dim + lead == len(self.shape):  # the last dim is that of a row
                starts[dim], sizes[dim], steps[dim] = 0, size, 1
        if tuple(sizes) == value.type.shape:
            return value
        return self.graph.add(Slice(tuple(starts), tuple(sizes), tuple(steps)), value, before=self.end)
