"""Views around the backward half of attention, so that a packed projection is read and its gradient written in place.

A step takes in the parts and turns between a projection and its heads only if nothing else reads them; the forward
half reads the same, so the backward one gets its own. And its results are joined before they are turned, not after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fusec.ir import Graph, Node, Value
from fusec.ops import AttentionBackward, Concat, Reshape, Slice, Split, Transpose
from fusec.passes.base import Options
from fusec.passes.rewriting.affine_ops import single_use
from fusec.passes.rewriting.rewriter import substitute


@dataclass(frozen=True)
class OwnViews:
    """See the module."""

    name: ClassVar[str] = "own_views"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if isinstance(node.op, AttentionBackward):
                copies: dict[Node, Node] = {}
                for index, value in enumerate(node.operands):
                    graph.set_input(node, index, _own(graph, value, node, copies))
            if isinstance(node.op, Concat):
                _join_heads(graph, node, node.op)


def _own(graph: Graph, value: Value, reader: Node, copies: dict[Node, Node]) -> Value:
    """The value by views of the reader's own, as far as they go."""
    view = value.node
    if view is None or not isinstance(view.op, (Reshape, Slice, Split, Transpose)):
        return value
    if all(user is reader for v in view.results for user in v.users):
        return value
    if view not in copies:
        source = _own(graph, view.operands[0], reader, copies)
        types = [v.type for v in view.results]
        copies[view] = graph.insert(view.op, [source], before=reader, types=types, origin=view.origin)
    return copies[view].results[value.index]


def _join_heads(graph: Graph, node: Node, op: Concat) -> None:
    """concat(reshape(transpose(x)), …) of columns = reshape(transpose(concat(x, …))) of heads, for gradients of
    attention."""
    heads = [_heads(value) for value in node.operands]
    shape = node.result.type.shape
    if op.axis % len(shape) != len(shape) - 1 or any(x is None for x in heads):
        return
    found = [x for x in heads if x is not None]
    if len({(x.type.shape[0], *x.type.shape[2:]) for x in found}) != 1:
        return
    joined = graph.insert(Concat(1), found, before=node, origin=node.origin).result
    turned = graph.insert(Transpose(_TURN), [joined], before=node, origin=node.origin).result
    substitute(graph, node.result, graph.insert(Reshape(shape), [turned], before=node).result, fresh=True)


_TURN = (0, 2, 1, 3)


def _heads(value: Value) -> Value | None:
    """The gradient [B, H, S, D] that a value [B, S, H D] views, and nothing else does."""
    flat = value.node
    if flat is None or not isinstance(flat.op, Reshape) or not single_use(value):
        return None
    turn = flat.operands[0].node
    if turn is None or not isinstance(turn.op, Transpose) or turn.op.perm != _TURN or not single_use(turn.result):
        return None
    (x,) = turn.operands
    batch, heads, rows, features = x.type.shape
    fits = value.type.shape == (batch, rows, heads * features) and single_use(x)
    return x if fits and x.node is not None and isinstance(x.node.op, AttentionBackward) else None
