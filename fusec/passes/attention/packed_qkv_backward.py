"""Give attention's backward half views of its own, to read a packed projection and write its gradient in place.

A step contains the slices and transposes between a projection and its heads only if nothing else reads them. The
forward half reads the same ones, so the backward half gets copies. Its results are concatenated before they are
transposed.
"""

from __future__ import annotations

from fusec.ir import Graph, Node, Value
from fusec.ops import AttentionBackward, Concat, Reshape, Slice, Split, Transpose
from fusec.passes.attention.merge_qkv import HEADS_FIRST
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import made_by, only_operand, single_use, substitute


class PackedQkvBackward(Pass):
    """Duplicate views before attention's gradients."""

    name = "packed_qkv_backward"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if isinstance(node.op, AttentionBackward):
                copies: dict[Node, Node] = {}
                for index, value in enumerate(node.operands):
                    graph.set_input(node, index, _own(graph, value, node, copies))
            if isinstance(node.op, Concat):
                _join_heads(graph, node, node.op)


def _own(graph: Graph, value: Value, reader: Node, copies: dict[Node, Node]) -> Value:
    """Return the value by views that only this reader uses."""
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
    """Rewrite a concat of columns to a concat of heads, for gradients of attention.

    concat(reshape(transpose(x)), …) = reshape(transpose(concat(x, …))).
    """
    heads = [_heads(value) for value in node.operands]
    shape = node.result.type.shape
    if op.axis % len(shape) != len(shape) - 1 or any(x is None for x in heads):
        return
    found = [x for x in heads if x is not None]
    if len({(x.type.shape[0], *x.type.shape[2:]) for x in found}) != 1:
        return
    joined = graph.insert(Concat(1), found, before=node, origin=node.origin).result
    transposed = graph.insert(Transpose(HEADS_FIRST), [joined], before=node, origin=node.origin).result
    substitute(graph, node.result, graph.insert(Reshape(shape), [transposed], before=node).result, fresh=True)


def _heads(value: Value) -> Value | None:
    """Return the gradient [B, H, S, D] that a value [B, S, H D] views, if nothing else reads it."""
    if not made_by(value, Reshape) or not single_use(value):
        return None
    transposed = only_operand(value)
    transpose = made_by(transposed, Transpose)
    if transpose is None or transpose.perm != HEADS_FIRST or not single_use(transposed):
        return None
    x = only_operand(transposed)
    batch, heads, rows, features = x.type.shape
    fits = value.type.shape == (batch, rows, heads * features) and single_use(x)
    return x if fits and made_by(x, AttentionBackward) else None
