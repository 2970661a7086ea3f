"""Fold constant factors into the weights next to them, and constant addends into one.

Folded weights are computed in float64 and rounded once. Sums and products of constants are reassociated, which is
exact up to rounding. Integers stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from fusec.errors import VerifyError
from fusec.ir import Array, Graph, Node, Op, TensorType, Value
from fusec.ops import Conv, ConvTranspose, MatMul, pw
from fusec.ops.spec import broadcast
from fusec.passes.base import Options
from fusec.passes.rewriting.affine_ops import scale_inputs, scale_outputs, single_use, weight_place
from fusec.passes.rewriting.derived_constants import contents, derive, overflows, per_channel
from fusec.passes.rewriting.rewriter import Rewriter, local, rewrite

LINEAR = ("conv", "conv_transpose", "matmul")


@local("mul", equation="mul(conv(x, w), f) = conv(x, f*w) per output channel; matmul too, per column or row")
def _scale_after(graph: Graph, node: Node) -> Value | None:
    y, f = node.operands
    return _scaled(graph, y, f, node) if _is_linear(y) and y.type == node.result.type else None


@local("mul", equation="mul(add(conv(x, w), b), f) = add(conv(x, f*w), f*b)")
def _scale_after_bias(graph: Graph, node: Node) -> Value | None:
    total, f = node.operands
    if not _made_once(total, "add") or total.type != node.result.type:
        return None
    y, b = cast(Node, total.node).operands
    if b.literal is None or not _is_linear(y) or y.type != total.type:
        return None
    bias = _combined(graph, np.multiply, b, f, node)
    scaled = None if bias is None else _scaled(graph, y, f, node)
    if scaled is None or bias is None:
        return None
    return graph.insert(pw("add"), [scaled, bias], before=node, types=[node.result.type]).result


@local("mul", equation="mul(add(mul(x, a), b), f) = add(mul(x, a * f), b * f)")
def _line_of_line(graph: Graph, node: Node) -> Value | None:
    total, f = node.operands
    if f.literal is None or not _made_once(total, "add") or total.type != node.result.type:
        return None
    y, b = cast(Node, total.node).operands
    if b.literal is None or not _made_once(y, "mul") or y.type != total.type:
        return None
    x, a = cast(Node, y.node).operands
    if a.literal is None or x.type != y.type:
        return None
    slope, shift = _combined(graph, np.multiply, a, f, node), _combined(graph, np.multiply, b, f, node)
    if slope is None or shift is None:
        return None
    scaled = graph.insert(pw("mul"), [x, slope], before=node, types=[y.type]).result
    return graph.insert(pw("add"), [scaled, shift], before=node, types=[node.result.type]).result


@local("add", "mul", equation="add(add(x, a), b) = add(x, a + b); mul(mul(x, a), b) = mul(x, a * b)")
def merge_constants(graph: Graph, node: Node) -> Value | None:
    inner, b = node.operands
    if b.literal is None or not _made_once(inner, node.op.name) or inner.type != node.result.type:
        return None
    x, a = cast(Node, inner.node).operands
    if a.literal is None or x.literal is not None or x.type != inner.type:
        return None
    both = _combined(graph, np.add if node.op.name == "add" else np.multiply, a, b, node)
    if both is None:
        return None
    return graph.insert(node.op, [x, both], before=node, types=[node.result.type]).result


@local(*LINEAR, equation="conv(mul(x, f), w) = conv(x, f*w) per input channel; matmul too, per column of x")
def _scale_before(graph: Graph, node: Node) -> Value | None:
    scaled, w = node.operands
    if w.literal is None or not _made_once(scaled, "mul"):
        return None
    x, f = cast(Node, scaled.node).operands
    axis = _input_axis(node.op, scaled.type)
    if x.type != scaled.type or (factor := per_channel(f, x.type.shape, axis)) is None:
        return None
    return scale_inputs(graph, node, x, factor, before=node)


@local("conv", "matmul", equation="conv(add(x, b), w) = add(conv(x, w), conv(b, w)) without pads, x not a bare conv")
def _shift_before(graph: Graph, node: Node) -> Value | None:
    shifted, w = node.operands
    if w.literal is None or not _made_once(shifted, "add"):
        return None
    x, b = cast(Node, shifted.node).operands
    # a bias next to its own convolution costs nothing there
    if x.type != shifted.type or _is_linear(x) or (isinstance(node.op, Conv) and any(node.op.pads)):
        return None
    axis = _input_axis(node.op, x.type)
    vector = per_channel(b, x.type.shape, axis)
    place = _output_shape(node)
    if vector is None or place is None:
        return None
    type, through = TensorType(place, node.result.type.dtype), _Through(node.op, vector)
    if overflows(type, [w.literal], through):
        return None
    plain = graph.insert(node.op, [x, w], before=node, types=[node.result.type], names=[node.result.name]).result
    bias = derive(graph, node, type, [w.literal], through, f"{node.result.name}.bias")
    return graph.insert(pw("add"), [plain, bias], before=node, types=[node.result.type]).result


class _Through:
    """Computes the result of a linear op on the same vector of channels everywhere."""

    def __init__(self, op: Op, vector: np.ndarray[Any, Any]):
        self.op = op
        self.vector = vector
        self.key = (repr(op), contents(vector))

    def __call__(self, weight: Array) -> Array:
        if isinstance(self.op, MatMul):
            return np.matmul(self.vector, weight.astype(np.float64))
        assert isinstance(self.op, Conv)
        groups = self.op.groups
        taps = weight.astype(np.float64).sum(axis=tuple(range(2, weight.ndim)))
        per_group = taps.reshape(groups, weight.shape[0] // groups, weight.shape[1])
        return (per_group * self.vector.reshape(groups, 1, -1)).sum(axis=2)


def _output_shape(node: Node) -> tuple[int, ...] | None:
    """Return the shape of a per-channel constant for the node's result."""
    rank, channels = node.result.type.rank, node.operands[1].type.shape
    if isinstance(node.op, MatMul):
        return (channels[-1],) if len(channels) == 2 else None
    return (1, channels[0], *([1] * (rank - 2)))


def _input_axis(op: Op, x: TensorType) -> int:
    """Return the dim of x that an op sums over."""
    return x.rank - 1 if isinstance(op, MatMul) else 1


def _made_once(value: Value, name: str) -> bool:
    """Return True if that op computes a floating-point value that is used once."""
    return value.node is not None and value.node.op.name == name and single_use(value) and value.type.dtype.is_float


def _is_linear(value: Value) -> bool:
    """Return True for a convolution or product by a constant, used once."""
    node = value.node
    if node is None or not isinstance(node.op, Conv | ConvTranspose | MatMul) or not single_use(value):
        return False
    return any(v.literal is not None for v in node.operands)


def _scaled(graph: Graph, y: Value, f: Value, before: Node) -> Value | None:
    """Return y * f with the factor in the weights of the linear node that computes y."""
    node = y.node
    assert node is not None
    rank = y.type.rank
    axes = (1,) if not isinstance(node.op, MatMul) else (rank - 1, rank - 2)
    for axis in axes:
        if weight_place(node, axis) is None or (factor := per_channel(f, y.type.shape, axis)) is None:
            continue
        return scale_outputs(graph, node, factor, axis, before) if np.isfinite(factor).all() else None
    return None


def _combined(graph: Graph, compute: Any, a: Value, b: Value, before: Node) -> Value | None:
    """Return the constant a + b or a * b; None if it would be larger than both, overflow, or be no float."""
    if a.literal is None or b.literal is None or not a.type.dtype.is_float:
        return None
    try:
        type = TensorType(broadcast([a.type.shape, b.type.shape]), a.type.dtype)
    except VerifyError:
        return None
    if type.size > max(a.type.size, b.type.size):
        return None
    larger, order = (a.literal, a.type.order) if a.type.size >= b.type.size else (b.literal, b.type.order)
    if len(order) == type.rank:
        type = type.with_order(order)

    def combine(x: Array, y: Array) -> Array:
        return compute(x.astype(np.float64), y.astype(np.float64))

    if overflows(type, [a.literal, b.literal], combine):
        return None
    return derive(graph, before, type, [a.literal, b.literal], combine, larger)


RULES: tuple[Rewriter, ...] = (
    merge_constants,
    _line_of_line,
    _scale_after,
    _scale_after_bias,
    _scale_before,
    _shift_before,
)


@dataclass(frozen=True)
class FoldScales:
    """Fold constant factors into the weights next to them, and constant addends into one."""

    name: ClassVar[str] = "fold_scales"
    rules: ClassVar[tuple[Rewriter, ...]] = RULES

    def run(self, graph: Graph, options: Options) -> None:
        rewrite(graph, RULES, options.disable)
