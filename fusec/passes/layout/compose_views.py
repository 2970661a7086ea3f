"""Join two transposes with a reshape between them into one, and move transposes of rows past linear layers.

A transpose of rows moves to the side of a linear layer where another transpose is, so that the two can cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from fusec.ir import Graph, Node, Value
from fusec.ops import Cast, MatMul, Reshape, Transpose
from fusec.passes.rewriting.rewriter import NoMatch, Rewriter, local, single_use

Shape = tuple[int, ...]


def common_dims(a: Shape, b: Shape) -> tuple[list[Shape], list[Shape]]:
    """Split the dims of two shapes of one size into parts that are the same for both, in the same order.

    Dims of 1 have no part.

    Raises NoMatch if a dim of one ends inside a dim of the other that it does not divide.
    """
    if 0 in a or 0 in b:
        raise NoMatch("empty")
    ends = sorted({*_ends(a), *_ends(b)})
    if any(high % low for low, high in pairwise(ends)):
        raise NoMatch(f"{list(a)} and {list(b)} have no parts in common")
    return _parts(a, ends), _parts(b, ends)


def _ends(shape: Shape) -> list[int]:
    """Count the elements within each dim and all dims inside it."""
    return [math.prod(shape[i:]) for i in range(len(shape) + 1)]


def _parts(shape: Shape, ends: Sequence[int]) -> list[Shape]:
    found: list[Shape] = []
    for i, size in enumerate(shape):
        inner = math.prod(shape[i + 1 :])
        marks = [e for e in ends if inner <= e <= inner * size]
        found.append(tuple(high // low for low, high in pairwise(marks))[::-1])
    return found


@local("transpose", equation="transpose(reshape(transpose(x, p), s), q) = reshape(transpose(reshape(x, t), r), u)")
def one_transpose(graph: Graph, node: Node) -> Value | None:
    """Join transposes that permute the same parts of dims; a reshape between them only regroups these."""
    between = node.operands[0].node
    if between is None or not isinstance(between.op, Reshape) or not single_use(between.result):
        raise NoMatch("no reshape, or used elsewhere too", node.operands[0])
    first = between.operands[0].node
    if first is None or not isinstance(first.op, Transpose) or not single_use(first.result):
        raise NoMatch("no transpose, or used elsewhere too", between.operands[0])
    (x,), perm, then = first.operands, first.op.perm, cast(Transpose, node.op).perm
    if x.type.order or node.result.type.order or x.literal is not None:
        raise NoMatch("a memory order is chosen, or a constant", x)
    inner, outer = common_dims(first.result.type.shape, between.result.type.shape)
    # parts by number: their places in x, between the transposes, and at the end
    names = iter(range(sum(map(len, inner))))
    before = [tuple((next(names), size) for size in parts) for parts in inner]
    names = iter(range(sum(map(len, outer))))
    after = [tuple((next(names), size) for size in parts) for parts in outer]
    places = sorted(range(len(perm)), key=lambda i: perm[i])
    source = [part for i in places for part in before[i]]
    wanted = [part for p in then for part in after[p]]
    moved = tuple(source.index(part) for part in wanted)
    value = _reshaped(graph, x, tuple(size for _, size in source), node)
    if moved != tuple(range(len(moved))):
        value = graph.add(Transpose(moved), value, before=node)
    return _reshaped(graph, value, node.result.type.shape, node)


def _reshaped(graph: Graph, value: Value, shape: Shape, before: Node) -> Value:
    return value if value.type.shape == shape else graph.add(Reshape(shape), value, before=before)


# linear layers ------------------------------------------------------------------------------------------


@local("matmul", equation="matmul(transpose(x, p), w) = transpose(matmul(x, w), p) where rows move, w a matrix")
def _transposed_rows_down(graph: Graph, node: Node) -> Value | None:
    """Move a transpose of rows after the layer, where the layer's result is transposed too."""
    rows, w = node.operands
    if w.type.rank != 2 or rows.node is None or not isinstance(rows.node.op, Transpose) or not single_use(rows):
        raise NoMatch("not transposed, used elsewhere too, or not by a matrix", rows)
    (x,), perm = rows.node.operands, rows.node.op.perm
    if x.literal is not None or perm[-1:] != (len(perm) - 1,) or x.type.order or rows.type.order:
        raise NoMatch("a constant, or not rows alone", rows)
    if not _transposed_later(_after_rows(node.result)):
        raise NoMatch("what follows is not transposed", node.result)
    product = graph.insert(node.op, [x, w], before=node).result
    return graph.add(Transpose(perm), product, before=node)


@local("transpose", equation="transpose(f(matmul(x, w)), p) = f(matmul(transpose(x, p), w)) where rows move, f by rows")
def _transposed_rows_up(graph: Graph, node: Node) -> Value | None:
    """Move a transpose of rows before the layer, where its operand is transposed and nothing after it is."""
    perm, value = cast(Transpose, node.op).perm, node.operands[0]
    if perm[-1:] != (len(perm) - 1,) or value.node is None or not single_use(value):
        raise NoMatch("not rows alone, or used elsewhere too", value)
    if _transposed_later(_after_rows(node.result)):  # the other rule moved it here
        raise NoMatch("transposed again", node.result)
    later: list[Node] = []
    while value.node is not None and (operand := _by_rows(value.node)) is not None and single_use(operand):
        later.append(value.node)
        value = operand
    product = value.node
    if product is None or not isinstance(product.op, MatMul) or not single_use(value):
        raise NoMatch("no linear layer", value)
    x, w = product.operands
    if w.type.rank != 2 or len(perm) != x.type.rank or value.type.order or not _transposed_before(x):
        raise NoMatch("not by a matrix, or its operand is not transposed", x)
    transposed = graph.add(Transpose(perm), x, before=node)
    result = graph.insert(product.op, [transposed, w], before=node, origin=product.origin).result
    for each in reversed(later):
        operands = [result if v is _by_rows(each) else v for v in each.operands]
        result = graph.insert(each.op, operands, before=node, origin=each.origin).result
    return result


def rows_after(value: Value) -> Shape:
    """Return the leading dims into which a linear layer's rows are reshaped, after its scale and bias; () if none."""
    end = _after_rows(value)
    if single_use(end) and isinstance(end.users[0].op, Reshape):
        shape = end.users[0].op.shape
        return shape[:-1] if shape[-1:] == value.type.shape[-1:] else ()
    return ()


def _after_rows(value: Value) -> Value:
    """Return what casts, and sums and products with constant rows, make of a value whose only use they are."""
    while single_use(value) and _by_rows(value.users[0]) is value:
        value = value.users[0].result
    return value


def _by_rows(node: Node) -> Value | None:
    """Return the operand of a cast, or that of a sum or product to which a constant row or number is the other one."""
    if isinstance(node.op, Cast):
        return node.operands[0]
    if node.op.name not in ("add", "mul"):
        return None
    for x, b in (node.operands, node.operands[::-1]):
        row = _is_constant(b) and (b.type.size == 1 or b.type.shape[-1:] == (b.type.size,))
        if row and x.literal is None and x.type.shape == node.result.type.shape:
            return x
    return None


def _is_constant(value: Value) -> bool:
    """Return True for a constant, also reshaped, which is folded later."""
    made = value.node
    return value.literal is not None or (
        made is not None and isinstance(made.op, Reshape) and made.operands[0].literal is not None
    )


def _transposed_later(value: Value) -> bool:
    """Tell if a value is used once, by a sequence of reshapes and transposes with a transpose in it."""
    while single_use(value):
        (user,) = value.users
        if isinstance(user.op, Transpose):
            return True
        if not isinstance(user.op, Reshape):
            return False
        value = user.result
    return False


def _transposed_before(value: Value) -> bool:
    """Tell if reshapes and transposes compute a value that is used once, with a transpose among them."""
    while single_use(value) and value.node is not None:
        if isinstance(value.node.op, Transpose):
            return True
        if not isinstance(value.node.op, Reshape):
            return False
        (value,) = value.node.operands
    return False


RULES: tuple[Rewriter, ...] = (one_transpose, _transposed_rows_down, _transposed_rows_up)
