"""Compute only the rows of gradients that are not zero, where a pad adds rows of zeros.

A vision transformer classifies by one token, so gradients of its last layer are zero for all others. The pad moves down
past products with a matrix, gradients of norms and of pointwise ops. Sums over rows read no pad. What the forward half
computes is then read by slices of the same rows, and `drop_unread_rows` leaves out the others. A gradient of zero stays
zero if what it is multiplied by is finite.
"""

from __future__ import annotations

import math
from dataclasses import field

from fusec.ir import Graph, Node, Value
from fusec.ops import (
    ACTIVATION_GRADIENTS,
    Cast,
    LayerNormBackward,
    MatMul,
    Pad,
    Pointwise,
    Reduce,
    Reshape,
    Slice,
    Transpose,
)
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import erase_unused, made_by, only_operand, substitute
from fusec.system.dataclass import dataclass

LEAST_SHARE = 2  # rows for each row that is not zero, at least; otherwise the pad stays where it is


class DropZeroRows(Pass):
    """Move pads of gradients down past ops that work row by row."""

    name = "drop_zero_rows"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if isinstance(node.op, Pad) and _adds_rows(node):
                rows = _PaddedRows(graph, node)
                if any(isinstance(each.op, (MatMul, LayerNormBackward)) for each in rows.nodes):
                    rows.move()


def _adds_rows(node: Node) -> bool:
    """Tell if most rows of a pad's result are zeros that it adds."""
    (x,), op = node.operands, node.op
    assert isinstance(op, Pad)
    rank = x.type.rank
    plain = op.mode == "constant" and op.value == 0 and x.type.dtype.is_float and rank > 1
    whole_rows = plain and not op.pads[rank - 1] and not op.pads[-1]
    return whole_rows and 0 < x.type.size * LEAST_SHARE <= node.result.type.size


@dataclass
class _PaddedRows:
    """The ops after a pad that keep zero rows, or sum over rows.

    small: for each value with zero rows, the value without them.
    """

    graph: Graph
    pad: Node
    small: dict[Value, Value] = field(default_factory=dict[Value, Value])

    def __post_init__(self) -> None:
        self.shape = self.pad.result.type.shape[:-1]
        self.nodes: list[Node] = []
        self.padded = {self.pad.result}
        after = False
        for node in self.graph.nodes:
            after = after or node is self.pad
            if after and (self._keeps_zeros(node) or self._sums_rows(node)):
                self.nodes.append(node)
                if self._keeps_zeros(node):
                    self.padded.add(node.results[0])

    def _has_rows(self, value: Value) -> bool:
        return value.type.shape[:-1] == self.shape

    def _keeps_zeros(self, node: Node) -> bool:
        """Tell if the rows of an op's first result are zero where those of the pad are."""
        first, *others = node.operands or (node.results[0],)
        if not self.padded.intersection(node.operands) or not self._has_rows(node.results[0]):
            return False
        if isinstance(node.op, MatMul):
            return first in self.padded and others[0].type.rank == 2
        if isinstance(node.op, LayerNormBackward):
            is_last = node.op.axis % first.type.rank == first.type.rank - 1
            return is_last and first in self.padded and self._has_rows(others[0])
        if isinstance(node.op, Cast):
            return node.result.type.dtype.is_float
        if not isinstance(node.op, Pointwise):
            return False
        if not all(self._has_rows(v) or v.type.size == 1 for v in node.operands):
            return False
        if node.op.name == "add":
            return self.padded.issuperset(node.operands)
        return first in self.padded and (node.op.name == "mul" or isinstance(node.op, ACTIVATION_GRADIENTS))

    def _sums_rows(self, node: Node) -> bool:
        """Tell if an op adds up all rows: a sum, or a product of one transposed matrix of rows by another."""
        if isinstance(node.op, Reduce):
            (x,) = node.operands
            return x in self.padded and node.op.kind == "sum" and set(node.op.axes) == set(range(len(self.shape)))
        return isinstance(node.op, MatMul) and self._factors(node) is not None

    def _factors(self, node: Node) -> tuple[Value, Value] | None:
        """Return the two values whose rows a product adds up, before they are reshaped to matrices."""
        a, b = node.operands
        if made_by(a, Transpose) != Transpose((1, 0)):
            return None
        first, second = self._before_matrix(only_operand(a)), self._before_matrix(b)
        if first is None or second is None or self.padded.isdisjoint((first, second)):
            return None
        return first, second

    def _before_matrix(self, matrix: Value) -> Value | None:
        """Return the value that a matrix of all rows is a reshape of; None for other values."""
        if matrix.type.rank != 2 or matrix.type.shape[0] != math.prod(self.shape):
            return None
        value = only_operand(matrix) if made_by(matrix, Reshape) and len(self.shape) > 1 else matrix
        return value if value.type.shape[: len(self.shape)] == self.shape else None

    def move(self) -> None:
        """Compute the ops again of the rows that are not zero, and pad results that others read."""
        self.padded = {self.pad.result}
        self.small[self.pad.result] = self.pad.operands[0]
        for node in self.nodes:
            if self._keeps_zeros(node):
                self._compute_rows(node)
            else:
                self._sum_rows(node)

    def _compute_rows(self, node: Node) -> None:
        of_rows = 1 if isinstance(node.op, MatMul) else len(node.operands)
        operands = [
            self._rows_of(v, node) if i < of_rows and v.type.size != 1 and self._has_rows(v) else v
            for i, v in enumerate(node.operands)
        ]
        made = self.graph.insert(node.op, operands, before=node, origin=node.origin)
        padded = self.graph.insert(self.pad.op, [made.results[0]], before=node, origin=node.origin).result
        self.small[padded] = made.results[0]
        self.padded.add(padded)
        for old, new in zip(node.results, (padded, *made.results[1:]), strict=True):
            self.graph.set_type(new, old.type)
            self.graph.replace(old, new)
        erase_unused(self.graph, node)

    def _sum_rows(self, node: Node) -> None:
        if isinstance(node.op, Reduce):
            operands = [self._rows_of(node.operands[0], node)]
        else:
            factors = self._factors(node)
            assert factors is not None
            a, b = (self._matrix(value, node) for value in factors)
            operands = [self.graph.add(Transpose((1, 0)), a, before=node), b]
        made = self.graph.insert(node.op, operands, before=node, origin=node.origin)
        substitute(self.graph, node.result, made.result, fresh=True)

    def _matrix(self, value: Value, before: Node) -> Value:
        rows = self._rows_of(value, before)
        shape = rows.type.shape
        count = math.prod(shape[: len(self.shape)])
        matrix = (count, rows.type.size // count)
        return rows if shape == matrix else self.graph.add(Reshape(matrix), rows, before=before)

    def _rows_of(self, value: Value, before: Node) -> Value:
        """Return the rows of a value where the pad has those of its operand."""
        if value not in self.small:
            op, shape, lead = self.pad.op, value.type.shape, len(self.shape)
            assert isinstance(op, Pad)
            starts = (*op.pads[:lead], *(0 for _ in shape[lead:]))
            sizes = (*self.pad.operands[0].type.shape[:-1], *shape[lead:])
            self.small[value] = self.graph.add(Slice(starts, sizes, (1,) * len(shape)), value, before=before)
        return self.small[value]
