"""Gather the rows of windows once, where rolls and transposes would move them several times.

Transformers with shifted windows roll an image along two dims, and cut it into windows. An exporter writes a roll as
two slices and a concat. As separate steps, each dim takes a copy, and windows one more, of queries, keys and values.
Where four neighbouring patches become one, four slices are joined.
"""

from __future__ import annotations

import math
from dataclasses import replace

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
    """Replace the last of several ops that move rows by a gather, if they join slices, or cut windows for attention."""
    end = node.result
    if _is_moved_again(end):
        raise NoMatch("moved again by the next op", end)
    chain = _chain(node)
    has_slices = any(isinstance(each.op, Concat) for each in chain)
    if not has_slices and not (any(isinstance(each.op, Transpose) for each in chain) and _feeds_attention(end)):
        raise NoMatch("no slices to join, and no windows of attention", end)
    x = _moved(chain[0])
    assert x is not None
    rows, width = x.type.size // x.type.shape[-1], x.type.shape[-1]
    if rows > _MOST_ROWS:
        raise NoMatch("a large table of indices", end)
    places = np.arange(rows).reshape(*x.type.shape[:-1], 1)
    for each in chain:
        places = _applied(each, places)
    if not has_slices and _has_strides(places[..., 0]):
        raise NoMatch("read by strides, without a copy", end)
    order = places.reshape(-1)
    images = math.gcd(x.type.shape[0], end.type.shape[0]) if x.type.rank > 2 else 1
    own = rows // images
    if (order.reshape(images, own) != order[:own] + own * np.arange(images)[:, None]).any():
        images, own = 1, rows
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
        if x.node is None or not _is_joined(found[0], x) or _moved(x.node) is None or _joins_rows(x.node):
            return found
        found.insert(0, x.node)


def _is_joined(mover: Node, x: Value) -> bool:
    """Tell if an op alone reads what it moves; a concat does so by its slices."""
    return len(x.users) == (len(mover.operands) if isinstance(mover.op, Concat) else 1)


def _joins_rows(node: Node) -> bool:
    """Tell if an op makes longer rows of several."""
    return isinstance(node.op, Concat) and node.op.axis % node.result.type.rank == node.result.type.rank - 1


def _is_moved_again(x: Value) -> bool:
    """Tell if one op alone reads a value and moves its rows."""
    (user, *_) = x.users or (None,)
    if user is None or (x.node is not None and _joins_rows(x.node)):
        return False
    if isinstance(user.op, Slice) and user.result.users:
        user = user.result.users[0]
    return bool(user.results) and _moved(user) is x and _is_joined(user, x)


def _moved(node: Node) -> Value | None:
    """Return what an op moves by whole rows; None for other ops."""
    result = node.results[0]
    if isinstance(node.op, Concat):
        x = _sliced(node)
    else:
        x = node.operands[0] if isinstance(node.op, (Reshape, Transpose)) else None
    if x is None or x.literal is not None or x.type.order or result.type.order or not x.type.size:
        return None
    if x.type.rank < 2 or result.type.rank < 2 or x.type.shape[-1] % _WHOLE_ROW:
        return None
    if isinstance(node.op, Transpose):
        return x if node.op.perm[-1] == x.type.rank - 1 else None
    return x if _joins_rows(node) or x.type.shape[-1] == result.type.shape[-1] else None


def _sliced(node: Node) -> Value | None:
    """Return the value whose rows several slices read for a concat, each row once; None for other concats."""
    slices = [value.node for value in node.operands]
    x = slices[0].operands[0] if slices[0] is not None and slices[0].operands else None
    if x is None or len(slices) < 2 or x.type.size != node.result.type.size or x.type.rank != node.result.type.rank:
        return None
    for each in slices:
        if each is None or not isinstance(each.op, Slice) or each.operands[0] is not x or len(each.result.users) != 1:
            return None
        if each.op.sizes[-1] != x.type.shape[-1] or each.op.steps[-1] != 1:
            return None
    return x


def _applied(node: Node, places: np.ndarray) -> np.ndarray:
    """Move numbers of rows, of shape [..., 1], as an op moves the rows."""
    op = node.op
    if isinstance(op, Transpose):
        return places.transpose(op.perm)
    if isinstance(op, Reshape):
        return places.reshape(*op.shape[:-1], 1)
    slices = [value.node.op for value in node.operands if value.node is not None and isinstance(value.node.op, Slice)]
    assert isinstance(op, Concat)
    parts = [replace(each, starts=(*each.starts[:-1], 0), sizes=(*each.sizes[:-1], 1)) for each in slices]
    return np.concatenate([part.reference(np, places)[0] for part in parts], axis=op.axis)


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
