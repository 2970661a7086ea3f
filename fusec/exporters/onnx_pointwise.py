"""Export pointwise ops."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fusec.errors import LoweringError
from fusec.exporters.onnx_element_types import ELEMENT_TYPES
from fusec.exporters.onnx_emit import Export, Exporter, formula, operator
from fusec.ir import Node, print_node


def _neg(e: Exporter, node: Node, x: str) -> str:
    unsigned = node.operands[0].type.dtype.value.startswith("u")
    return e.op("Sub", e.number(0, node), x) if unsigned else e.op("Neg", x)


def _clip(e: Exporter, node: Node, x: str) -> str:
    low, high = node.op.attributes["min"], node.op.attributes["max"]
    dtype = node.operands[0].type.dtype
    if not dtype.is_float:
        info = np.iinfo(dtype.numpy)
        low = math.ceil(min(max(low, info.min), info.max))
        high = math.floor(min(max(high, info.min), info.max))
    if low > high:
        return e.op("Min", e.op("Max", x, e.number(low, node)), e.number(high, node))
    bounds = [e.number(b, node) if math.isfinite(b) else "" for b in (low, high)]
    if not any(bounds):
        return e.op("Identity", x)
    return e.op("Clip", x, *(bounds if bounds[1] else bounds[:1]))


def _swish(e: Exporter, node: Node, x: str) -> str:
    beta = node.op.attributes["beta"]
    return e.op("Mul", x, e.op("Sigmoid", x if beta == 1.0 else e.op("Mul", x, e.number(beta, node))))


def _floor_mod(e: Exporter, node: Node, x: str, y: str) -> str:
    if not node.operands[0].type.dtype.is_float:
        return e.op("Mod", x, y)
    rest, zero = e.op("Mod", x, y, fmod=1), e.number(0.0, node)
    differ = e.op("Xor", e.op("Less", rest, zero), e.op("Less", y, zero))
    wrong = e.op("And", differ, e.op("Not", e.op("Equal", rest, zero)))
    return e.op("Where", wrong, e.op("Add", rest, y), rest)


def _prelu(e: Exporter, node: Node, x: str, slope: str) -> str:
    if node.result.type.shape == node.operands[0].type.shape:
        return e.op("PRelu", x, slope)
    return e.op("Where", e.op("GreaterOrEqual", x, e.number(0.0, node)), x, e.op("Mul", slope, x))


def _shift(e: Exporter, node: Node, x: str, y: str) -> str:
    dtype = node.operands[0].type.dtype
    left = node.op.name == "shift_left"
    if dtype.value.startswith("u"):
        return e.op("BitShift", x, y, direction="LEFT" if left else "RIGHT")
    raise LoweringError(f"{print_node(node)}: ONNX shifts unsigned integers only")


def _gen_index(e: Exporter, node: Node, x: str) -> str:
    (index,) = node.op.reference(np, np.zeros(node.operands[0].type.shape, node.operands[0].type.dtype.numpy))
    return e.initializer(np.asarray(index), e.fresh("index"))


def _positive(e: Exporter, node: Node, x: str) -> str:
    return e.op("Greater", x, e.number(0.0, node))


def _relu_backward(e: Exporter, node: Node, dy: str, x: str) -> str:
    return e.op("Where", _positive(e, node, x), dy, e.number(0.0, node))


def _leaky_relu_backward(e: Exporter, node: Node, dy: str, x: str) -> str:
    return e.op("Where", _positive(e, node, x), dy, e.op("Mul", dy, e.number(node.op.attributes["alpha"], node)))


def _sigmoid_backward(e: Exporter, node: Node, dy: str, x: str) -> str:
    return e.op("Mul", e.op("Mul", dy, e.op("Sigmoid", x)), e.op("Sigmoid", e.op("Neg", x)))


def _tanh_backward(e: Exporter, node: Node, dy: str, x: str) -> str:
    cosh = e.op("Cosh", x)
    return e.op("Div", dy, e.op("Mul", cosh, cosh))


def _elu_backward(e: Exporter, node: Node, dy: str, x: str) -> str:
    below = e.op("Mul", dy, e.op("Exp", e.op("Min", x, e.number(0.0, node))))
    return e.op("Where", _positive(e, node, x), dy, e.op("Mul", below, e.number(node.op.attributes["alpha"], node)))


def _swish_backward(e: Exporter, node: Node, dy: str, x: str) -> str:
    z = e.op("Mul", x, e.number(node.op.attributes["beta"], node))
    z = e.op("Clip", z, e.number(-800.0, node), e.number(800.0, node))
    slope = e.op("Add", e.op("Mul", z, e.op("Sigmoid", e.op("Neg", z))), e.number(1.0, node))
    return e.op("Mul", e.op("Mul", dy, e.op("Sigmoid", z)), slope)


def _limited(e: Exporter, node: Node, x: str) -> str:
    """Clip x to [-40, 40]: gelu's slope is exactly 0 or 1 outside, and no square overflows inside."""
    return e.op("Clip", x, e.number(-40.0, node), e.number(40.0, node))


def _gelu_backward(e: Exporter, node: Node, dy: str, x: str) -> str:
    x = _limited(e, node, x)
    erf = e.op("Erf", e.op("Mul", x, e.number(math.sqrt(0.5), node)))
    cdf = e.op("Mul", e.op("Add", erf, e.number(1.0, node)), e.number(0.5, node))
    bell = e.op("Exp", e.op("Mul", e.op("Mul", x, x), e.number(-0.5, node)))
    density = e.op("Mul", bell, e.number(1.0 / math.sqrt(2.0 * math.pi), node))
    return e.op("Mul", dy, e.op("Add", cdf, e.op("Mul", x, density)))


def _gelu_tanh_backward(e: Exporter, node: Node, dy: str, x: str) -> str:
    x, c = _limited(e, node, x), 2.0 * math.sqrt(2.0 / math.pi)
    square = e.op("Mul", x, x)
    inner = e.op("Mul", x, e.op("Add", e.op("Mul", square, e.number(0.044715 * c, node)), e.number(c, node)))
    slope = e.op("Add", e.op("Mul", square, e.number(3 * 0.044715 * c, node)), e.number(c, node))
    rest = e.op("Mul", e.op("Mul", x, slope), e.op("Sigmoid", e.op("Neg", inner)))
    return e.op("Mul", e.op("Mul", dy, e.op("Sigmoid", inner)), e.op("Add", rest, e.number(1.0, node)))


# ops with the same name in ONNX, except for the capital letter
_CAPITALISED = (
    *("abs", "ceil", "cos", "erf", "exp", "floor", "identity", "log", "relu", "reciprocal", "sigmoid", "sin"),
    *("softplus", "sqrt", "tan", "tanh", "mish", "softsign", "sign", "round", "acos", "asin", "atan", "cosh"),
    *("sinh", "acosh", "asinh", "atanh", "add", "sub", "mul", "div", "where", "max", "min", "pow", "gelu"),
)

# ops with another name in ONNX
_RENAMED = {
    "hard_swish": "HardSwish",
    "logical_not": "Not",
    "logical_and": "And",
    "logical_or": "Or",
    "logical_xor": "Xor",
    "is_nan": "IsNaN",
    "is_inf": "IsInf",
    "cmp_eq": "Equal",
    "cmp_gt": "Greater",
    "cmp_ge": "GreaterOrEqual",
    "cmp_lt": "Less",
    "cmp_le": "LessOrEqual",
    "matmul": "MatMul",
    "relayout": "Identity",
}


POINTWISE: Mapping[str, Export] = {
    **{name: operator(name.capitalize()) for name in _CAPITALISED},
    **{name: operator(kind) for name, kind in _RENAMED.items()},
    "elu": operator("Elu", "alpha"),
    "selu": operator("Selu", "alpha", "gamma"),
    "celu": operator("Celu", "alpha"),
    "leaky_relu": operator("LeakyRelu", "alpha"),
    "thresholded_relu": operator("ThresholdedRelu", "alpha"),
    "hard_sigmoid": operator("HardSigmoid", "alpha", "beta"),
    "gelu_tanh": operator("Gelu", approximate="tanh"),
    "mod": operator("Mod", fmod=1),
    "neg": formula(_neg),
    "rsqrt": formula(lambda e, node, x: e.op("Reciprocal", e.op("Sqrt", x))),
    "swish": formula(_swish),
    "clip": formula(_clip),
    "gen_index": formula(_gen_index),
    "add_square": formula(lambda e, node, x, y: e.op("Add", x, e.op("Mul", y, y))),
    "cmp_neq": formula(lambda e, node, x, y: e.op("Not", e.op("Equal", x, y))),
    "floor_mod": formula(_floor_mod),
    "prelu": formula(_prelu),
    "relu_backward": formula(_relu_backward),
    "leaky_relu_backward": formula(_leaky_relu_backward),
    "sigmoid_backward": formula(_sigmoid_backward),
    "tanh_backward": formula(_tanh_backward),
    "elu_backward": formula(_elu_backward),
    "gelu_backward": formula(_gelu_backward),
    "gelu_tanh_backward": formula(_gelu_tanh_backward),
    "softplus_backward": formula(lambda e, node, dy, x: e.op("Mul", dy, e.op("Sigmoid", x))),
    "swish_backward": formula(_swish_backward),
    "cast": lambda e, node, x: [e.op("Cast", *x, to=ELEMENT_TYPES[node.op.attributes["to"]])],
    "bitwise_and": operator("BitwiseAnd"),
    "bitwise_or": operator("BitwiseOr"),
    "bitwise_xor": operator("BitwiseXor"),
    "bitwise_not": operator("BitwiseNot"),
    "shift_left": formula(_shift),
    "shift_right": formula(_shift),
}
