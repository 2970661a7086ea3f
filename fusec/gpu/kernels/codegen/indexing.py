"""How a tensor's elements lie in memory, seen in its own shape or through ops that move no element.

Such ops cost a kernel nothing: they are strides of what it reads, or of what it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusec.errors import LoweringError
from fusec.ir import DType, Node, TensorType, Value
from fusec.lowering.dim_folding import backward, reshape_strides
from fusec.ops import Expand, Relayout, Reshape, Slice, Split, Transpose

MOVES = (Relayout, Transpose, Reshape, Expand, Slice, Split)


@dataclass(frozen=True)
class View:
    """Strides and start in elements, as TensorType has the former."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    start: int = 0

    @classmethod
    def of(cls, type: TensorType) -> View:
        """A tensor as it is stored."""
        return cls(type.shape, type.strides, type.dtype)

    @property
    def rank(self) -> int:
        return len(self.shape)


Laid = View | TensorType


def forward(node: Node, index: int, view: View) -> View | None:
    """Result `index` of a node in MOVES, whose operand is seen so; None if elements have to move."""
    op, shape = node.op, node.results[index].type.shape
    if isinstance(op, Relayout):
        return view
    if isinstance(op, Transpose):
        return replace(view, shape=shape, strides=tuple(view.strides[p] for p in op.perm))
    if isinstance(op, Expand):
        lead = len(shape) - view.rank
        kept = (s if d == shape[lead + i] else 0 for i, (d, s) in enumerate(zip(view.shape, view.strides, strict=True)))
        return replace(view, shape=shape, strides=(*(0,) * lead, *kept))
    if isinstance(op, Slice):
        start = sum(s * stride for s, stride in zip(op.starts, view.strides, strict=True))
        strides = tuple(step * stride for step, stride in zip(op.steps, view.strides, strict=True))
        return replace(view, shape=shape, strides=strides, start=view.start + (0 if 0 in shape else start))
    if isinstance(op, Split):
        return replace(view, shape=shape, start=view.start + sum(op.sizes[:index]) * view.strides[op.axis])
    try:
        return replace(view, shape=shape, strides=reshape_strides(node, view.shape, view.strides, shape))
    except LoweringError:
        return None


def back(node: Node, view: View) -> View | None:
    """The operand of a node in MOVES, such that its result is stored so; None if elements have to move."""
    if not isinstance(node.op, (Relayout, Transpose, Reshape)):
        return None
    try:
        return replace(view, shape=node.operands[0].type.shape, strides=backward(node, view.strides))
    except LoweringError:
        return None


def source(value: Value, nodes: Sequence[Node]) -> tuple[Value, View] | None:
    """What a value is a view of and how, through those of the nodes that move nothing; None if it is made otherwise
    by one of them, or if elements have to move."""
    node = value.node
    if node is None or node not in nodes:
        return value, View.of(value.type)
    found = source(node.operands[0], nodes) if isinstance(node.op, MOVES) else None
    if found is None:
        return None
    view = forward(node, value.index, found[1])
    return None if view is None else (found[0], view)
