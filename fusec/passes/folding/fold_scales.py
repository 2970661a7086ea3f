"""Fold constant factors into the weights next to them, and constant addends into one.

Folded weights are computed in float64 and rounded once. Sums and products of constants are reassociated, which is
exact up to rounding. Integers stay as they are.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from fusec.errors import VerifyError
from fusec.ir import Array, Graph, Node, Op, TensorType, Value
from fusec.ops import LINEAR_OPS, Conv, MatMul, pw
from fusec.ops.spec import broadcast
from fusec.passes.base import RulePass
from fusec.passes.rewriting.affine_ops import scale_inputs, scale_outputs, weight_place
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.derived_constants import derive, overflows, per_channel
from fusec.passes.rewriting.rewriter import NoMatch, local, single_use


@local("mul", equation="mul(conv(x, w), f) = conv(x, f*w) per output channel; matmul too, per column or row")
def _scale_after(graph: Graph, node: Node) -> Value | None:
    y, f = node.operands
    return _scaled(graph, y, f, node) if _is_linear(y) and y.type == node.result.type else None


@local("mul", equation="mul(add(conv(x, w), b), f) = add(conv(x, f*w), f*b)")
def _scale_after_bias(graph: Graph, node: Node) -> Value | None:
    total, f = node.operands
    y, b = _operands(total, "add")
    if b.literal is None or not _is_linear(y) or not y.type == total.type == node.result.type:
        return None
    bias = _combined(graph, pw("mul"), b, f, node)
    return graph.add(pw("add"), _scaled(graph, y, f, node), bias, before=node)


@local("mul", equation="mul(add(mul(x, a), b), f) = add(mul(x, a * f), b * f)")
def _line_of_line(graph: Graph, node: Node) -> Value | None:
    total, f = node.operands
    y, b = _operands(total, "add")
    x, a = _operands(y, "mul")
    if any(v.literal is None for v in (a, b, f)) or not x.type == y.type == total.type == node.result.type:
        return None
    slope, shift = _combined(graph, pw("mul"), a, f, node), _combined(graph, pw("mul"), b, f, node)
    scaled = graph.insert(pw("mul"), [x, slope], before=node, types=[y.type]).result
    return graph.add(pw("add"), scaled, shift, before=node)


@local("add", "mul", equation="add(add(x, a), b) = add(x, a + b); mul(mul(x, a), b) = mul(x, a * b)")
def merge_constants(graph: Graph, node: Node) -> Value | None:
    inner, b = node.operands
    x, a = _operands(inner, node.op.name)
    if a.literal is None or b.literal is None or x.literal is not None:
        return None
    if not x.type == inner.type == node.result.type:
        return None
    both = _combined(graph, pw(node.op.name), a, b, node)
    return graph.add(node.op, x, both, before=node)


@local(
    *(op.name for op in LINEAR_OPS),
    equation="conv(mul(x, f), w) = conv(x, f*w) per input channel; matmul too, per column of x",
)
def _scale_before(graph: Graph, node: Node) -> Value | None:
    scaled, w = node.operands
    x, f = _operands(scaled, "mul")
    axis = _input_axis(node.op, scaled.type)
    if w.literal is None or x.type != scaled.type or (factor := per_channel(f, x.type.shape, axis)) is None:
        return None
    return scale_inputs(graph, node, x, factor, before=node)


@local("conv", "matmul", equation="conv(add(x, b), w) = add(conv(x, w), conv(b, w)) without pads, x not a bare conv")
def _shift_before(graph: Graph, node: Node) -> Value | None:
    shifted, w = node.operands
    x, b = _operands(shifted, "add")
    # a bias next to its own convolution costs nothing there
    if x.type != shifted.type or _is_linear(x) or (isinstance(node.op, Conv) and any(node.op.pads)):
        return None
    axis = _input_axis(node.op, x.type)
    vector = per_channel(b, x.type.shape, axis)
    place = _output_shape(node)
    if w.literal is None or vector is None or place is None:
        return None
    type, through = TensorType(place, node.result.type.dtype), partial(_through, op=node.op, vector=vector)
    if overflows(type, [w.literal], through):
        return None
    plain = graph.insert(node.op, [x, w], before=node, types=[node.result.type], names=[node.result.name]).result
    bias = derive(graph, node, type, [w.literal], through, f"{node.result.name}.bias")
    return graph.add(pw("add"), plain, bias, before=node)


@recorded
def _through(weight: Array, op: Op, vector: Array) -> Array:
    """Compute the result of a linear op on the same vector of channels everywhere."""
    if isinstance(op, MatMul):
        return np.matmul(vector, weight.astype(np.float64))
    assert isinstance(op, Conv)
    taps = weight.astype(np.float64).sum(axis=tuple(range(2, weight.ndim)))
    per_group = taps.reshape(op.groups, weight.shape[0] // op.groups, weight.shape[1])
    return (per_group * vector.reshape(op.groups, 1, -1)).sum(axis=2)


def _output_shape(node: Node) -> tuple[int, ...] | None:
    """Return the shape of a per-channel constant for the node's result."""
    rank, channels = node.result.type.rank, node.operands[1].type.shape
    if isinstance(node.op, MatMul):
        return (channels[-1],) if len(channels) == 2 else None
    return (1, channels[0], *([1] * (rank - 2)))


def _input_axis(op: Op, x: TensorType) -> int:
    """Return the dim of x that an op sums over."""
    return x.rank - 1 if isinstance(op, MatMul) else 1


def _operands(value: Value, name: str) -> tuple[Value, ...]:
    """Return the operands of the op of that name that computes a floating-point value.

    Raises NoMatch if another op does, or the value is not used once.
    """
    if value.node is None or value.node.op.name != name or not single_use(value) or not value.type.dtype.is_float:
        raise NoMatch(f"not the result of one {name}, or used elsewhere too", value)
    return value.node.operands


def _is_linear(value: Value) -> bool:
    """Return True for a convolution or product by a constant, used once."""
    node = value.node
    if node is None or not isinstance(node.op, LINEAR_OPS) or not single_use(value):
        return False
    return any(v.literal is not None for v in node.operands)


def _scaled(graph: Graph, y: Value, f: Value, before: Node) -> Value:
    """Return y * f with the factor in the weights of the linear node that computes y.

    Raises NoMatch if no weight takes the factor.
    """
    node = y.node
    assert node is not None
    rank = y.type.rank
    axes = (1,) if not isinstance(node.op, MatMul) else (rank - 1, rank - 2)
    for axis in axes:
        factor = per_channel(f, y.type.shape, axis) if weight_place(node, axis) is not None else None
        if factor is not None and np.isfinite(factor).all():
            scaled = scale_outputs(graph, node, factor, axis, before)
            if scaled is not None:
                return scaled
    raise NoMatch("no weight takes the factor", f)


def _combined(graph: Graph, op: Op, a: Value, b: Value, before: Node) -> Value:
    """Return the constant a + b or a * b.

    Raises NoMatch if it would be larger than both, overflow, or be no float.
    """
    if a.literal is None or b.literal is None or not a.type.dtype.is_float:
        raise NoMatch("not floating-point constants", b)
    try:
        type = TensorType(broadcast([a.type.shape, b.type.shape]), a.type.dtype)
    except VerifyError as error:
        raise NoMatch(str(error), b) from error
    if type.size > max(a.type.size, b.type.size):
        raise NoMatch("larger than both", b)
    larger, order = (a.literal, a.type.order) if a.type.size >= b.type.size else (b.literal, b.type.order)
    if len(order) == type.rank:
        type = type.with_order(order)
    combine = partial(_in_float64, op=op)
    if overflows(type, [a.literal, b.literal], combine):
        raise NoMatch("overflows", b)
    return derive(graph, before, type, [a.literal, b.literal], combine, larger)


@recorded
def _in_float64(x: Array, y: Array, op: Op) -> Array:
    return op.reference(np, x.astype(np.float64), y.astype(np.float64))[0]


class FoldScales(RulePass):
    """Fold constant factors into the weights next to them, and constant addends into one."""

    name = "fold_scales"
    rules = (
        merge_constants,
        _line_of_line,
        _scale_after,
        _scale_after_bias,
        _scale_before,
        _shift_before,
    )
