"""Define the pointwise ops, one table row each: name, attributes with defaults, rule for dtypes, meaning.

Rows with a cuDNN mode of the same meaning carry cuDNN's name (CUDNN_POINTWISE_*). Operands broadcast as in NumPy.
16-bit floats are computed in f32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, ClassVar

import numpy as np

from fusec.errors import VerifyError
from fusec.ir import Array, DType, Node, Op, TensorType
from fusec.ops.spec import broadcast, require, require_arity, result_order, special, widened
from fusec.system.dataclass import dataclass

SQRT_HALF = math.sqrt(0.5)
SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
Reference = Callable[..., Array]  # (xp, attributes, *operands) -> array


@dataclass(frozen=True)
class Row:
    """A row of the table.

    rule: names the dtypes that operands and result may have:

    float, number, any: operands of one such dtype, and a result of the same
    bool, integer: the same, for bools and integers
    compare: one dtype -> bool
    test: float -> bool
    select: bool, T, T -> T
    """

    name: str
    arity: int
    rule: str
    reference: Reference
    defaults: Mapping[str, float | int] = field(default_factory=dict[str, float | int])
    commutative: bool = False


@dataclass(frozen=True)
class Pointwise(Op):
    """Base of the ops made from the table."""

    row: ClassVar[Row]

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        row = self.row
        require_arity(row.name, operands, row.arity)
        same = operands[1:] if row.rule == "select" else operands
        dtype = same[0].dtype
        if any(t.dtype is not dtype for t in same):
            raise VerifyError(f"operands differ in dtype: {', '.join(t.dtype.value for t in operands)}")
        if row.rule in ("float", "test"):
            require(dtype.is_float, f"{row.name} takes floating-point operands, not {dtype.value}")
        elif row.rule == "number":
            require(dtype.is_float or dtype.is_int, f"{row.name} takes numbers, not {dtype.value}")
        elif row.rule == "compare":
            require(not dtype.is_narrow, f"{row.name} does not compare {dtype.value}")
        elif row.rule == "integer":
            require(dtype.is_int, f"{row.name} takes integers, not {dtype.value}")
        elif row.rule == "bool":
            require(dtype is DType.BOOL, f"{row.name} takes bools, not {dtype.value}")
        elif row.rule == "select":
            require(operands[0].dtype is DType.BOOL, f"the condition is {operands[0].dtype.value}, not bool")
        if "axis" in row.defaults:
            axis = self.attributes["axis"]
            require(0 <= axis < operands[0].rank, f"axis {axis} is out of range for rank {operands[0].rank}")
        if row.defaults:
            nan = [k for k, v in self.attributes.items() if math.isnan(v)]
            require(not nan, f"{row.name}: {', '.join(nan)} is NaN")
        shape = broadcast([t.shape for t in operands])
        result = DType.BOOL if row.rule in ("compare", "test") else dtype
        return (TensorType(shape, result, result_order(shape, operands)),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        row = self.row

        def compute(*arrays: Array) -> Array:
            return row.reference(xp, self, *arrays)

        if row.rule in ("compare", "test", "bool", "select"):
            with np.errstate(all="ignore"):
                result = compute(*operands)
            # CuPy chooses among bf16 numbers as f32
            return (result.astype(operands[1].dtype, copy=False) if row.rule == "select" else result,)
        return (widened(compute, *operands).astype(operands[0].dtype, copy=False),)


def _sigmoid(xp: Any, x: Array) -> Array:
    """Compute 1/(1+exp(-x)) without overflow, and without loss of digits where it is tiny."""
    z = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1.0, z) / (1.0 + z)


def _softplus(xp: Any, x: Array) -> Array:
    return xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x)))


def _gelu_cdf(xp: Any, x: Array) -> Array:
    return 0.5 * special(xp).erfc(x * -SQRT_HALF)


def _gelu_tanh_cdf(xp: Any, x: Array) -> Array:
    """Compute 0.5 * (1 + tanh(u)) as sigmoid(2 * u), which keeps its digits where it is tiny."""
    return _sigmoid(xp, 2.0 * SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))


def _divide(xp: Any, a: Array, b: Array) -> Array:
    """Divide: floats as a/b, integers rounded towards zero, as ONNX and C do."""
    if DType.of(a.dtype).is_float:
        return a / b
    quotient = a // b
    return quotient + ((quotient < 0) & (quotient * b != a))


def _gelu_tanh_gradient(xp: Any, dy: Array, x: Array) -> Array:
    x = xp.clip(x, -40.0, 40.0)  # the gradient is 0 or 1 there, and no square overflows
    slope = 2.0 * SQRT_2_OVER_PI * (1.0 + 3 * 0.044715 * x * x)
    return dy * _gelu_tanh_cdf(xp, x) * (1.0 + x * slope * _gelu_tanh_cdf(xp, -x))


def _gelu_gradient(xp: Any, dy: Array, x: Array) -> Array:
    x = xp.clip(x, -40.0, 40.0)
    return dy * (_gelu_cdf(xp, x) + x * xp.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi))


def _swish_gradient(xp: Any, beta: float, dy: Array, x: Array) -> Array:
    z = xp.clip(beta * x, -800.0, 800.0)
    return dy * _sigmoid(xp, z) * (1.0 + z * _sigmoid(xp, -z))


def _power(xp: Any, x: Array, y: Array) -> Array:
    """Raise to a power; integers to negative powers are truncated towards zero, which NumPy refuses."""
    dtype = DType.of(x.dtype)
    if dtype.is_float or dtype.value.startswith("u"):
        return xp.power(x, y)
    even, unit = y % 2 == 0, xp.where(xp.abs(x) == 1, x, 0)
    return xp.where(y >= 0, xp.power(x, xp.maximum(y, 0)), xp.where(even, xp.abs(unit), unit))


def _shift(xp: Any, shift: Callable[..., Array], x: Array, y: Array) -> Array:
    """Shift; a count of all bits or more, or a negative one, leaves 0 (or the sign)."""
    bits = 8 * x.dtype.itemsize
    beyond = (y < 0) | (y >= bits)
    rest = xp.where(x < 0, -1, 0).astype(x.dtype) if shift is xp.right_shift else xp.zeros_like(x)
    return xp.where(beyond, rest, shift(x, xp.where(beyond, 0, y).astype(x.dtype)))


def _index(xp: Any, axis: int, x: Array) -> Array:
    shape = [1] * x.ndim
    shape[axis] = -1
    return xp.broadcast_to(xp.arange(x.shape[axis]).reshape(shape), x.shape).astype(x.dtype)


def _row(
    name: str, arity: int, rule: str, reference: Reference, *, commutative: bool = False, **defaults: float
) -> Row:
    return Row(name, arity, rule, reference, defaults, commutative)


TABLE: tuple[Row, ...] = (
    # one operand, cuDNN's modes
    _row("abs", 1, "number", lambda xp, a, x: xp.abs(x)),
    _row("ceil", 1, "float", lambda xp, a, x: xp.ceil(x)),
    _row("cos", 1, "float", lambda xp, a, x: xp.cos(x)),
    _row("erf", 1, "float", lambda xp, a, x: special(xp).erf(x)),
    _row("exp", 1, "float", lambda xp, a, x: xp.exp(x)),
    _row("floor", 1, "float", lambda xp, a, x: xp.floor(x)),
    _row("identity", 1, "any", lambda xp, a, x: x),
    _row("log", 1, "float", lambda xp, a, x: xp.log(x)),
    _row("neg", 1, "number", lambda xp, a, x: -x),
    _row("reciprocal", 1, "float", lambda xp, a, x: 1.0 / x),
    _row("relu", 1, "number", lambda xp, a, x: xp.maximum(x, 0)),
    _row("rsqrt", 1, "float", lambda xp, a, x: 1.0 / xp.sqrt(x)),
    _row("sigmoid", 1, "float", lambda xp, a, x: _sigmoid(xp, x)),
    _row("sin", 1, "float", lambda xp, a, x: xp.sin(x)),
    _row("softplus", 1, "float", lambda xp, a, x: _softplus(xp, x)),
    _row("sqrt", 1, "float", lambda xp, a, x: xp.sqrt(x)),
    _row("tan", 1, "float", lambda xp, a, x: xp.tan(x)),
    _row("tanh", 1, "float", lambda xp, a, x: xp.tanh(x)),
    _row("elu", 1, "float", lambda xp, a, x: xp.where(x > 0, x, a.alpha * xp.expm1(xp.minimum(x, 0))), alpha=1.0),
    _row("gelu", 1, "float", lambda xp, a, x: x * _gelu_cdf(xp, x)),
    _row("gelu_tanh", 1, "float", lambda xp, a, x: x * _gelu_tanh_cdf(xp, x)),
    _row("swish", 1, "float", lambda xp, a, x: x * _sigmoid(xp, a.beta * x), beta=1.0),
    _row("leaky_relu", 1, "float", lambda xp, a, x: xp.where(x >= 0, x, a.alpha * x), alpha=0.01),
    _row("logical_not", 1, "bool", lambda xp, a, x: ~x),
    _row("gen_index", 1, "number", lambda xp, a, x: _index(xp, a.axis, x), axis=0),
    # one operand, beyond cuDNN's modes
    _row("clip", 1, "number", lambda xp, a, x: _clip(xp, a, x), min=-math.inf, max=math.inf),
    _row("hard_sigmoid", 1, "float", lambda xp, a, x: xp.clip(a.alpha * x + a.beta, 0.0, 1.0), alpha=0.2, beta=0.5),
    _row("hard_swish", 1, "float", lambda xp, a, x: x * xp.clip(x / 6.0 + 0.5, 0.0, 1.0)),
    _row(
        "selu",
        1,
        "float",
        lambda xp, a, x: a.gamma * xp.where(x > 0, x, a.alpha * xp.expm1(xp.minimum(x, 0))),
        alpha=1.67326319217681884765625,
        gamma=1.05070102214813232421875,
    ),
    _row(
        "celu",
        1,
        "float",
        lambda xp, a, x: xp.maximum(x, 0) + xp.minimum(0, a.alpha * xp.expm1(xp.minimum(x, 0) / a.alpha)),
        alpha=1.0,
    ),
    _row("mish", 1, "float", lambda xp, a, x: x * xp.tanh(_softplus(xp, x))),
    _row("softsign", 1, "float", lambda xp, a, x: x / (1.0 + xp.abs(x))),
    _row("thresholded_relu", 1, "float", lambda xp, a, x: xp.where(x > a.alpha, x, 0.0), alpha=1.0),
    _row("sign", 1, "number", lambda xp, a, x: xp.sign(x)),
    _row("round", 1, "float", lambda xp, a, x: xp.rint(x)),
    _row("acos", 1, "float", lambda xp, a, x: xp.arccos(x)),
    _row("asin", 1, "float", lambda xp, a, x: xp.arcsin(x)),
    _row("atan", 1, "float", lambda xp, a, x: xp.arctan(x)),
    _row("cosh", 1, "float", lambda xp, a, x: xp.cosh(x)),
    _row("sinh", 1, "float", lambda xp, a, x: xp.sinh(x)),
    _row("acosh", 1, "float", lambda xp, a, x: xp.arccosh(x)),
    _row("asinh", 1, "float", lambda xp, a, x: xp.arcsinh(x)),
    _row("atanh", 1, "float", lambda xp, a, x: xp.arctanh(x)),
    _row("is_nan", 1, "test", lambda xp, a, x: xp.isnan(x)),
    _row("is_inf", 1, "test", lambda xp, a, x: xp.isinf(x)),
    _row("bitwise_not", 1, "integer", lambda xp, a, x: ~x),
    # two operands, cuDNN's modes
    _row("add", 2, "number", lambda xp, a, x, y: x + y, commutative=True),
    _row("add_square", 2, "number", lambda xp, a, x, y: x + y * y),
    _row("sub", 2, "number", lambda xp, a, x, y: x - y),
    _row("mul", 2, "number", lambda xp, a, x, y: x * y, commutative=True),
    _row("div", 2, "number", lambda xp, a, x, y: _divide(xp, x, y)),
    _row("max", 2, "number", lambda xp, a, x, y: xp.maximum(x, y), commutative=True),
    _row("min", 2, "number", lambda xp, a, x, y: xp.minimum(x, y), commutative=True),
    _row("mod", 2, "number", lambda xp, a, x, y: xp.fmod(x, y)),  # sign of the dividend, as C's fmod
    _row("pow", 2, "number", lambda xp, a, x, y: _power(xp, x, y)),
    _row("cmp_eq", 2, "compare", lambda xp, a, x, y: x == y, commutative=True),
    _row("cmp_neq", 2, "compare", lambda xp, a, x, y: x != y, commutative=True),
    _row("cmp_gt", 2, "compare", lambda xp, a, x, y: x > y),
    _row("cmp_ge", 2, "compare", lambda xp, a, x, y: x >= y),
    _row("cmp_lt", 2, "compare", lambda xp, a, x, y: x < y),
    _row("cmp_le", 2, "compare", lambda xp, a, x, y: x <= y),
    _row("logical_and", 2, "bool", lambda xp, a, x, y: x & y, commutative=True),
    _row("logical_or", 2, "bool", lambda xp, a, x, y: x | y, commutative=True),
    # two operands, beyond cuDNN's modes
    _row("logical_xor", 2, "bool", lambda xp, a, x, y: x ^ y, commutative=True),
    _row("floor_mod", 2, "number", lambda xp, a, x, y: xp.remainder(x, y)),  # sign of the divisor, as Python's
    _row("bitwise_and", 2, "integer", lambda xp, a, x, y: x & y, commutative=True),
    _row("bitwise_or", 2, "integer", lambda xp, a, x, y: x | y, commutative=True),
    _row("bitwise_xor", 2, "integer", lambda xp, a, x, y: x ^ y, commutative=True),
    _row("shift_left", 2, "integer", lambda xp, a, x, y: _shift(xp, xp.left_shift, x, y)),
    _row("shift_right", 2, "integer", lambda xp, a, x, y: _shift(xp, xp.right_shift, x, y)),
    _row("prelu", 2, "float", lambda xp, a, x, slope: xp.where(x >= 0, x, slope * x)),
    # backward: gradient of the result, then the forward operand x
    _row("relu_backward", 2, "float", lambda xp, a, dy, x: xp.where(x > 0, dy, 0.0)),
    _row("leaky_relu_backward", 2, "float", lambda xp, a, dy, x: xp.where(x > 0, dy, a.alpha * dy), alpha=0.01),
    _row("sigmoid_backward", 2, "float", lambda xp, a, dy, x: dy * _sigmoid(xp, x) * _sigmoid(xp, -x)),
    _row("tanh_backward", 2, "float", lambda xp, a, dy, x: dy / xp.cosh(x) ** 2),
    _row(
        "elu_backward",
        2,
        "float",
        lambda xp, a, dy, x: xp.where(x > 0, dy, dy * a.alpha * xp.exp(xp.minimum(x, 0))),
        alpha=1.0,
    ),
    _row("gelu_backward", 2, "float", lambda xp, a, dy, x: _gelu_gradient(xp, dy, x)),
    _row("gelu_tanh_backward", 2, "float", lambda xp, a, dy, x: _gelu_tanh_gradient(xp, dy, x)),
    _row("softplus_backward", 2, "float", lambda xp, a, dy, x: dy * _sigmoid(xp, x)),
    _row("swish_backward", 2, "float", lambda xp, a, dy, x: _swish_gradient(xp, a.beta, dy, x), beta=1.0),
    # three operands
    _row("where", 3, "select", lambda xp, a, c, x, y: xp.where(c, x, y)),  # cuDNN: binary_select
)


def _clip(xp: Any, a: Any, x: Array) -> Array:
    """Clip to the bounds; for integers, to the nearest integers within the bounds that the type holds."""
    low, high = a.min, a.max
    if not DType.of(x.dtype).is_float:
        info = np.iinfo(x.dtype)
        low = math.ceil(min(max(low, info.min), info.max))
        high = math.floor(min(max(high, info.min), info.max))
    return xp.minimum(xp.maximum(x, x.dtype.type(low)), x.dtype.type(high))


def _make(row: Row) -> type[Pointwise]:
    members = {"name": row.name, "row": row, "commutative": row.commutative, "__module__": __name__}
    if not row.defaults:  # without attributes there is nothing to add to the base
        return type(row.name, (Pointwise,), members)
    members |= {"__annotations__": {name: type(value) for name, value in row.defaults.items()}, **row.defaults}
    return dataclass(frozen=True)(type(row.name, (Pointwise,), members))


CLASSES: Mapping[str, type[Pointwise]] = {row.name: _make(row) for row in TABLE}


def pw(name: str, **attributes: float) -> Pointwise:
    """Make the pointwise op of that name: `pw("leaky_relu", alpha=0.1)`."""
    return CLASSES[name](**attributes)


@dataclass(frozen=True)
class Cast(Op):
    """Convert to another dtype: floats to integers truncate, to bool test for non-zero."""

    to: DType
    name: ClassVar[str] = "cast"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        return (operands[0].with_dtype(self.to),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            return (_through(xp, operands[0], self.to).astype(self.to.numpy),)


def keeps_number(node: Node) -> bool:
    """Tell if a node is a cast from a floating or integer type to a floating one: it changes the precision alone."""
    own = node.operands[0].type.dtype if node.operands else None
    return isinstance(node.op, Cast) and node.op.to.is_float and own is not None and (own.is_float or own.is_int)


def _through(xp: Any, x: Array, to: DType) -> Array:
    """Convert to a type that converts to `to`, because NumPy converts narrow types from and to few others."""
    dtype = DType.of(x.dtype)
    if not dtype.is_narrow and not to.is_narrow:
        return x
    if to.is_narrow_int and not (dtype.is_int or dtype.is_narrow_int):
        return x.astype(xp.float32).astype(xp.int8)
    if dtype.is_narrow_int and to.is_narrow_int:
        return x.astype(xp.int8)
    if dtype.is_narrow_int:
        return x.astype(xp.int8).astype(xp.float32)  # NumPy takes ten times as long to convert in one step
    return x if dtype.is_int and to.is_narrow_int else x.astype(xp.float32)
