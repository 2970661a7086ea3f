"""Recognise values that are integers times a scale, and floats that are rounded to integers.

A model spells both as pointwise ops: (cast(q) - zero) * scale, and cast(clip(round(x / scale) + zero)).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusec.ir import BYTES, DType, Graph, Node, Value
from fusec.ops import Cast, pw
from fusec.system.dataclass import dataclass

Vector = np.ndarray[Any, Any]

MOST_FACTORS = 1 << 18  # scales and zero points that are read during compilation


@dataclass(frozen=True)
class Factors:
    """The numbers of a constant that varies along one axis at most.

    vector: float64; one number if `axis` is None.
    """

    vector: Vector
    axis: int | None = None

    @property
    def number(self) -> float | None:
        """Return the number, if there is only one."""
        return float(self.vector[0]) if self.axis is None else None

    def array(self, rank: int) -> Vector:
        """Return the numbers in fp32, in a shape that broadcasts to a tensor of that rank."""
        shape = [] if self.axis is None else [-1 if i == self.axis else 1 for i in range(rank)]
        return self.vector.reshape(shape).astype(np.float32)

    def times(self, other: Factors) -> Factors:
        """Multiply by factors along the same axis, or by one number."""
        return Factors(self.vector * other.vector, other.axis if self.axis is None else self.axis)

    def plus(self, other: Factors) -> Factors | None:
        """Add factors along the same axis, or one number; None if the sum varies along two axes."""
        if None not in (self.axis, other.axis) and self.axis != other.axis:
            return None
        return Factors(self.vector + other.vector, other.axis if self.axis is None else self.axis)

    def equals(self, other: Factors) -> bool:
        return self.axis == other.axis and np.array_equal(self.vector, other.vector)


@dataclass(frozen=True)
class Dequantised:
    """A float value (q - zero) * scale, where q has integers or floats of 8 bits."""

    q: Value
    scale: Factors
    zero: Factors

    @property
    def symmetric(self) -> bool:
        """Tell if the zero point is 0."""
        return not self.zero.vector.any()


@dataclass(frozen=True)
class Quantised:
    """An integer value clip(round(x * (1 / scale)) + zero, low, high).

    x: the float before the scale.
    """

    x: Value
    scale: Factors
    zero: Factors
    low: float
    high: float


def factors(value: Value, shape: tuple[int, ...]) -> Factors | None:
    """Return a small constant as factors of a tensor of that shape; None if it varies along several axes."""
    literal = value.literal
    if literal is None or literal.type.size > MOST_FACTORS or literal.type.rank > len(shape):
        return None
    vector = literal.array.astype(np.float64).reshape(-1)
    if not vector.size or not np.isfinite(vector).all():
        return None
    own = (1,) * (len(shape) - literal.type.rank) + literal.type.shape
    wide = [i for i, d in enumerate(own) if d != 1]
    if len(wide) > 1 or any(own[i] != shape[i] for i in wide):
        return None
    if not wide or (vector == vector[0]).all():
        return Factors(vector[:1])
    return Factors(vector, wide[0])


def dequantised(value: Value, types: Sequence[DType] = BYTES) -> Dequantised | None:
    """Return numbers of these types, scale and zero point of an fp32 value; None if it is not spelled so."""
    if value.type.dtype is not DType.F32 or (scaled := _with_constant(value, "mul")) is None:
        return None
    scale = scaled[1]
    if (shifted := _shifted(scaled[0])) is None:
        return None
    inner, zero = shifted[0], Factors(0.0 - shifted[1].vector, shifted[1].axis)
    node = inner.node
    if node is None or not isinstance(node.op, Cast) or node.operands[0].type.dtype not in types:
        return None
    whole = bool((zero.vector == np.rint(zero.vector)).all())
    if inner.type.shape != value.type.shape or not whole or not (scale.vector > 0).all():
        return None
    return Dequantised(node.operands[0], scale, zero)


def quantised(node: Node, types: Sequence[DType] = BYTES) -> Quantised | None:
    """Return what a cast to integers of these types rounds; None if its operand is not spelled as a quantisation."""
    if not isinstance(node.op, Cast) or node.op.to not in types:
        return None
    clip = node.operands[0].node
    if clip is None or clip.op.name != "clip" or node.operands[0].type.dtype is not DType.F32:
        return None
    limits = clip.op.attributes
    if (shifted := _shifted(clip.operands[0])) is None:
        return None
    at, zero = shifted
    if at.node is None or at.node.op.name != "round":
        return None
    (scaled,) = at.node.operands
    x, scale = scaled, Factors(np.ones(1))
    if (divided := _with_constant(scaled, "div")) is not None:
        x, scale = divided
    elif (multiplied := _with_constant(scaled, "mul")) is not None and (multiplied[1].vector > 0).all():
        x, scale = multiplied[0], Factors(1.0 / multiplied[1].vector, multiplied[1].axis)
    info = np.iinfo(node.op.to.numpy)
    low, high = max(limits["min"], float(info.min)), min(limits["max"], float(info.max))
    if low > high or low != round(low) or high != round(high) or not (scale.vector > 0).all():
        return None
    return Quantised(x, scale, zero, low, high)


def _shifted(value: Value) -> tuple[Value, Factors] | None:
    """Return the operand to which constants are added, and their sum; None if the sum varies along two axes.

    A constant that is subtracted is negative in the sum.
    """
    total = Factors(np.zeros(1))
    while True:
        if (found := _with_constant(value, "add")) is not None:
            value, more = found
        elif (found := _with_constant(value, "sub")) is not None:
            value, more = found[0], Factors(-found[1].vector, found[1].axis)
        else:
            return value, total
        if (joined := total.plus(more)) is None:
            return None
        total = joined


def _with_constant(value: Value, name: str) -> tuple[Value, Factors] | None:
    """Return the operand and the constant of the op of that name that computes a value."""
    node = value.node
    if node is None or node.op.name != name:
        return None
    x, constant = node.operands
    if x.literal is not None and node.op.commutative:
        x, constant = constant, x
    found = factors(constant, value.type.shape) if x.literal is None else None
    if found is None or x.type.shape != value.type.shape:
        return None
    return x, found


def dequantise(graph: Graph, found: Dequantised, before: Node) -> Value:
    """Insert the ops that compute the float of numbers of 8 bits."""
    rank = found.q.type.rank
    value = graph.add(Cast(DType.F32), found.q, before=before)
    if not found.symmetric:
        value = graph.add(pw("sub"), value, graph.constant(found.zero.array(rank), "zero", before), before=before)
    return graph.add(pw("mul"), value, graph.constant(found.scale.array(rank), "scale", before), before=before)
