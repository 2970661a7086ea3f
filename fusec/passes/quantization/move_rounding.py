"""Move the rounding to integers up to the step that computes its operand, and limit integers where they are rounded.

The rules are exact. Only `unrounded_addend` leaves out a rounding.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fusec.ir import DType, Graph, Node, Value
from fusec.ops import Cast, Concat, Expand, MaxPool, Pad, Pointwise, Reshape, Slice, Transpose, pw
from fusec.passes.quantization.affine_values import MOST_FACTORS, Quantised, dequantise, factors, quantised
from fusec.passes.quantization.integer_products import SHIFT
from fusec.passes.quantization.move_scales import one_scale
from fusec.passes.rewriting.rewriter import NoMatch, local, single_use

MOVES = (Concat, Expand, MaxPool, Pad, Reshape, Slice, Transpose)


@local(
    "relu",
    "clip",
    equation="relu((cast(clip(x, a, b)) - z)*s) = (cast(clip(x, max(a, z), b)) - z)*s; also clip",
)
def limit_integers(graph: Graph, node: Node) -> Value | None:
    """Limit integers where they are rounded, which takes no op of its own."""
    found = one_scale(node.operands[0])
    limits = {"min": 0.0, "max": math.inf} if node.op.name == "relu" else node.op.attributes
    scale, zero = found.scale.number, found.zero.number
    rounded = None if found.q.node is None else quantised(found.q.node)
    if rounded is None or scale is None or zero is None:
        raise NoMatch("not rounded before", found.q)
    low, high = (_whole(limits[k], scale, zero) for k in ("min", "max"))
    low, high = max(rounded.low, low), min(rounded.high, high)
    if low > high:
        raise NoMatch("limits that leave nothing", found.q)
    assert found.q.node is not None
    clip = found.q.node.operands[0].node
    assert clip is not None
    limited = graph.add(pw("clip", min=low, max=high), clip.operands[0], before=node)
    q = graph.add(Cast(found.q.type.dtype), limited, before=node)
    return dequantise(graph, replace(found, q=q), node)


def _whole(limit: float, scale: float, zero: float) -> float:
    """Return the integer whose float is a limit.

    Raises NoMatch if there is none.
    """
    if math.isinf(limit):
        return limit
    whole = limit / scale + zero
    if round(whole) != whole or np.float32(round(whole) - zero) * np.float32(scale) != np.float32(limit):
        raise NoMatch("a limit between two integers")
    return whole


@local("cast", equation="cast(clip(round((q - z)*s / s) + z)) = q, for an equal type")
def requantise_same(graph: Graph, node: Node) -> Value | None:
    """Drop a float that is rounded to the integers from which it was made. |q - z| is small, so that s cancels."""
    rounded = _rounded(node)
    found = one_scale(rounded.x)
    info = np.iinfo(node.result.type.dtype.numpy)
    if found.q.type.dtype is not node.result.type.dtype or (rounded.low, rounded.high) != (info.min, info.max):
        raise NoMatch("another type, or limits", found.q)
    if not (found.zero.equals(rounded.zero) and found.scale.equals(rounded.scale)):
        raise NoMatch("another scale or zero point", found.q)
    return found.q if found.q.type == node.result.type else None


@local(
    "cast",
    equation="cast(f(cast(clip(x, a, b), u8)), f32) = cast(f(cast(clip(x - 128, a - 128, b - 128), i8)), f32) + 128 "
    "for f that moves elements, or max_pool",
)
def round_to_signed(graph: Graph, node: Node) -> Value | None:
    """Round to signed bytes, because integer products take no others. x is a whole number, so both are exact."""
    q = node.operands[0]
    if node.op != Cast(DType.F32) or q.type.dtype is not DType.U8:
        raise NoMatch("not from unsigned bytes", q)
    made = _made(q)
    if any(not _reads_as_float(user) for v in made for user in v.users):
        raise NoMatch("the bytes themselves are used", q)
    wide = graph.add(Cast(DType.F32), _signed(graph, q, node), before=node)
    return graph.add(pw("add"), wide, graph.constant(np.float32(SHIFT), "shift", node), before=node)


def _made(q: Value) -> list[Value]:
    """Return unsigned bytes and those from which they are moved, back to their rounding.

    Raises NoMatch if they are not rounded, or not by a whole zero point.
    """
    made = q.node
    if made is not None and isinstance(made.op, MOVES):
        return [q, *(v for operand in made.operands for v in _made(operand))]
    clip = made.operands[0].node if made is not None and isinstance(made.op, Cast) else None
    if clip is None or clip.op.name != "clip" or not _is_whole(clip.operands[0]):
        raise NoMatch("not rounded, or its zero point is no integer", q)
    return [q]


def _is_whole(value: Value) -> bool:
    """Tell if a float is known to be an integer."""
    node, literal = value.node, value.literal
    if value.type.dtype is not DType.F32:
        return False
    if literal is not None:
        return literal.type.size <= MOST_FACTORS and bool((literal.array == np.rint(literal.array)).all())
    if node is None:
        return False
    if isinstance(node.op, Cast):
        return node.operands[0].type.dtype.is_int
    return node.op.name == "round" or (node.op.name in ("add", "sub") and all(map(_is_whole, node.operands)))


def _reads_as_float(user: Node) -> bool:
    """Tell if a node only widens unsigned bytes, also after moving them."""
    if isinstance(user.op, MOVES):
        return all(map(_reads_as_float, user.result.users))
    return user.op == Cast(DType.F32)


def _signed(graph: Graph, q: Value, before: Node) -> Value:
    """Round to signed bytes what was rounded to unsigned ones, and move them in the same way."""
    made = q.node
    assert made is not None
    if isinstance(made.op, MOVES):
        op = replace(made.op, value=made.op.value - SHIFT) if isinstance(made.op, Pad) else made.op
        return graph.add(op, *(_signed(graph, v, before) for v in made.operands), before=before)
    clip = made.operands[0].node
    assert clip is not None
    limits = clip.op.attributes
    low, high = max(limits["min"], 0.0) - SHIFT, min(limits["max"], 255.0) - SHIFT
    shift = graph.constant(np.float32(-SHIFT), "shift", before)
    moved = graph.add(pw("add"), clip.operands[0], shift, before=before)
    limited = graph.add(pw("clip", min=low, max=high), moved, before=before)
    return graph.add(Cast(DType.I8), limited, before=before)


@local("cast", equation="q(f(x)) = f(q(x)) for q = cast(clip(round(x / s) + z)) and f max_pool or concat")
def quantise_before(graph: Graph, node: Node) -> Value | None:
    """Round before a pool or concat, in the step that makes its operand; then bytes are moved, not floats."""
    rounded = _rounded(node)
    made = rounded.x.node
    if made is None or not isinstance(made.op, (MaxPool, Concat)) or not single_use(rounded.x):
        raise NoMatch("no pool or concat, or used elsewhere too", rounded.x)
    if rounded.scale.number is None or rounded.zero.number is None:
        raise NoMatch("several scales", rounded.x)
    sequence, at = [node], node.operands[0]
    while at is not rounded.x:
        assert at.node is not None
        sequence.append(at.node)
        at = next(v for v in at.node.operands if v.literal is None)
    parts: list[Value] = []
    for value in made.operands:
        before, part = rounded.x, value
        for step in reversed(sequence):
            part = graph.add(step.op, *(part if v is before else v for v in step.operands), before=node)
            before = step.result
        parts.append(part)
    return graph.add(made.op, *parts, before=node)


@local("add", equation="add(dq(q(x)), y) = add(clip(x, a, b), y) where the sum is rounded to steps at least as large")
def unrounded_addend(graph: Graph, node: Node) -> Value | None:
    """Leave out the rounding between a product and the residual that is added, so that one step computes both.

    The limits stay. The sum differs by half a step of the addend, so that its own rounding differs by one step at most.
    """
    left, right = (one_scale(v) for v in node.operands)
    step = _next_step(node.result)
    # the other operand is stored: one that others read, too, or else the second
    for place in (0, 1) if _reads(left.q) <= _reads(right.q) else (1, 0):
        found, operand = (left, right)[place], node.operands[place]
        rounded = None if found.q.node is None else quantised(found.q.node)
        if rounded is None or not single_use(operand) or _reads(found.q) != 1 or not single_use(found.q):
            continue
        made, scale, zero = rounded.x.node, found.scale.number, found.zero.number
        if made is None or not isinstance(made.op, Pointwise) or not single_use(rounded.x):
            continue
        if scale is None or zero is None or scale > step or not rounded.scale.equals(found.scale):
            continue
        low, high = ((limit - zero) * scale for limit in (rounded.low, rounded.high))
        x = graph.add(pw("clip", min=low, max=high), rounded.x, before=node)
        return graph.add(node.op, *(x if i == place else v for i, v in enumerate(node.operands)), before=node)
    raise NoMatch("both are stored, or their steps are larger than the sum's", node.result)


def _reads(q: Value) -> int:
    return len(q.uses)


def _next_step(value: Value) -> float:
    """Return the scale by which a value is rounded, after limits.

    Raises NoMatch if it is not, or used elsewhere too.
    """
    while single_use(value):
        (user,) = value.users
        if user.op.name in ("relu", "clip"):
            value = user.result
            continue
        if user.op.name == "div" and user.operands[0] is value and single_use(user.result):
            found = factors(user.operands[1], value.type.shape)
            if found is not None and found.number is not None and user.result.users[0].op.name == "round":
                return found.number
        break
    raise NoMatch("the sum is not rounded", value)


def _rounded(node: Node) -> Quantised:
    found = quantised(node)
    if found is None:
        raise NoMatch("not a quantisation", node.result)
    return found


RULES = (round_to_signed, requantise_same, quantise_before, limit_integers, unrounded_addend)
