"""Bring equivalent spellings into one form, so that later rules need one pattern each.

Constants are on the right; x - c is x + (-c); x / c is x * (1/c) where that is as exact; limits are clip and relu;
x / sqrt(y) is x * rsqrt(y).
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from fusec.ir import Array, Graph, Literal, Node, Value
from fusec.ops import Expand, Gather, Reshape, Slice, pw
from fusec.ops.pointwise import CLASSES
from fusec.passes.base import RulePass
from fusec.passes.cleanup.reduced_dims import keep_reduced_dims
from fusec.passes.cleanup.reverse_filters import reverse_filters
from fusec.passes.cleanup.simplify import clip_nothing
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.derived_constants import EAGER_BYTES, derive
from fusec.passes.rewriting.expression import Symbol, call, symbol
from fusec.passes.rewriting.pattern import Attribute, Match, Ops, Scalar, Sides, TracedTensor, rule
from fusec.passes.rewriting.rewriter import local, made_by, only_operand
from fusec.passes.rewriting.value_facts import never_negative


@local(
    "add", "mul", "max", "min", "cmp_eq", "cmp_neq", equation="add(c, x) = add(x, c), and so for every commutative op"
)
def _constants_right(graph: Graph, node: Node) -> Value | None:
    a, b = node.operands
    if a.literal is None or b.literal is not None:
        return None
    return graph.add(node.op, b, a, before=node)


@local("sub", equation="sub(x, c) = add(x, -c)")
def _subtract_constant(graph: Graph, node: Node) -> Value | None:
    x, c = node.operands
    if c.literal is None or x.literal is not None or not c.type.dtype.is_float:
        return None
    negative = derive(graph, node, c.type, [c.literal], _negative, c.literal)
    return graph.add(pw("add"), x, negative, before=node)


@recorded
def _negative(addend: Array) -> Array:
    return np.negative(addend)


@local("div", equation="div(x, c) = mul(x, 1/c), in 16 bits only for powers of two")
def _divide_by_constant(graph: Graph, node: Node) -> Value | None:
    x, c = node.operands
    if c.literal is None or x.literal is not None or not _has_reciprocal(c.literal):
        return None
    inverse = derive(graph, node, c.type, [c.literal], _reciprocal, c.literal)
    return graph.add(pw("mul"), x, inverse, before=node)


@recorded
def _reciprocal(divisor: Array) -> Array:
    return 1.0 / divisor.astype(np.float64)


def _has_reciprocal(divisor: Literal) -> bool:
    """Tell if multiplying by 1/c is as good as dividing.

    The error is half a unit in the last place of the result with 24 bits or more; with fewer bits it must be exact.
    """
    dtype = divisor.type.dtype
    if not dtype.is_float or divisor.type.nbytes > EAGER_BYTES:
        return False
    c = divisor.array.astype(np.float64)
    if dtype.itemsize == 2:
        mantissa, _ = np.frexp(c)
        return bool((np.abs(mantissa) == 0.5).all() and (np.abs(c) < 2.0**14).all() and (np.abs(c) > 2.0**-14).all())
    return bool((np.abs(c) < 1e30).all() and (np.abs(c) > 1e-30).all())


@local("gather", equation="gather(x, one index) = reshape(slice(x))")
def _gather_one(graph: Graph, node: Node) -> Value | None:
    (x, index), axis = node.operands, cast(Gather, node.op).axis % node.operands[0].type.rank
    picked = index.literal
    if picked is None or picked.type.size != 1:
        return None
    at = int(picked.array.reshape(-1)[0])
    at += x.type.shape[axis] if at < 0 else 0
    if not 0 <= at < x.type.shape[axis]:
        return None
    starts = tuple(at if i == axis else 0 for i in range(x.type.rank))
    sizes = tuple(1 if i == axis else d for i, d in enumerate(x.type.shape))
    part = graph.add(Slice(starts, sizes, (1,) * x.type.rank), x, before=node)
    return graph.add(Reshape(node.result.type.shape), part, before=node)


@local(
    *(name for name, op in CLASSES.items() if op.row.arity > 1),
    equation="f(expand(x), y) = f(x, y) for pointwise f, if the result keeps its shape",
)
def _expand_operand(graph: Graph, node: Node) -> Value | None:
    operands = [only_operand(v) if made_by(v, Expand) else v for v in node.operands]
    if len(operands) < 2 or operands == list(node.operands):
        return None
    if not node.op.infer(*(v.type for v in operands))[0].same_value_type(node.result.type):
        return None
    return graph.add(node.op, *operands, before=node)


# limits -------------------------------------------------------------------------------------------------


@rule(dtypes="any")
def relu_of_relu(p: Ops, x: TracedTensor) -> Sides:
    return p.relu(p.relu(x)), p.relu(x)


@rule(dtypes="any")
def max_with_zero(p: Ops, x: TracedTensor) -> Sides:
    return p.max(x, 0.0), p.relu(x)


@rule(dtypes="any")
def clip_from_zero(p: Ops, x: TracedTensor) -> Sides:
    return p.clip(x, min=0.0), p.relu(x)


@rule
def max_with_number(p: Ops, x: TracedTensor, a: Scalar) -> Sides:
    return p.max(x, a), p.clip(x, min=a)


@rule
def min_with_number(p: Ops, x: TracedTensor, b: Scalar) -> Sides:
    return p.min(x, b), p.clip(x, max=b)


def _limits_overlap(m: Match) -> None:
    a, b, c, d = (m.known.get(k, v) for k, v in (("a", 0.0), ("b", math.inf), ("c", 0.0), ("d", math.inf)))
    m.require(max(a, c) <= min(b, d), f"the limits {a:g}..{b:g} and {c:g}..{d:g} do not overlap", "x")


ZERO = symbol(0.0)


def _max(a: Symbol, b: Symbol) -> Symbol:
    return call("max", max, a, b)


def _min(a: Symbol, b: Symbol) -> Symbol:
    return call("min", min, a, b)


@rule(where=_limits_overlap, sample={"a": -0.5, "b": 1.5, "c": 0.25, "d": 2.0})
def clip_of_clip(p: Ops, x: TracedTensor, a: Attribute, b: Attribute, c: Attribute, d: Attribute) -> Sides:
    return p.clip(p.clip(x, min=a, max=b), min=c, max=d), p.clip(x, min=_max(a, c), max=_min(b, d))


@rule(where=_limits_overlap, sample={"a": -0.5, "b": 1.5})
def relu_of_clip(p: Ops, x: TracedTensor, a: Attribute, b: Attribute) -> Sides:
    return p.relu(p.clip(x, min=a, max=b)), p.clip(x, min=_max(a, ZERO), max=b)


@rule(where=_limits_overlap, sample={"a": -0.5, "b": 1.5})
def clip_of_relu(p: Ops, x: TracedTensor, a: Attribute, b: Attribute) -> Sides:
    return p.clip(p.relu(x), min=a, max=b), p.clip(x, min=_max(a, ZERO), max=b)


@local("relu", equation="relu(x) = x where x is never negative")
def _relu_of_positive(graph: Graph, node: Node) -> Value | None:
    (x,) = node.operands
    return x if never_negative(x) and x.type == node.result.type else None


# powers and roots ---------------------------------------------------------------------------------------


@rule
def square(p: Ops, x: TracedTensor) -> Sides:
    return p.pow(x, 2.0), p.mul(x, x)


@rule
def cube(p: Ops, x: TracedTensor) -> Sides:
    return p.pow(x, 3.0), p.mul(p.mul(x, x), x)


@rule
def power_minus_one(p: Ops, x: TracedTensor) -> Sides:
    return p.pow(x, -1.0), p.reciprocal(x)


def _x_never_negative(m: Match) -> None:
    m.require(never_negative(m["x"]), "may be negative", "x")


_positive = {"x": "positive"}


@rule(where=_x_never_negative, sample=_positive)
def root(p: Ops, x: TracedTensor) -> Sides:
    return p.pow(x, 0.5), p.sqrt(x)


@rule(where=_x_never_negative, sample=_positive)
def root_reciprocal(p: Ops, x: TracedTensor) -> Sides:
    return p.pow(x, -0.5), p.rsqrt(x)


@rule
def one_over(p: Ops, x: TracedTensor) -> Sides:
    return p.div(1.0, x), p.reciprocal(x)


@rule(sample=_positive)
def reciprocal_of_root(p: Ops, x: TracedTensor) -> Sides:
    return p.reciprocal(p.sqrt(x)), p.rsqrt(x)


@rule(sample={"y": "positive"})
def divide_by_root(p: Ops, x: TracedTensor, y: TracedTensor) -> Sides:
    return p.div(x, p.sqrt(y)), p.mul(x, p.rsqrt(y))


# signs --------------------------------------------------------------------------------------------------


@rule(dtypes="any")
def add_negative(p: Ops, x: TracedTensor, y: TracedTensor) -> Sides:
    return p.add(x, p.neg(y)), p.sub(x, y)


@rule(dtypes="any")
def subtract_negative(p: Ops, x: TracedTensor, y: TracedTensor) -> Sides:
    return p.sub(x, p.neg(y)), p.add(x, y)


class Canonicalise(RulePass):
    """Bring equivalent spellings into one form."""

    name = "canonicalise"
    rules = (
        _constants_right,
        _subtract_constant,
        _divide_by_constant,
        _gather_one,
        _expand_operand,
        keep_reduced_dims,
        reverse_filters,
        _relu_of_positive,
        relu_of_relu,
        clip_of_clip,
        relu_of_clip,
        clip_of_relu,
        clip_from_zero,
        max_with_zero,
        max_with_number,
        min_with_number,
        clip_nothing,
        square,
        cube,
        power_minus_one,
        root,
        root_reciprocal,
        one_over,
        reciprocal_of_root,
        divide_by_root,
        add_negative,
        subtract_negative,
    )
