"""Import activations that have a bias, a gate or another form than ONNX's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.frontends.onnx.ops.matmul import matmul
from fusec.ir import Value
from fusec.ops import Split, pw
from fusec.ops.spec import require


def bias_gelu(g: Emitter, a: Value, b: Value, /) -> Value:
    return g(pw("gelu"), g(pw("add"), a, b))


def fast_gelu(g: Emitter, x: Value, bias: Value | None = None, /) -> Value:
    return g(pw("gelu_tanh"), x if bias is None else g(pw("add"), x, bias))


def quick_gelu(g: Emitter, x: Value, /, *, alpha: float = 1.702) -> Value:
    return g(pw("swish", beta=alpha), x)


def bias_split_gelu(g: Emitter, x: Value, bias: Value, /) -> Value:
    """Import BiasSplitGelu: the first half of x + bias, times Gelu of its second half."""
    width = x.type.shape[-1] if x.type.rank else 0
    require(width > 0 and width % 2 == 0, f"x of shape {list(x.type.shape)} has no two halves")
    linear, gate = g.many(Split(x.type.rank - 1, (width // 2, width // 2)), g(pw("add"), x, bias))
    return g(pw("mul"), linear, g(pw("gelu"), gate))


def gemm_fast_gelu(g: Emitter, x: Value, w: Value, bias: Value | None = None, /) -> Value:
    return fast_gelu(g, matmul(g, x, w), bias)


# The activations that onnxruntime fuses into a product or convolution, by their ONNX name. Each takes the fused op's
# parameters alpha, beta and gamma; None stands for one that is not given, whose default is that of the ONNX op.
Parameters = tuple[float | None, float | None, float | None]


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


_FUSED: Mapping[str, Callable[[Parameters], tuple[str, Mapping[str, float]]]] = {
    "Relu": lambda p: ("relu", {}),
    "Tanh": lambda p: ("tanh", {}),
    "Sigmoid": lambda p: ("sigmoid", {}),
    "Softplus": lambda p: ("softplus", {}),
    "Softsign": lambda p: ("softsign", {}),
    "HardSwish": lambda p: ("hard_swish", {}),
    "LeakyRelu": lambda p: ("leaky_relu", {"alpha": _or(p[0], 0.01)}),
    "Elu": lambda p: ("elu", {"alpha": _or(p[0], 1.0)}),
    "ThresholdedRelu": lambda p: ("thresholded_relu", {"alpha": _or(p[0], 1.0)}),
    "HardSigmoid": lambda p: ("hard_sigmoid", {"alpha": _or(p[0], 0.2), "beta": _or(p[1], 0.5)}),
    "Selu": lambda p: (
        "selu",
        {"alpha": _or(p[0], 1.67326319217681884765625), "gamma": _or(p[2], 1.05070102214813232421875)},
    ),
    "Clip": lambda p: ("clip", {"min": _or(p[0], -float("inf")), "max": _or(p[1], float("inf"))}),
}


def activated(g: Emitter, x: Value, activation: str, parameters: Parameters) -> Value:
    """Apply the activation of a fused op; "" is none. Raises VerifyError if fusec does not know it."""
    if not activation:
        return x
    require(activation in _FUSED, f"knows no activation {activation!r}, only {', '.join(sorted(_FUSED))}")
    name, attributes = _FUSED[activation](parameters)
    return g(pw(name, **attributes), x)


TABLE: Mapping[str, OpFunction] = {
    "BiasGelu": bias_gelu,
    "FastGelu": fast_gelu,
    "QuickGelu": quick_gelu,
    "BiasSplitGelu": bias_split_gelu,
    "GemmFastGelu": gemm_fast_gelu,
}
