"""Draw pointwise ops and casts, with attributes and operands that give no NaN, infinity or huge number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fusec.ir import DType, TensorType, Value
from fusec.ops import CLASSES, Cast
from fusec.testing.generators.graph_builder import Draw, RandomGraph, Unfit

INTEGERS = (DType.I32, DType.I64, DType.I8, DType.U8, DType.I16, DType.U32, DType.U16, DType.U64)
CASTS = (DType.F32, DType.F16, DType.BF16, DType.F64, DType.BOOL, *INTEGERS)

# numbers for each attribute of a pointwise op, in addition to its default
ATTRIBUTES: Mapping[str, Sequence[float]] = {
    "alpha": (0.1, 0.3, 1.5, 0.5),
    "beta": (0.5, 1.702, 0.25),
    "gamma": (0.9,),
    "min": (-math.inf, -1.0, 0.0, -0.5),
    "max": (6.0, 1.0, math.inf, 0.5),
}

# operands outside these ranges give NaN, infinity or numbers that make all others irrelevant
DOMAIN: Mapping[str, tuple[float, float]] = {
    "acos": (-0.9, 0.9),
    "asin": (-0.9, 0.9),
    "atanh": (-0.9, 0.9),
    "acosh": (1.25, 9.0),
    "tan": (-1.25, 1.25),
    "exp": (-6.0, 6.0),
    "sinh": (-6.0, 6.0),
    "cosh": (-6.0, 6.0),
    "tanh_backward": (-6.0, 6.0),
}

POSITIVE = frozenset({"log", "sqrt", "rsqrt", "reciprocal"})
QUOTIENTS = frozenset({"div", "mod", "floor_mod"})


def _attributes(b: RandomGraph, name: str, rank: int) -> dict[str, float]:
    drawn: dict[str, float] = {}
    for key, default in CLASSES[name].row.defaults.items():
        if key == "axis":
            if rank == 0:
                raise Unfit("no axis")
            drawn[key] = b.below(rank)
        elif b.chance(60):
            drawn[key] = b.pick((default, *ATTRIBUTES[key]))
    if drawn.get("min", -math.inf) > drawn.get("max", math.inf) and not b.chance(10):
        drawn["min"], drawn["max"] = drawn["max"], drawn["min"]
    return drawn


def integer_value(b: RandomGraph) -> Value:
    try:
        return b.some(lambda t: t.dtype.is_int)
    except Unfit:
        return b.fresh(TensorType(b.shape(), b.pick(INTEGERS)))


def _unsigned_value(b: RandomGraph) -> Value:
    """Draw an unsigned value, because ONNX shifts no other integers."""
    try:
        return b.some(lambda t: t.dtype.value.startswith("u"))
    except Unfit:
        return b.fresh(TensorType(b.shape(), b.pick((DType.U8, DType.U16, DType.U32, DType.U64))))


def _first(b: RandomGraph, name: str) -> Value:
    rule = CLASSES[name].row.rule
    if rule == "bool":
        return b.mask(b.float_value())
    if rule == "integer":
        return _unsigned_value(b) if name.startswith("shift") else integer_value(b)
    if rule in ("number", "any", "compare", "select") and b.chance(12):
        return b.mask(b.float_value()) if rule in ("any", "select") and b.chance(30) else integer_value(b)
    return b.float_value()


def draw_pointwise(b: RandomGraph, name: str, x: Value | None = None) -> Value:
    """Draw a pointwise op. `x`: its first operand, by default any value that it accepts."""
    row = CLASSES[name].row
    x = x or _first(b, name)
    is_float = x.type.dtype.is_float
    if name in POSITIVE and is_float:
        x = b.away_from_zero(x)
    elif name in DOMAIN and row.arity == 1:
        x = b.bounded(x, *DOMAIN[name])
    if row.rule == "select":
        return b.add(CLASSES[name](), b.mask(x), x, b.broadcastable(x))
    op = CLASSES[name](**_attributes(b, name, x.type.rank))
    if row.arity == 1:
        return b.add(op, x)
    if row.rule == "bool":
        return b.add(op, x, b.mask(x))
    if name in QUOTIENTS:
        if is_float:
            return b.add(op, x, b.away_from_zero(x))
        return b.add(op, x, b.constant(b.broadcast_shape(x.type.shape), x.type.dtype, "positive"))
    if name == "pow":
        if not is_float:
            return b.add(op, x, b.constant((), x.type.dtype, "positive"))
        if b.chance(50):  # squares take any operand
            return b.add(op, x, b.graph.constant(x.type.dtype.numpy.type(b.pick([2, 3, 1, 0]))))
        return b.add(op, b.away_from_zero(x), b.bounded(b.broadcastable(x), -2.0, 2.0))
    if name in DOMAIN:
        return b.add(op, b.broadcastable(x), b.bounded(x, *DOMAIN[name]))
    operands = (x, b.broadcastable(x))
    return b.add(op, *(operands[::-1] if b.chance(35) else operands))


def drawing(name: str) -> Draw:
    def draw(b: RandomGraph) -> None:
        draw_pointwise(b, name)

    return draw


def cast(b: RandomGraph) -> None:
    x = b.some()
    to = b.pick(CASTS)
    if x.type.dtype.is_float and to.is_int:  # because such a cast is undefined in C for a number out of range
        x = b.pointwise("clip", x, min=0.0 if to.value.startswith("u") else -100.0, max=100.0)
    elif x.type.dtype.is_int and to.value.startswith("u"):  # a negative number wraps around to a huge one
        x = b.pointwise("relu", x)
    b.add(Cast(to), x)
