"""Derive facts about a value during compilation: what computes and reads it, its sign, a small constant's numbers."""

from __future__ import annotations

from fusec.ir import Array, DType, Value
from fusec.ops import POINTWISE_OPS, Reduce
from fusec.passes.rewriting.derived_constants import EAGER_BYTES
from fusec.passes.rewriting.rewriter import single_use

DEPTH = 6  # how far up to look: at most 64 values, because ops have two operands at most

_NEVER = frozenset({"relu", "abs", "exp", "sigmoid", "sqrt", "softplus", "hard_sigmoid"})
_KEEPS = frozenset({"reshape", "transpose", "relayout", "expand", "slice", "concat", "split", "max_pool", "avg_pool"})
_CLOSED = frozenset({"add", "mul", "div", "min"})  # never negative if their operands are not


def small_constant(value: Value) -> Array | None:
    """Return the numbers of a small constant; None for large ones, whose data is not read during compilation."""
    literal = value.literal
    return literal.array if literal is not None and literal.type.nbytes <= EAGER_BYTES else None


def all_equal(value: Value, number: float) -> bool:
    """Tell if a small constant holds that number everywhere."""
    array = small_constant(value)
    if array is None or not array.size:
        return array is not None
    # The first element tells for most constants. A comparison of all waits for Python's lock while weights are read.
    return bool(array.flat[0] == number) and bool((array == number).all())


def is_pointwise(value: Value) -> bool:
    """Tell if a pointwise op computes a value."""
    return value.node is not None and isinstance(value.node.op, POINTWISE_OPS)


def has_extremes(value: Value) -> bool:
    """Tell if a largest or smallest element is read, as a quantisation at run time does; no step stores less for it."""
    return any(isinstance(user.op, Reduce) and user.op.kind in ("max", "min") for user in value.users)


def is_rounded_to_integers(value: Value) -> bool:
    """Tell if an fp32 value is read only by constant scales and offsets, and then rounded, as a quantisation does."""
    while value.type.dtype is DType.F32 and single_use(value):
        user = value.users[0]
        if user.op.name == "round":
            return True
        others_are_constant = all(v is value or v.literal is not None for v in user.operands)
        if user.op.name not in ("mul", "div", "add") or not others_are_constant:
            return False
        value = user.result
    return False


def never_negative(value: Value, depth: int = DEPTH) -> bool:
    """Tell if every element is NaN or at least zero (of either sign)."""
    if value.literal is not None:
        array = small_constant(value)
        return array is not None and bool((array >= 0).all())
    node = value.node
    if node is None or depth == 0:
        return False
    name, operands = node.op.name, node.operands
    if name in _NEVER or (name == "mul" and operands[0] is operands[1]):
        return True
    if name == "clip":
        return bool(node.op.attributes["min"] >= 0 and node.op.attributes["max"] >= 0)
    if name == "max":
        return any(never_negative(v, depth - 1) for v in operands)
    averaged = isinstance(node.op, Reduce) and node.op.kind in ("sum", "mean", "max", "min", "prod")
    if averaged or name in _KEEPS or name in _CLOSED:
        return len(operands) <= 2 and all(never_negative(v, depth - 1) for v in operands)
    return False
