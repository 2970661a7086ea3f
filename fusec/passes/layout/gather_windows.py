"""Gather the rows of windows once, where rolls and transposes would move them several times.

Transformers with shifted windows roll an image along two dims, and cut it into windows. An exporter writes a roll as
two slices and a concat. As separate steps, each dim takes a copy, and windows one more, of queries, keys and values.
"""

from __future__ import annotations

import math

import numpy as np

from fusec.ir import DType, Graph, Node, Value
from fusec.ops import Attention, Concat, Gather, MatMul, Reshape, Slice, Split, Transpose
from fusec.passes.base import RulePass
from fusec.passes.rewriting.rewriter import NoMatch, local

_WHOLE_ROW = 8  # a divisor of the elements of a row, so that threads copy whole packs
_TO_ATTENTION = (MatMul, Reshape, Transpose, Slice, Split)
_MOST_ROWS = 1 << 20  # of the table of indices


@local("concat", "reshape", "transpose", equation="reshape(transpose(reshape(roll(x)))) = reshape(gather(rows of x))")
def _gather_once(graph: Graph, node: Node) -> Value | None:
    """Replace the last of several ops that move rows, of which one or more are rolls, by a gather."""
    end = node.result
    if _is_moved_again(end):
        raise NoMatch("moved again by the next op", end)
    chain = _chain(node)
    x = _moved(chain[0])
    assert x is not None
    rows, width = x.type.size // x.type.shape[-1], x.type.shape[-1]
    places = np.arange(rows).reshape(*x.type.shape[:-1], 1)
    for each in chain:
        places = _applied(each, places)
    rolls = any(isinstance(each.op, Concat) for each in chain)
    if not rolls and (_has_strides(places[..., 0]) or not _feeds_attention(end)):
        raise NoMatch("no roll, and no windows of attention", end)
    order = places.reshape(-1)
    images = math.gcd(x.type.shape[0], end.type.shape[0]) if x.type.rank > 2 else 1
    own = rows // images
    if (order.reshape(images, own) != order[:own] + own * np.arange(images)[:, None]).any():
        images, own = 1, rows
    if own > _MOST_ROWS:
        raise NoMatch("a large table of indices", end)
    table = graph.constant(order[:own].astype(DType.I32.numpy), before=node)
    flat = graph.add(Reshape((images, own, width)), x, before=node)
    return graph.add(Reshape(end.type.shape), graph.add(Gather(1), flat, table, before=node), before=node)


def _chain(node: Node) -> list[Node]:
    """List ops that move rows, up to this one, of which each one's result is read by the next one alone."""
    found = [node]
    while True:
        x = _moved(found[0])
        if x is None:
            raise NoMatch("moves more than rows", node.result)
        if x.node is None or not _is_joined(found[0], x) or _moved(x.node) is None:
            return found
        found.insert(0, x.node)


def _is_joined(mover: Node, x: Value) -> bool:
    """Tell if an op alone reads what it moves; a roll does so by two slices."""
    return len(x.users) == (2 if isinstance(mover.op, Concat) else 1)


def _is_moved_again(x: Value) -> bool:
    """Tell if one op alone reads a value and moves its rows."""
    (user, *_) = x.users or (None,)
    if user is not None and isinstance(user.op, Slice) and user.result.users:
        user = user.result.users[0]
    return user is not None and bool(user.results) and _moved(user) is x and _is_joined(user, x)


def _moved(node: Node) -> Value | None:
    """Return what an op moves by whole rows; None for other ops."""
    result = node.results[0]
    x = _rolled(node) if isinstance(node.op, Concat) else node.operands[0] if node.operands else None
    if x is None or x.literal is not None or x.type.order or result.type.order or not x.type.size:
        return None
    if x.type.rank < 2 or result.type.rank < 2 or x.type.shape[-1] % _WHOLE_ROW:
        return None
    if isinstance(node.op, Transpose):
        return x if node.op.perm[-1] == x.type.rank - 1 else None
    if isinstance(node.op, Reshape):
        return x if x.type.shape[-1] == result.type.shape[-1] else None
    return x if isinstance(node.op, Concat) else None


def _rolled(node: Node) -> Value | None:
    """Return what two slices and a concat roll along a dim other than the last; None for other concats."""
    op, pieces = node.op, [value.node for value in node.operands]
    assert isinstance(op, Concat)
    axis = op.axis % node.result.type.rank
    if len(pieces) != 2 or axis == node.result.type.rank - 1:
        return None
    first, second = pieces
    if first is None or second is None or not isinstance(first.op, Slice) or not isinstance(second.op, Slice):
        return None
    (x,), shape = first.operands, node.result.type.shape
    if second.operands[0] is not x or x.type.shape != shape or len(first.result.users) + len(second.result.users) != 2:
        return None
    start = second.op.sizes[axis]
    starts = tuple(start if d == axis else 0 for d in range(len(shape)))
    if first.op.starts != starts or any(second.op.starts) or {*first.op.steps, *second.op.steps} != {1}:
        return None
    return x


def _applied(node: Node, places: np.ndarray) -> np.ndarray:
    """Move numbers of rows, of shape [..., 1], as an op moves the rows."""
    op = node.op
    if isinstance(op, Transpose):
        return places.transpose(op.perm)
    if isinstance(op, Reshape):
        return places.reshape(*op.shape[:-1], 1)
    assert isinstance(op, Concat) and node.operands[1].node is not None
    axis, last = op.axis % places.ndim, node.operands[1].type.shape
    return np.roll(places, -last[axis], axis)


def _has_strides(places: np.ndarray) -> bool:
    """Tell if places grow by the same step all along each dim, so that a view of strides reads them without a copy."""
    strided = places.flat[0] + np.zeros_like(places)
    for axis, size in enumerate(places.shape):
        step = places.take(1, axis).flat[0] - places.flat[0] if size > 1 else 0
        strided += step * np.arange(size).reshape(-1, *(1,) * (places.ndim - axis - 1))
    return bool((strided == places).all())


def _feeds_attention(rows: Value) -> bool:
    """Tell if linear layers of rows, and views and biases after them, lead to attention."""
    waiting = [user for user in rows.users if isinstance(user.op, MatMul)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if isinstance(node.op, Attention):
            return True
        if isinstance(node.op, _TO_ATTENTION) or node.op.name == "add":
            after = {user for value in node.results for user in value.users} - seen
            waiting += after
            seen |= after
    return False


class GatherWindows(RulePass):
    """Gather the rows of windows once, where rolls and transposes would move them several times."""

    name = "gather_windows"
    rules = (_gather_once,)
