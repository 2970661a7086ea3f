"""Move transposes and reshapes down past pointwise ops and linear layers, until two meet and cancel.

A view between a convolution (or matmul) and its bias, activation or residual then comes after them. Only views whose
result is used once move, so nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fusec.ir import Graph, Node, Op, Value
from fusec.ops import Cast, Concat, Pad, Pointwise, Reduce, Reshape, Slice, Transpose
from fusec.ops.pointwise import CLASSES
from fusec.passes.base import RulePass
from fusec.passes.cleanup.simplify import reshape_of_reshape, transpose_of_transpose
from fusec.passes.layout.compose_views import RULES as COMPOSITIONS
from fusec.passes.layout.compose_views import rows_after
from fusec.passes.rewriting.rewriter import NoMatch, local, made_by, only_operand

POINTWISE = (*(name for name in CLASSES if name != "gen_index"), "cast")


# transposes ---------------------------------------------------------------------------------------------


@local(
    *POINTWISE, "concat", "pad", "slice", "reduce",
    equation="f(transpose(x, p)) = transpose(f(x), p) for pointwise f, concat, pad, slice, reduce",
)  # fmt: skip
def _transpose_down(graph: Graph, node: Node) -> Value | None:
    perm = _shared_perm(node)
    op = _permuted(node.op, perm)
    operands = [_before_transpose(graph, v, perm, node) for v in node.operands]
    inner = graph.insert(op, operands, before=node).result
    return graph.add(Transpose(perm), inner, before=node)


def _shared_perm(node: Node) -> tuple[int, ...]:
    """Return the permutation of every operand that is no constant.

    Raises NoMatch if permutations differ, or a transpose is used elsewhere too.
    """
    perms: set[tuple[int, ...]] = set()
    for v in node.operands:
        if v.literal is not None:
            continue
        transpose = made_by(v, Transpose)
        if transpose is None:
            raise NoMatch("not transposed", v)
        if only_operand(v).literal is not None:
            raise NoMatch("a transposed constant, which is folded, not moved", v)
        if any(user is not node for user in v.users):
            raise NoMatch("used elsewhere too", v)
        perms.add(transpose.perm)
    if len(perms) != 1:
        raise NoMatch("transposed in different ways", node.result)
    (perm,) = perms
    if len(perm) != node.result.type.rank:
        raise NoMatch("broadcast to a higher rank", node.result)
    return perm


def _permuted(op: Op, perm: Sequence[int]) -> Op:
    """Rewrite the op for the operand before the transpose; result dim i is operand dim perm[i]."""
    rank = len(perm)
    inverse = sorted(range(rank), key=lambda i: perm[i])

    def back(items: Sequence[int]) -> tuple[int, ...]:
        return tuple(items[i] for i in inverse)

    if isinstance(op, Pointwise | Cast):
        return op
    if isinstance(op, Concat):
        return replace(op, axis=perm[op.axis % rank])
    if isinstance(op, Pad):
        return replace(op, pads=(*back(op.pads[:rank]), *back(op.pads[rank:])))
    if isinstance(op, Slice):
        return Slice(back(op.starts), back(op.sizes), back(op.steps))
    assert isinstance(op, Reduce)
    if not op.keepdims:
        raise NoMatch("the reduction drops dims")
    return replace(op, axes=tuple(sorted(perm[a] for a in op.axes)))


def _before_transpose(graph: Graph, value: Value, perm: Sequence[int], before: Node) -> Value:
    """Return the operand of a transpose; a constant is transposed back (and folded later)."""
    if made_by(value, Transpose):
        return only_operand(value)
    if value.type.rank <= 1 and (value.type.size == 1 or perm[-1] == len(perm) - 1):
        return value
    full = (1,) * (len(perm) - value.type.rank) + value.type.shape
    lifted = graph.add(Reshape(full), value, before=before) if full != value.type.shape else value
    inverse = tuple(sorted(range(len(perm)), key=lambda i: perm[i]))
    return graph.add(Transpose(inverse), lifted, before=before)


# reshapes -----------------------------------------------------------------------------------------------


@local(*POINTWISE, equation="f(reshape(x), y) = reshape(f(x, reshape(y))) for pointwise f, y whole, a number or a row")
def _reshape_down(graph: Graph, node: Node) -> Value | None:
    source = _first_reshaped(node)
    shape = source.type.shape
    operands = [_before_reshape(graph, v, shape, node) for v in node.operands]
    inner = graph.insert(node.op, operands, before=node).result
    assert inner.type.shape == shape
    return graph.add(Reshape(node.result.type.shape), inner, before=node)


def _first_reshaped(node: Node) -> Value:
    """Return the operand of the reshape to move past.

    Raises NoMatch if there is none, or an operand that cannot be reshaped back.
    """
    result = node.result.type
    for v in node.operands:
        if _movable(v, node) and v.type.shape == result.shape:
            source = only_operand(v)
            # sinking pays where the op can join what makes the source
            if source.node is None or source.type.order or result.order or not source.type.rank:
                continue
            takes_rows = source.type.shape[-1:] == result.shape[-1:]
            rows = {o for o in node.operands if not _whole_or_number(o, node)}
            if all(takes_rows and _row(o, result.shape[-1]) for o in rows):
                return source
    raise NoMatch("no reshape to pass", node.result)


def _movable(value: Value, node: Node) -> bool:
    return made_by(value, Reshape) is not None and all(user is node for user in value.users)


def _whole_or_number(value: Value, node: Node) -> bool:
    """Return True for a reshape's result of the whole shape, or one number."""
    if value.literal is not None:
        return value.type.size == 1
    return value.type.shape == node.result.type.shape and _movable(value, node)


def _row(value: Value, length: int) -> bool:
    """Return True for a constant that varies along the last dim only."""
    return value.literal is not None and value.type.shape[-1:] == (length,) and value.type.size == length


def _before_reshape(graph: Graph, value: Value, shape: tuple[int, ...], before: Node) -> Value:
    if value.literal is not None:
        if value.type.rank <= 1:
            return value
        return graph.add(Reshape(value.type.shape[-1:]), value, before=before)
    source = only_operand(value)
    return source if source.type.shape == shape else graph.add(Reshape(shape), source, before=before)


@local("matmul", equation="matmul(reshape(x), w) = reshape(matmul(x, w)) where rows alone are reshaped, w a matrix")
def _rows_down(graph: Graph, node: Node) -> Value | None:
    """Move a reshape that merges rows after a linear layer, so that later ops meet their own shape."""
    rows, w = node.operands
    if not made_by(rows, Reshape) or w.type.rank != 2:
        raise NoMatch("not reshaped, or not by a matrix", rows)
    x = only_operand(rows)
    if x.literal is not None or x.type.rank < 2 or not x.type.size:  # without columns, any number of rows is a reshape
        raise NoMatch("a constant, or no rows", rows)
    if x.type.shape[-1:] != rows.type.shape[-1:]:
        x = _rows_apart(graph, node, x)
    product = graph.insert(node.op, [x, w], before=node).result
    return graph.add(Reshape(node.result.type.shape), product, before=node)


def _rows_apart(graph: Graph, node: Node, x: Value) -> Value:
    """Reshape x to the rows that the layer's readers want, where columns were merged too."""
    lead, columns = rows_after(node.result), node.operands[0].type.shape[-1]
    split = len(lead) < x.type.rank and lead == x.type.shape[: len(lead)] and math.prod(lead) * columns == x.type.size
    if len(lead) < 2 or not split or lead == node.result.type.shape[:-1]:
        raise NoMatch("not rows alone", node.operands[0])
    return graph.add(Reshape((*lead, columns)), x, before=node)


class SinkViews(RulePass):
    """Move transposes and reshapes down past pointwise ops, so that pairs cancel."""

    name = "sink_views"
    rules = (
        transpose_of_transpose,
        reshape_of_reshape,
        _transpose_down,
        _reshape_down,
        _rows_down,
        *COMPOSITIONS,
    )
