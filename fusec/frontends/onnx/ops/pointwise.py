"""Import pointwise ops: arithmetic, activations, comparisons, logic, casts."""

from __future__ import annotations

import math
from functools import reduce

import ml_dtypes
import numpy as np

from fusec.frontends.onnx.emission.emit import FOLD_OPERAND_ELEMENTS, Emitter, OpFunction, Table
from fusec.frontends.onnx.model_file.tensors import dtype_of
from fusec.frontends.onnx.ops import strings
from fusec.ir import DType, Value
from fusec.ops import pw
from fusec.ops.spec import broadcast, require


def _unary(name: str) -> OpFunction:
    def emit(g: Emitter, x: Value, /) -> Value:
        return g(pw(name), x)

    return emit


def _binary(name: str) -> OpFunction:
    def emit(g: Emitter, a: Value, b: Value, /) -> Value:
        return g(pw(name), a, b)

    return emit


def _variadic(name: str) -> OpFunction:
    def emit(g: Emitter, /, *operands: Value) -> Value:
        return reduce(lambda a, b: g(pw(name), a, b), operands)

    return emit


def mean(g: Emitter, /, *operands: Value) -> Value:
    if len(operands) == 1:
        return operands[0]
    total = reduce(lambda a, b: g(pw("add"), a, b), operands)
    return g(pw("div"), total, g.scalar(len(operands), total))


def elu(g: Emitter, x: Value, /, *, alpha: float = 1.0) -> Value:
    return g(pw("elu", alpha=alpha), x)


def selu(
    g: Emitter, x: Value, /, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> Value:
    return g(pw("selu", alpha=alpha, gamma=gamma), x)


def celu(g: Emitter, x: Value, /, *, alpha: float = 1.0) -> Value:
    return g(pw("celu", alpha=alpha), x)


def leaky_relu(g: Emitter, x: Value, /, *, alpha: float = 0.01) -> Value:
    return g(pw("leaky_relu", alpha=alpha), x)


def thresholded_relu(g: Emitter, x: Value, /, *, alpha: float = 1.0) -> Value:
    return g(pw("thresholded_relu", alpha=alpha), x)


def hard_sigmoid(g: Emitter, x: Value, /, *, alpha: float = 0.2, beta: float = 0.5) -> Value:
    return g(pw("hard_sigmoid", alpha=alpha, beta=beta), x)


def shrink(g: Emitter, x: Value, /, *, bias: float = 0.0, lambd: float = 0.5) -> Value:
    wide = x if x.type.dtype.is_float else g.cast(x, DType.F32)
    limit, shift = g.scalar(lambd, wide), g.scalar(bias, wide)
    low = g(pw("cmp_lt"), wide, g.scalar(-lambd, wide))
    high = g(pw("cmp_gt"), wide, limit)
    upper = g(pw("where"), high, g(pw("sub"), wide, shift), g.scalar(0, wide))
    return g.cast(g(pw("where"), low, g(pw("add"), wide, shift), upper), x.type.dtype)


def swish(g: Emitter, x: Value, /, *, alpha: float = 1.0) -> Value:
    return g(pw("swish", beta=alpha), x)


def gelu(g: Emitter, x: Value, /, *, approximate: str = "none") -> Value:
    require(approximate in ("none", "tanh"), f"knows no approximation {approximate!r}")
    return g(pw("gelu" if approximate == "none" else "gelu_tanh"), x)


def prelu(g: Emitter, x: Value, slope: Value, /) -> Value:
    require(
        broadcast([x.type.shape, slope.type.shape]) == x.type.shape,
        f"a slope of shape {list(slope.type.shape)} does not broadcast to {list(x.type.shape)}",
    )
    return g(pw("prelu"), x, slope)


def clip_6(g: Emitter, x: Value, /, *, max: float = 3.40282347e38, min: float = -3.40282347e38) -> Value:
    return _clip(g, x, min, max)


def clip(g: Emitter, x: Value, low: Value | None = None, high: Value | None = None, /) -> Value:
    """Import Clip. A bound of NaN has no effect, as in onnxruntime; the ONNX standard does not define it."""
    for bound in (low, high):
        require(bound is None or bound.type.size == 1, "a bound must be a single number")
        require(bound is None or bound.type.dtype is x.type.dtype, f"a bound differs in dtype from {x!r}")
    if (low is None or low.literal) and (high is None or high.literal):
        return _clip(
            g,
            x,
            -math.inf if low is None else g.number(low, "the lower bound"),
            math.inf if high is None else g.number(high, "the upper bound"),
        )
    if low is not None:
        x = g(pw("max"), x, _bound(g, low, -math.inf))
    return x if high is None else g(pw("min"), x, _bound(g, high, math.inf))


def _bound(g: Emitter, bound: Value, no_bound: float) -> Value:
    """Reshape a computed bound to a scalar, and replace NaN by `no_bound`."""
    bound = g.reshape(bound, ())
    if not bound.type.dtype.is_float:
        return bound
    return g(pw("where"), g(pw("is_nan"), bound), g.scalar(no_bound, bound), bound)


def _clip(g: Emitter, x: Value, low: float, high: float) -> Value:
    """Clip to known bounds. Bounds at the largest float become infinite, so that later passes recognise relu."""
    low, high = (-math.inf if math.isnan(low) else low), (math.inf if math.isnan(high) else high)
    if x.type.dtype.is_float:
        largest = float(np.finfo(np.float32).max)
        low, high = (-math.inf if low <= -largest else low), (math.inf if high >= largest else high)
    return g(pw("clip", min=float(low), max=float(high)), x)


def mod(g: Emitter, a: Value, b: Value, /, *, fmod: int = 0) -> Value:
    require(fmod in (0, 1), f"fmod is {fmod}")
    require(fmod == 1 or a.type.dtype.is_int or g.opset >= 28, "floating-point operands need fmod=1 before opset 28")
    return g(pw("mod" if fmod else "floor_mod"), a, b)


def power(g: Emitter, base: Value, exponent: Value, /) -> Value:
    """Import Pow. The result has the dtype of the base.

    Integers are computed in f64, unless the exponents are known and none is negative.
    """
    dtype = base.type.dtype
    if dtype.is_float:
        return g(pw("pow"), base, g.cast(exponent, dtype))
    if exponent.literal is not None and exponent.type.dtype.is_int and (g.array(exponent, "exponent") >= 0).all():
        return g(pw("pow"), base, g.cast(exponent, dtype))
    return g.cast(g(pw("pow"), g.cast(base, DType.F64), g.cast(exponent, DType.F64)), dtype)


def is_inf(g: Emitter, x: Value, /, *, detect_negative: int = 1, detect_positive: int = 1) -> Value:
    require(x.type.dtype.is_float, f"takes floating-point operands, not {x.type.dtype.value}")
    if detect_negative and detect_positive:
        return g(pw("is_inf"), x)
    if not detect_negative and not detect_positive:
        return g(pw("logical_and"), g(pw("is_inf"), x), g.constant(np.array(False)))
    return g(pw("cmp_eq"), x, g.scalar(math.inf if detect_positive else -math.inf, x))


def equal(g: Emitter, x: Value, y: Value, /) -> Value:
    if strings.is_string(x) or strings.is_string(y):
        return strings.equal_strings(g, x, y)
    return g(pw("cmp_eq"), x, y)


def where(g: Emitter, condition: Value, x: Value, y: Value, /) -> Value:
    """Import Where. A constant condition with equal elements chooses x or y at import.

    Function bodies of the standard have such conditions for special cases that most models do not use.
    """
    literal = condition.literal
    if literal is not None and 0 < literal.type.size <= FOLD_OPERAND_ELEMENTS and x.type.dtype is y.type.dtype:
        chosen = x if literal.array.all() else y
        uniform = literal.array.all() or not literal.array.any()
        if uniform and chosen.type.shape == broadcast([condition.type.shape, x.type.shape, y.type.shape]):
            return chosen
    return g(pw("where"), condition, x, y)


def cast(g: Emitter, x: Value, /, *, to: int, saturate: int = 1, round_mode: str = "up") -> Value:
    return converted(g, x, dtype_of(to), bool(saturate), round_mode)


def cast_like(g: Emitter, x: Value, target: Value, /, *, saturate: int = 1, round_mode: str = "up") -> Value:
    return converted(g, x, target.type.dtype, bool(saturate), round_mode)


def converted(g: Emitter, x: Value, to: DType, saturate: bool = True, round_mode: str = "up") -> Value:
    """Cast x. A number out of range of an 8-bit float becomes its largest value if `saturate`, else NaN or infinity."""
    if x.type.dtype is to:
        return x
    if DType.STRING in (x.type.dtype, to):
        return strings.cast_strings(g, x, to)
    if not to.is_narrow or to.is_narrow_int:
        return g.cast(x, to)
    wide = x if x.type.dtype.is_float else g.cast(x, DType.F32)
    if to is DType.F8E8M0:
        return g.cast(_power_of_two(g, g.cast(wide, DType.F32), saturate, round_mode), to)
    if saturate:
        largest = float(ml_dtypes.finfo(to.numpy).max)
        # NaN has to stay NaN, but a clip on a GPU can replace it by a bound (docs/hazards.md)
        wide = g(pw("where"), g(pw("is_nan"), wide), wide, g(pw("clip", min=-largest, max=largest), wide))
    return g.cast(wide, to)


def _power_of_two(g: Emitter, x: Value, saturate: bool, round_mode: str) -> Value:
    """Round x to a power of two, as e8m0 stores it: up, down, or to the nearest (ties up)."""
    require(round_mode in ("up", "down", "nearest"), f"knows no round_mode {round_mode!r}")
    wide = g.cast(x, DType.F64)
    two = g.scalar(2.0, wide)
    exponent = g(pw("div"), g(pw("log"), wide), g.scalar(math.log(2.0), wide))
    nearest = g(pw("round"), exponent)
    exact = g(pw("cmp_eq"), g(pw("pow"), two, nearest), wide)
    if round_mode == "nearest":
        base = g(pw("floor"), exponent)
        over = g(pw("cmp_ge"), wide, g(pw("mul"), g(pw("pow"), two, base), g.scalar(1.5, wide)))
        chosen = g(pw("where"), over, g(pw("add"), base, g.scalar(1.0, wide)), base)
    else:
        chosen = g(pw("ceil" if round_mode == "up" else "floor"), exponent)
    power = g(pw("pow"), two, g(pw("where"), exact, nearest, chosen))
    if saturate:
        power = g(pw("clip", min=2.0**-127, max=2.0**127), power)
    return power


def bit_shift(g: Emitter, x: Value, y: Value, /, *, direction: str) -> Value:
    require(direction in ("LEFT", "RIGHT"), f"knows no direction {direction!r}")
    return g(pw(f"shift_{direction.lower()}"), x, y)


_UNARY = {
    "Abs": ("abs", 6),
    "Acos": ("acos", 7),
    "Acosh": ("acosh", 9),
    "Asin": ("asin", 7),
    "Asinh": ("asinh", 9),
    "Atan": ("atan", 7),
    "Atanh": ("atanh", 9),
    "BitwiseNot": ("bitwise_not", 18),
    "Ceil": ("ceil", 6),
    "Cos": ("cos", 7),
    "Cosh": ("cosh", 9),
    "Erf": ("erf", 9),
    "Exp": ("exp", 6),
    "Floor": ("floor", 6),
    "HardSwish": ("hard_swish", 14),
    "IsNaN": ("is_nan", 9),
    "Log": ("log", 6),
    "Mish": ("mish", 18),
    "Neg": ("neg", 6),
    "Not": ("logical_not", 1),
    "Reciprocal": ("reciprocal", 6),
    "Relu": ("relu", 6),
    "Round": ("round", 11),
    "Sigmoid": ("sigmoid", 6),
    "Sign": ("sign", 9),
    "Sin": ("sin", 7),
    "Sinh": ("sinh", 9),
    "Softplus": ("softplus", 1),
    "Softsign": ("softsign", 1),
    "Sqrt": ("sqrt", 6),
    "Tan": ("tan", 7),
    "Tanh": ("tanh", 6),
}
_BINARY = {
    "Add": ("add", 7),
    "And": ("logical_and", 7),
    "BitwiseAnd": ("bitwise_and", 18),
    "BitwiseOr": ("bitwise_or", 18),
    "BitwiseXor": ("bitwise_xor", 18),
    "Div": ("div", 7),
    "Greater": ("cmp_gt", 7),
    "GreaterOrEqual": ("cmp_ge", 12),
    "Less": ("cmp_lt", 7),
    "LessOrEqual": ("cmp_le", 12),
    "Mul": ("mul", 7),
    "Or": ("logical_or", 7),
    "Sub": ("sub", 7),
    "Xor": ("logical_xor", 7),
}
_VARIADIC = {"Max": ("max", 6), "Min": ("min", 6), "Sum": ("add", 6)}

TABLE: Table = {
    **{(op, since): _unary(name) for op, (name, since) in _UNARY.items()},
    **{(op, since): _binary(name) for op, (name, since) in _BINARY.items()},
    **{(op, since): _variadic(name) for op, (name, since) in _VARIADIC.items()},
    ("Mean", 6): mean,
    ("Elu", 6): elu,
    ("Selu", 6): selu,
    ("Celu", 12): celu,
    ("LeakyRelu", 6): leaky_relu,
    ("ThresholdedRelu", 10): thresholded_relu,
    ("HardSigmoid", 6): hard_sigmoid,
    ("Shrink", 9): shrink,
    ("Swish", 24): swish,
    ("Gelu", 20): gelu,
    ("PRelu", 7): prelu,
    ("Clip", 6): clip_6,
    ("Clip", 11): clip,
    ("Mod", 10): mod,
    ("Pow", 7): power,
    ("IsInf", 10): is_inf,
    ("Where", 9): where,
    ("Cast", 6): cast,
    ("Equal", 7): equal,
    ("BitShift", 11): bit_shift,
    ("CastLike", 15): cast_like,
}
