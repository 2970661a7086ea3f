"""Differentiate pointwise ops. Rules ignore broadcasting, because `core.fitted` sums over broadcast dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fusec.builder import Tensor
from fusec.gradients.core import BackwardStep, Gradients, Rule, Rules, by_formula
from fusec.ops import Cast

TWO_OVER_ROOT_PI = 2.0 / math.sqrt(math.pi)
ROOT_TWO_PI = math.sqrt(2.0 * math.pi)
Unary = Callable[[Tensor, Tensor, Tensor, dict[str, float]], Tensor]  # (dy, x, y, attributes)


def _unary(rule: Unary) -> Rule:
    return lambda step: rule(step.dy, step.x[0], step.y[0], step.op.attributes)


def _backward_op(name: str) -> Rule:
    """Apply cuDNN's own backward op, with the attributes of the forward op."""
    return lambda step: step.dy.pointwise(name, step.x[0], **step.op.attributes)


def _where(condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
    return condition.builder.where(condition, x, y)


def _exp_below(x: Tensor, scale: float = 1.0) -> Tensor:
    """Compute exp(min(x, 0) / scale), the slope of elu, selu and celu below zero up to a factor."""
    return (x.minimum(0.0) / scale if scale != 1.0 else x.minimum(0.0)).exp()


def _mish(dy: Tensor, x: Tensor, y: Tensor, a: dict[str, float]) -> Tensor:
    t = x.pointwise("softplus").tanh()
    return dy * (t + x * x.sigmoid() * (1.0 - t * t))


UNARY: Mapping[str, Unary] = {
    "abs": lambda dy, x, y, a: dy * x.pointwise("sign"),
    "cos": lambda dy, x, y, a: -(dy * x.pointwise("sin")),
    "erf": lambda dy, x, y, a: dy * (-(x * x)).exp() * TWO_OVER_ROOT_PI,
    "exp": lambda dy, x, y, a: dy * y,
    "identity": lambda dy, x, y, a: dy,
    "log": lambda dy, x, y, a: dy / x,
    "neg": lambda dy, x, y, a: -dy,
    "reciprocal": lambda dy, x, y, a: -(dy * y * y),
    "rsqrt": lambda dy, x, y, a: dy * y * y * y * -0.5,
    "sin": lambda dy, x, y, a: dy * x.pointwise("cos"),
    "sqrt": lambda dy, x, y, a: dy * 0.5 / y,
    "tan": lambda dy, x, y, a: dy * (1.0 + y * y),
    "clip": lambda dy, x, y, a: _where((x >= a["min"]) & (x <= a["max"]), dy, 0.0),
    "hard_sigmoid": lambda dy, x, y, a: _where((y > 0.0) & (y < 1.0), dy * a["alpha"], 0.0),
    "hard_swish": lambda dy, x, y, a: dy * _where(x <= -3.0, 0.0, _where(x >= 3.0, 1.0, x * (1.0 / 3.0) + 0.5)),
    "selu": lambda dy, x, y, a: dy * _where(x > 0.0, a["gamma"], _exp_below(x) * (a["gamma"] * a["alpha"])),
    "celu": lambda dy, x, y, a: dy * _exp_below(x, a["alpha"]),
    "mish": _mish,
    "softsign": lambda dy, x, y, a: dy / (1.0 + abs(x)) ** 2.0,
    "thresholded_relu": lambda dy, x, y, a: _where(x > a["alpha"], dy, 0.0),
    "acos": lambda dy, x, y, a: -(dy * (1.0 - x * x).rsqrt()),
    "asin": lambda dy, x, y, a: dy * (1.0 - x * x).rsqrt(),
    "atan": lambda dy, x, y, a: dy / (1.0 + x * x),
    "cosh": lambda dy, x, y, a: dy * x.pointwise("sinh"),
    "sinh": lambda dy, x, y, a: dy * x.pointwise("cosh"),
    "acosh": lambda dy, x, y, a: dy * (x * x - 1.0).rsqrt(),
    "asinh": lambda dy, x, y, a: dy * (x * x + 1.0).rsqrt(),
    "atanh": lambda dy, x, y, a: dy / (1.0 - x * x),
}
# ops whose gradient is an op of cuDNN
BACKWARD = {
    name: f"{name}_backward"
    for name in ("leaky_relu", "sigmoid", "tanh", "elu", "gelu", "gelu_tanh", "softplus", "swish")
}


def _mod(step: BackwardStep) -> Gradients:
    """Differentiate x - y * trunc(x / y)."""
    x, y = step.x
    q = x / y
    whole = _where(q >= 0.0, q.pointwise("floor"), q.pointwise("ceil"))
    return step.dy, -(step.dy * whole)


def _floor_mod(step: BackwardStep) -> Gradients:
    x, y = step.x
    return step.dy, -(step.dy * (x / y).pointwise("floor"))


def _pow(step: BackwardStep) -> Gradients:
    """Differentiate x ** y by both operands.

    Where y is 0 the slope by x is 0. Where x is not positive the slope by y is 0, because y then has to be an integer.
    """
    x, y = step.x
    slope = _where(y.eq(0.0), 0.0, y * x ** (y - 1.0))
    logarithm = _where(x > 0.0, _where(x > 0.0, x, 1.0).log(), 0.0)
    return step.dy * slope, step.dy * step.y[0] * logarithm


def _prelu(step: BackwardStep) -> Gradients:
    x, slope = step.x
    return _where(x >= 0.0, step.dy, step.dy * slope), _where(x >= 0.0, 0.0, step.dy * x)


def _maximum(step: BackwardStep) -> Gradients:
    """Pass the gradient to the larger (or smaller) operand; of equal ones, to the first."""
    x, y = step.x
    first = x >= y if step.op.name == "max" else x <= y
    return _where(first, step.dy, 0.0), _where(first, 0.0, step.dy)


def _choose(step: BackwardStep) -> Gradients:
    condition = step.x[0]
    return None, _where(condition, step.dy, 0.0), _where(condition, 0.0, step.dy)


def _linear(step: BackwardStep) -> Tensor:
    """Apply the op itself to the gradient, since a backward op is linear in its first operand."""
    return step.b.apply(step.op, step.dy, step.x[1])


def _sigmoid_twice(step: BackwardStep) -> Gradients:
    dy, x = step.x
    s = x.sigmoid()
    return _linear(step), step.dy * dy * s * (1.0 - s) * (1.0 - 2.0 * s)


def _tanh_twice(step: BackwardStep) -> Gradients:
    dy, x = step.x
    return _linear(step), (step.dy * dy).pointwise("tanh_backward", x) * x.tanh() * -2.0


def _elu_twice(step: BackwardStep) -> Gradients:
    dy, x = step.x
    bend = _where(x > 0.0, 0.0, _exp_below(x) * step.op.attributes["alpha"])
    return _linear(step), step.dy * dy * bend


def _gelu_twice(step: BackwardStep) -> Gradients:
    dy, x = step.x
    density = (x * x * -0.5).exp() * (1.0 / ROOT_TWO_PI)
    return _linear(step), step.dy * dy * density * (2.0 - x * x)


def _gelu_tanh_slope(step: BackwardStep, dy: Tensor, x: Tensor) -> Tensor:
    root = math.sqrt(2.0 / math.pi)
    t = ((x + x * x * x * 0.044715) * root).tanh()
    return dy * (0.5 * (1.0 + t) + x * (1.0 - t * t) * (1.0 + x * x * (3 * 0.044715)) * (0.5 * root))


def _softplus_twice(step: BackwardStep) -> Gradients:
    dy, x = step.x
    return _linear(step), (step.dy * dy).pointwise("sigmoid_backward", x)


def _swish_twice(step: BackwardStep) -> Gradients:
    dy, x = step.x
    beta = step.op.attributes["beta"]
    z = x * beta
    s = z.sigmoid()
    return _linear(step), step.dy * dy * s * (1.0 - s) * (2.0 + z * (1.0 - 2.0 * s)) * beta


def _through_cast(step: BackwardStep) -> Gradients:
    """Return the gradient from before its cast to the result's dtype, if it then had the operand's dtype."""
    node, wanted = step.dy.value.node, step.x[0].dtype
    if node is None or not isinstance(node.op, Cast) or wanted.itemsize <= step.dy.dtype.itemsize:
        return step.dy
    source = node.operands[0]
    return Tensor(step.b, source) if source.type.dtype is wanted else step.dy


RULES: dict[str, Rule] = {
    **{name: _unary(rule) for name, rule in UNARY.items()},
    **{name: _backward_op(backward) for name, backward in BACKWARD.items()},
    # by the result instead of the operand: both are positive at the same elements, and later ops store the result
    "relu": lambda s: s.dy.pointwise("relu_backward", s.y[0]),
    "add": lambda s: (s.dy, s.dy),
    "add_square": lambda s: (s.dy, s.dy * s.x[1] * 2.0),
    "sub": lambda s: (s.dy, -s.dy),
    "mul": lambda s: (s.dy * s.x[1], s.dy * s.x[0]),
    "div": lambda s: (s.dy / s.x[1], -(s.dy * s.y[0]) / s.x[1]),
    "max": _maximum,
    "min": _maximum,
    "mod": _mod,
    "floor_mod": _floor_mod,
    "pow": _pow,
    "prelu": _prelu,
    "where": _choose,
    "relu_backward": lambda s: (_linear(s), None),
    "leaky_relu_backward": lambda s: (_linear(s), None),
    "sigmoid_backward": _sigmoid_twice,
    "tanh_backward": _tanh_twice,
    "elu_backward": _elu_twice,
    "gelu_backward": _gelu_twice,
    "gelu_tanh_backward": by_formula(_gelu_tanh_slope, lambda: _rules()),
    "softplus_backward": _softplus_twice,
    "swish_backward": _swish_twice,
    "cast": _through_cast,
}

_FLAT = "its derivative is zero wherever it has one"
_NO_FLOATS = "its results are not floating-point numbers"
STOPS: dict[str, str] = {
    **dict.fromkeys(("ceil", "floor", "round", "sign", "gen_index"), _FLAT),
    **dict.fromkeys(("logical_not", "logical_and", "logical_or", "logical_xor", "is_nan", "is_inf"), _NO_FLOATS),
    **dict.fromkeys(("cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le"), _NO_FLOATS),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"), _NO_FLOATS),
    **dict.fromkeys(("shift_left", "shift_right"), _NO_FLOATS),
}


def _rules() -> Rules:
    return RULES
