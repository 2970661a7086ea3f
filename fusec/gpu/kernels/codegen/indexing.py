"""Describe tensors by strides, also through ops that move no element.

Such ops cost a kernel nothing, because they only change the strides of what it reads or writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.errors import LoweringError
from fusec.ir import DType, Node, TensorType, Value
from fusec.lowering.dim_folding import backward, reshape_strides
from fusec.ops import Expand, Relayout, Reshape, Slice, Split, Transpose
from fusec.system.dataclass import dataclass

VIEW_OPS = (Relayout, Transpose, Reshape, Expand, Slice, Split)


@dataclass(frozen=True)
class View:
    """A shape, with strides and start in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    start: int = 0

    @classmethod
    def of(cls, type: TensorType) -> View:
        """Return the view of a tensor as it is stored."""
        return cls(type.shape, type.strides, type.dtype)

    @property
    def rank(self) -> int:
        return len(self.shape)


Strided = View | TensorType


def view_of_result(node: Node, index: int, view: View) -> View | None:
    """Return the view of result `index`, given the view of the operand; None if elements have to move.

    node: one of VIEW_OPS.
    """
    op, shape = node.op, node.results[index].type.shape
    if isinstance(op, Relayout):
        return view
    if isinstance(op, Transpose):
        return replace(view, shape=shape, strides=tuple(view.strides[p] for p in op.perm))
    if isinstance(op, Expand):
        return expanded(view, shape)
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


def expanded(view: View, shape: tuple[int, ...]) -> View:
    """Return the view that broadcasts another to a shape."""
    lead = len(shape) - view.rank
    spread = (s if d == shape[lead + i] else 0 for i, (d, s) in enumerate(zip(view.shape, view.strides, strict=True)))
    return replace(view, shape=shape, strides=(*(0,) * lead, *spread))


def view_of_operand(node: Node, view: View) -> View | None:
    """Return the view of the operand that gives the result this view; None if elements have to move.

    node: one of VIEW_OPS.
    """
    if not isinstance(node.op, (Relayout, Transpose, Reshape)):
        return None
    try:
        return replace(view, shape=node.operands[0].type.shape, strides=backward(node, view.strides))
    except LoweringError:
        return None


def source(value: Value, nodes: Sequence[Node]) -> tuple[Value, View] | None:
    """Return the value whose memory holds `value`, and the view of it.

    None if one of `nodes` computes the value, or if elements have to move.
    """
    node = value.node
    if node is None or node not in nodes:
        return value, View.of(value.type)
    found = source(node.operands[0], nodes) if isinstance(node.op, VIEW_OPS) else None
    if found is None:
        return None
    view = view_of_result(node, value.index, found[1])
    return None if view is None else (found[0], view)
