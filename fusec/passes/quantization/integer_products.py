"""Multiply the integers of quantised operands, and fold their scales into one factor of the exact sums.

The float product of (q - z) * s and (p - y) * t follows from the integer product of q and p. Terms that constants give
are subtracted, and the rest is multiplied by s * t. cuDNN runs it with the scale, the bias, the activation and the next
rounding as one graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from fusec.ir import Array, DType, Graph, Node, TensorType, Value, quote
from fusec.ops import Cast, Conv, MatMul, Pad, pw
from fusec.passes.quantization.affine_values import Dequantised, Factors, dequantised
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import NoMatch, local, single_use
from fusec.system.dataclass import dataclass

SHIFT = 128  # between an unsigned byte and the signed one of the same bits


def signed(graph: Graph, q: Value, before: Node) -> Value:
    """Return signed integers, because products take no others: unsigned ones less 128."""
    if q.type.dtype is DType.I8:
        return q
    wide = graph.add(Cast(DType.F32), q, before=before)
    shifted = graph.add(pw("add"), wide, graph.constant(np.float32(-SHIFT), "shift", before), before=before)
    return graph.add(Cast(DType.I8), shifted, before=before)


def _signed_zero(found: Dequantised) -> float:
    """Return the zero point of the signed integers.

    Raises NoMatch if there are several.
    """
    if found.zero.number is None:
        raise NoMatch(f"{quote(found.q.name)} has several zero points", found.q)
    return found.zero.number - (0 if found.q.type.dtype is DType.I8 else SHIFT)


def centred(graph: Graph, found: Dequantised, before: Node) -> Value:
    """Return constant integers less their zero points.

    Raises NoMatch if a difference does not fit in 8 bits.
    """
    literal = found.q.literal
    assert literal is not None
    if found.symmetric and found.q.type.dtype is DType.I8:
        return found.q
    offset = found.zero.array(found.q.type.rank).astype(np.int16)
    less = literal.array - offset
    least, most = int(less.min(initial=0)), int(less.max(initial=0))
    if least < -128 or most > 127:
        raise NoMatch(f"less their zero point its weights reach from {least} to {most}, which 8 bits do not hold")
    type = found.q.type.with_dtype(DType.I8)
    return derive(graph, before, type, [literal], partial(_less, offset=offset), literal)


@recorded
def _less(array: Array, offset: Array) -> Array:
    return array.astype(np.int16) - offset


def operands(node: Node) -> tuple[Dequantised, Dequantised]:
    """Return the quantised operands of a product.

    Raises NoMatch if one is not quantised; the reason is "" if none is.
    """
    found = [dequantised(v) for v in node.operands]
    left, right = found
    if left is None and right is None:
        raise NoMatch("", node.operands[0])
    for one, value in zip(found, node.operands, strict=True):
        if one is None:
            what = "its weights are" if value.literal is not None else f"{quote(value.name)} is"
            raise NoMatch(f"{what} not quantised", value)
    assert left is not None and right is not None
    if left.q.literal is not None and right.q.literal is not None:
        raise NoMatch("", node.operands[0])
    return left, right


@local("conv", equation="conv((q - z)*s, p*t) = (cast(conv(q, p)) - z*sum(p))*(s*t), sums exact in i32, s a number")
def integer_convolution(graph: Graph, node: Node) -> Value | None:
    """Convolve integers. Pads are filled with the zero point, so that its term is constant.

    Exact up to the rounding of fp32, as the float product is.
    """
    image, filters = operands(node)
    op = node.op
    assert isinstance(op, Conv)
    if filters.q.literal is None:
        raise NoMatch("its weights are not constant", filters.q)
    if image.scale.number is None:
        raise NoMatch("its image has a scale for each channel", image.q)
    if filters.scale.axis not in (None, 0) or filters.zero.axis not in (None, 0):
        raise NoMatch("its weights have scales along another axis than the filters'", filters.q)
    zero = _signed_zero(image)
    if any(op.pads) and not -128 <= zero <= 127:
        raise NoMatch(
            f"its zero point {image.zero.number:g}, with which it is padded, is no number of its type", image.q
        )
    weight, x = centred(graph, filters, node), signed(graph, image.q, node)
    if zero and any(op.pads):
        n = len(op.strides)
        pads = (0, 0, *op.pads[:n], 0, 0, *op.pads[n:])
        x, op = graph.add(Pad(pads, "constant", zero), x, before=node), replace(op, pads=(0,) * 2 * n)
    sums = graph.add(op, x, weight, before=node)
    along = replace(filters.scale, axis=None if filters.scale.axis is None else 1)
    return _scaled(graph, node, sums, image.scale.times(along), _Shift(weight, zero, 0, 1))


@local("matmul", equation="matmul((q - z)*s, p*t) = (cast(matmul(q, p)) - z*sum(p))*(s*t), sums exact in i32")
def integer_matmul(graph: Graph, node: Node) -> Value | None:
    """Multiply matrices of integers; either operand may be constant, with a scale for each column (or row).

    Exact up to the rounding of fp32, as the float product is.
    """
    pair, rank = operands(node), node.result.type.rank
    zeros = [_signed_zero(found) if found.q.literal is None else 0.0 for found in pair]
    for place, found in enumerate(pair):
        dim = found.q.type.rank - 2 + place  # the dim that the product keeps
        axes = (None,) if found.q.literal is None else (None, dim)
        if found.scale.axis not in axes or found.zero.axis not in axes:
            raise NoMatch(
                f"{quote(found.q.name)} has several scales, along a dim that is summed or not constant", found.q
            )
        other = pair[1 - place].q
        if zeros[place] and (other.literal is None or other.type.rank != 2):
            raise NoMatch(f"{quote(found.q.name)} has a zero point, and the other operand is no constant matrix", other)
    scale, integers = Factors(np.ones(1)), list[Value]()
    for place, found in enumerate(pair):
        if found.q.literal is not None:
            integers.append(centred(graph, found, node))
        else:
            integers.append(signed(graph, found.q, node))
        scale = scale.times(replace(found.scale, axis=None if found.scale.axis is None else rank - 2 + place))
    sums = graph.add(MatMul(), *integers, before=node)
    place = 0 if zeros[0] else 1
    return _scaled(graph, node, sums, scale, _Shift(integers[1 - place], zeros[place], 1 - place, rank - 1 - place))


@local("cast", equation="cast(sub(p, t), f32) = sub(cast(p), cast(t)) for p an integer product less such terms")
def widen_before_terms(graph: Graph, node: Node) -> Value | None:
    """Scale the sums of a product in the step that computes them, also if terms of zero points are subtracted first.

    Exact below 2**24, as sums are in other rules.
    """
    sums = node.operands[0].node
    if node.op != Cast(DType.F32) or sums is None or sums.op.name != "sub" or sums.result.type.dtype is not DType.I32:
        raise NoMatch("no integers less a term", node.operands[0])
    at = sums
    while at is not None and at.op.name == "sub" and single_use(at.result):
        at = at.operands[0].node
    if at is None or not isinstance(at.op, (Conv, MatMul)) or not single_use(at.result):
        raise NoMatch("no product that is used once", node.operands[0])
    return graph.add(pw("sub"), *(_widened(graph, v, node) for v in sums.operands), before=node)


def _widened(graph: Graph, value: Value, before: Node) -> Value:
    """Return a term in f32. A product that makes it is in f32, too, so that cuDNN runs it next to the sums."""
    factors = value.node.operands if value.node is not None and value.node.op.name == "mul" else ()
    if not factors:
        return graph.add(Cast(DType.F32), value, before=before)
    return graph.add(pw("mul"), *(graph.add(Cast(DType.F32), v, before=before) for v in factors), before=before)


@dataclass(frozen=True)
class _Shift:
    """The term zero * sum(weight), a sum for each index along `axis` of the weight, `result_axis` of the product."""

    weight: Value
    zero: float
    axis: int
    result_axis: int


def _scaled(graph: Graph, node: Node, sums: Value, scale: Factors, shift: _Shift) -> Value:
    """Return the float product from the integer sums: less the term of the zero point, which is whole, times scale."""
    rank = node.result.type.rank
    y = graph.insert(Cast(DType.F32), [sums], before=node, types=[node.result.type]).result
    if shift.zero:
        y = graph.add(pw("add"), y, _term(graph, node, shift, rank), before=node)
    return graph.add(pw("mul"), y, graph.constant(scale.array(rank), "scale", node), before=node)


def _term(graph: Graph, node: Node, shift: _Shift, rank: int) -> Value:
    """Return -zero * sum(weight) as a constant that broadcasts with the product."""
    assert shift.weight.literal is not None
    count = shift.weight.type.shape[shift.axis]
    shape = tuple(count if i == shift.result_axis else 1 for i in range(rank))
    sums = partial(_sums, axis=shift.axis, zero=shift.zero, shape=np.array(shape))
    literal = shift.weight.literal
    return derive(graph, node, TensorType(shape, DType.F32), [literal], sums, f"{node.result.name}.zero_point")


@recorded
def _sums(weight: Array, axis: int, zero: float, shape: Array) -> Array:
    rest = tuple(i for i in range(weight.ndim) if i != axis)
    return (-zero * weight.astype(np.int64).sum(axis=rest)).reshape(shape)


def reasons(graph: Graph) -> Iterator[tuple[Node, str]]:
    """Yield products of floats, and why they stay in floats; the reason is "" if no operand is quantised.

    graph: one to which the rules were applied, as long as they matched.
    """
    for node in list(graph.nodes):
        rule = {"conv": integer_convolution, "matmul": integer_matmul}.get(node.op.name)
        if rule is None or not node.operands[0].type.dtype.is_float:
            continue
        try:
            rule.apply(graph, node)
        except NoMatch as miss:
            yield node, miss.reason


RULES = (integer_convolution, integer_matmul, widen_before_terms)
