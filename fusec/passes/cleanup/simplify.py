"""Remove ops without effect: identities, reshapes of reshapes, full slices, casts to the own type.

Rows of a constant table that are joined with themselves are gathered from a table of longer rows, which is folded.

x + 0 = x loses only the sign of a zero. x * 0 stays, because it is NaN where x is not finite.
"""

from __future__ import annotations

import math
from typing import cast

from fusec.ir import DType, Graph, Node, Value
from fusec.ops import (
    AvgPool,
    Cast,
    Concat,
    Expand,
    Gather,
    MaxPool,
    Pad,
    Reduce,
    Reshape,
    Resize,
    Slice,
    Split,
    Transpose,
)
from fusec.passes.base import RulePass
from fusec.passes.rewriting.rewriter import local, made_by, only_operand
from fusec.passes.rewriting.value_facts import all_equal

MAX_TABLE_BYTES = 1 << 26  # of a table whose rows are made longer


def _if_same_type(node: Node, value: Value) -> Value | None:
    return value if value.type == node.result.type else None


@local("identity", equation="identity(x) = x")
def _identity(graph: Graph, node: Node) -> Value | None:
    return node.operands[0]


@local("add", "sub", equation="add(x, 0) = x; sub(x, 0) = x")
def _add_zero(graph: Graph, node: Node) -> Value | None:
    a, b = node.operands
    if all_equal(b, 0):
        return _if_same_type(node, a)
    return _if_same_type(node, b) if node.op.commutative and all_equal(a, 0) else None


@local("mul", "div", "pow", equation="mul(x, 1) = x; div(x, 1) = x; pow(x, 1) = x")
def _times_one(graph: Graph, node: Node) -> Value | None:
    a, b = node.operands
    if all_equal(b, 1):
        return _if_same_type(node, a)
    return _if_same_type(node, b) if node.op.commutative and all_equal(a, 1) else None


@local("clip", equation="clip(x, min=-inf, max=inf) = x")
def clip_nothing(graph: Graph, node: Node) -> Value | None:
    bounds = node.op.attributes
    return node.operands[0] if bounds["min"] == -math.inf and bounds["max"] == math.inf else None


@local("neg", "logical_not", equation="neg(neg(x)) = x; logical_not(logical_not(x)) = x")
def _twice_undone(graph: Graph, node: Node) -> Value | None:
    (x,) = node.operands
    return _if_same_type(node, only_operand(x)) if made_by(x, type(node.op)) else None


@local("max", "min", "logical_and", "logical_or", equation="max(x, x) = x, and so for min, and, or")
def _with_itself(graph: Graph, node: Node) -> Value | None:
    a, b = node.operands
    return a if a is b else None


@local("cast", equation="cast(x, own type) = x; cast(cast(x, wider), t) = cast(x, t)")
def _cast_nothing(graph: Graph, node: Node) -> Value | None:
    (x,), op = node.operands, cast(Cast, node.op)
    if op.to == x.type.dtype:
        return _if_same_type(node, x)
    if made_by(x, Cast) and _keeps_every_value(only_operand(x).type.dtype, x.type.dtype):
        source = only_operand(x)
        if source.type.dtype == op.to:
            return _if_same_type(node, source)
        return graph.add(op, source, before=node)
    return None


def _keeps_every_value(narrow: DType, broad: DType) -> bool:
    if narrow is DType.BOOL:
        return True
    if narrow.is_float:
        return broad is DType.F64 or (broad is DType.F32 and narrow.itemsize == 2)
    bits = {DType.F64: 53, DType.F32: 24, DType.F16: 11, DType.BF16: 8}
    if broad.is_float:
        return 8 * narrow.itemsize <= bits[broad]
    same_sign = narrow.value[0] == broad.value[0]
    return broad.is_int and narrow.itemsize < broad.itemsize and (same_sign or narrow.value[0] == "u")


@local("reshape", equation="reshape(x, own shape) = x; reshape(reshape(x, s), t) = reshape(x, t)")
def reshape_of_reshape(graph: Graph, node: Node) -> Value | None:
    (x,), op = node.operands, cast(Reshape, node.op)
    if op.shape == x.type.shape:
        return _if_same_type(node, x)
    if made_by(x, Reshape):
        source = only_operand(x)
        if source.type.shape == op.shape and source.type == node.result.type:
            return source
        return graph.add(op, source, before=node)
    return None


@local("transpose", equation="transpose(x, identity) = x; transpose(transpose(x, p), q) = transpose(x, p∘q)")
def transpose_of_transpose(graph: Graph, node: Node) -> Value | None:
    (x,), op = node.operands, cast(Transpose, node.op)
    if op.perm == tuple(range(len(op.perm))):
        return _if_same_type(node, x)
    inner = made_by(x, Transpose)
    if inner is not None:
        perm, source = tuple(inner.perm[p] for p in op.perm), only_operand(x)
        if perm == tuple(range(len(perm))) and source.type == node.result.type:
            return source
        return graph.add(Transpose(perm), source, before=node)
    return None


@local("transpose", equation="transpose(x, p) = reshape(x, s) where only dims of size 1 change places")
def _transpose_of_ones(graph: Graph, node: Node) -> Value | None:
    (x,), op = node.operands, cast(Transpose, node.op)
    moving = [p for p in op.perm if x.type.shape[p] != 1]
    if moving != sorted(moving) or x.type.order or node.result.type.order:
        return None
    return graph.add(Reshape(node.result.type.shape), x, before=node)


@local("expand", equation="expand(x, own shape) = x; expand(expand(x, s), t) = expand(x, t)")
def _expand_nothing(graph: Graph, node: Node) -> Value | None:
    (x,), op = node.operands, cast(Expand, node.op)
    if op.shape == x.type.shape:
        return _if_same_type(node, x)
    if made_by(x, Expand):
        return graph.add(op, only_operand(x), before=node)
    return None


@local("concat", equation="concat(x) = x; empty operands go; concat(concat(a, b), c) = concat(a, b, c)")
def _concat_of_one(graph: Graph, node: Node) -> Value | None:
    op, parts = cast(Concat, node.op), list[Value]()
    for v in node.operands:
        inner = made_by(v, Concat)
        if inner == op and len(v.uses) == 1 and v.node is not None:
            parts += v.node.operands
        elif v.type.shape[op.axis % v.type.rank]:
            parts.append(v)
    if len(parts) == 1:
        return _if_same_type(node, parts[0])
    if not parts or parts == list(node.operands):
        return None
    return graph.add(op, *parts, before=node)


@local("concat", equation="concat(split(x)) = x")
def _concat_of_split(graph: Graph, node: Node) -> Value | None:
    first = node.operands[0].node
    if first is None or not isinstance(first.op, Split) or node.operands != first.results:
        return None
    rank = node.result.type.rank
    if first.op.axis % rank != cast(Concat, node.op).axis % rank:
        return None
    return _if_same_type(node, first.operands[0])


@local("concat", equation="concat(gather(t, i), gather(t, i)) = gather(concat(t, t), i) for rows of a constant table t")
def _concat_of_gathered(graph: Graph, node: Node) -> Value | None:
    """Gather longer rows, as where a rotary embedding takes each angle for both halves of a head."""
    rows, op = node.operands[0], cast(Concat, node.op)
    if any(v is not rows for v in node.operands) or op.axis % rows.type.rank != rows.type.rank - 1:
        return None
    gathered = only_operand(rows) if made_by(rows, Reshape) else rows
    gather = made_by(gathered, Gather)
    if gather is None or gathered.node is None or rows.users != [node]:
        return None
    table, indices = gathered.node.operands
    count, shape = len(node.operands), table.type.shape
    if table.literal is None or table.type.rank != 2 or gather.axis % 2 or shape[1] != rows.type.shape[-1]:
        return None
    if count * table.type.nbytes > MAX_TABLE_BYTES or gathered.users not in ([node], [rows.node]):
        return None
    wide = graph.add(Concat(1), *[table] * count, before=node)
    return graph.add(Reshape(node.result.type.shape), graph.add(Gather(0), wide, indices, before=node), before=node)


@local("split", equation="split(x, one piece) = x")
def _split_of_one(graph: Graph, node: Node) -> Value | None:
    return _if_same_type(node, node.operands[0]) if len(node.results) == 1 else None


@local("slice", equation="slice(x, all) = x; slice(slice(x)) = slice(x)")
def _slice_nothing(graph: Graph, node: Node) -> Value | None:
    (x,), op = node.operands, cast(Slice, node.op)
    if op.sizes == x.type.shape and all(s == 1 or n == 1 for s, n in zip(op.steps, op.sizes, strict=True)):
        return _if_same_type(node, x)
    inner = made_by(x, Slice)
    if inner is not None:
        starts = tuple(a + b * s for a, b, s in zip(inner.starts, op.starts, inner.steps, strict=True))
        steps = tuple(a * b for a, b in zip(inner.steps, op.steps, strict=True))
        both = Slice(starts, op.sizes, steps)
        return graph.add(both, only_operand(x), before=node)
    return None


@local("pad", equation="pad(x, zeros) = x; pad(pad(x, p, v), q, v) = pad(x, p+q, v)")
def _pad_nothing(graph: Graph, node: Node) -> Value | None:
    (x,), op = node.operands, cast(Pad, node.op)
    if not any(op.pads):
        return _if_same_type(node, x)
    inner = made_by(x, Pad)
    if inner is None or inner.mode != "constant" or op.mode != "constant" or inner.value != op.value:
        return None
    both = Pad(tuple(a + b for a, b in zip(inner.pads, op.pads, strict=True)), "constant", op.value)
    return graph.add(both, only_operand(x), before=node)


@local("reduce", equation="reduce(x, axes of size 1) = reshape(x) for sum, mean, max, min, prod")
def _reduce_nothing(graph: Graph, node: Node) -> Value | None:
    (x,), op = node.operands, cast(Reduce, node.op)
    if op.kind not in ("sum", "mean", "max", "min", "prod") or any(x.type.shape[a] != 1 for a in op.axes):
        return None
    if op.keepdims or not op.axes:
        return _if_same_type(node, x)
    return graph.add(Reshape(node.result.type.shape), x, before=node)


@local("max_pool", "avg_pool", equation="max_pool(x, window=1, stride 1, no pads) = x")
def _pool_nothing(graph: Graph, node: Node) -> Value | None:
    op = cast("MaxPool | AvgPool", node.op)
    if any(k != 1 for k in (*op.window, *op.strides)) or any(op.pads):
        return None
    return _if_same_type(node, node.operands[0])


@local("resize", equation="resize(x, own shape, scales=1) = x")
def _resize_nothing(graph: Graph, node: Node) -> Value | None:
    (x,), op = node.operands, cast(Resize, node.op)
    if op.sizes != x.type.shape or any(s != 1.0 for s in op.scales):
        return None
    return _if_same_type(node, x)


class Simplify(RulePass):
    """Remove ops without effect."""

    name = "simplify"
    rules = (
        _identity,
        _add_zero,
        _times_one,
        clip_nothing,
        _twice_undone,
        _with_itself,
        _cast_nothing,
        reshape_of_reshape,
        transpose_of_transpose,
        _transpose_of_ones,
        _expand_nothing,
        _concat_of_one,
        _concat_of_split,
        _concat_of_gathered,
        _split_of_one,
        _slice_nothing,
        _pad_nothing,
        _reduce_nothing,
        _pool_nothing,
        _resize_nothing,
    )
