"""Recognise values that are integers times a scale, and floats that are rounded to integers.

A model spells both as pointwise ops: (cast(q) - zero) * scale, and cast(clip(round(x / scale) + zero)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusec.ir import BYTES, DType, Graph, Node, Value
from fusec.ops import Cast, pw

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

    def minus(self, other: Factors) -> Factors | None:
        """Subtract factors along the same axis, or one number; None if the difference varies along two axes."""
        if None not in (self.axis, other.axis) and self.axis != other.axis:
            return None
        return Factors(self.vector - other.vector, other.axis if self.axis is None else self.axis)

    def equals(self, other: Factors) -> bool:
        return self.axis == other.axis and np.array_equal(self.vector, other.vector)


NONE = Factors(np.zeros(1))


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
    zero = NONE
    if value.type.dtype is not DType.F32 or (scaled := _with_constant(value, "mul")) is None:
        return None
    inner, scale = scaled
    while (shifted := _shifted(inner)) is not None:
        inner, less = shifted[0], zero.minus(shifted[1])
        if less is None:
            return None
        zero = less
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
    limits, zero, at = clip.op.attributes, NONE, clip.operands[0]
    while (shifted := _shifted(at)) is not None:
        at, more = shifted[0], zero.minus(Factors(-shifted[1].vector, shifted[1].axis))
        if more is None:
            return None
        zero = more
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
    """Return the operand to which a constant is added, and the constant; it is negative where it is subtracted."""
    found = _with_constant(value, "add")
    if found is None and (less := _with_constant(value, "sub")) is not None:
        found = less[0], Factors(-less[1].vector, less[1].axis)
    return found


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
