"""Lower each pointwise op to one cuDNN mode, or to several where cuDNN has none of the same meaning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fusec.errors import LoweringError
from fusec.ir import DType, Node, Value, quote
from fusec.lowering.cudnn_graph import Attribute
from fusec.lowering.graph_builder import STORED, CudnnBuilder
from fusec.ops import Pointwise

FP8_LARGEST = 448.0  # of f8e4m3


class CallWriter:
    """Writes one op as a sequence of cuDNN pointwise calls; the last one computes the op's result."""

    def __init__(self, b: CudnnBuilder, node: Node):
        self.b, self.node, self.folding = b, node, b.foldings[node]
        # An epilogue reads the image of its convolution through an alias. With one tensor for both, plans failed when
        # they ran, or accessed illegal addresses.
        found = [b.operand(v, self.folding) for v in node.operands]
        self.operands = [b.shared_alias(uid) if uid in b.images else uid for uid in found]

    def number(self, value: float, fixed: bool = False) -> int:
        """Return a number as an operand. fixed: it is the same in all layers."""
        return self.b.scalar(value, len(self.folding.groups), fixed)

    def step(self, mode: str, *inputs: int, dtype: DType = DType.F32, **attributes: Attribute) -> int:
        shape = self.node.result.type.shape
        uid = self.b.tensor(self.folding.packed(shape), dtype, virtual=True)
        self.b.call("pointwise", inputs, uid, mode, attributes=attributes)
        return uid

    def above(self, x: int, number: float) -> int:
        """Return the mask x > number, which is false for NaN."""
        return self.step("cmp_gt", x, self.number(number), dtype=DType.BOOL)

    def last(self, mode: str, *inputs: int, **attributes: Attribute) -> None:
        output = self.b.result(self.node.result, self.folding)
        compute = DType.BOOL if mode.startswith("logical") else DType.F32
        self.b.call("pointwise", inputs, output, mode, compute, attributes)


def _direct(b: CudnnBuilder, node: Node) -> None:
    """Lower ops that are one cuDNN mode of the same meaning."""
    assert isinstance(node.op, Pointwise)
    for value in (*node.operands, node.result):
        dtype = value.type.dtype
        if dtype in (DType.I32, DType.I8):
            # cuDNN computes them in fp32: sums and products wrap and round differently
            raise LoweringError(f"{node.op.name} in {dtype.value}: cuDNN would compute it in fp32")
    steps = CallWriter(b, node)
    a = node.op.attributes
    match node.op.name:
        case "leaky_relu" if not 0.0 <= a["alpha"] <= 1.0:
            # a select, because cuDNN computes max(x, slope * x), which is wrong for such a slope
            (x,) = steps.operands
            steps.last("binary_select", x, steps.step("mul", x, steps.number(a["alpha"])), steps.above(x, 0.0))
        case "leaky_relu":
            steps.last(node.op.name, *steps.operands, negative_slope=a["alpha"])
        case "leaky_relu_backward":
            # a select, not cuDNN's mode, because that mode multiplies by a slope computed from x, which overflows
            dy, x = steps.operands
            steps.last("binary_select", dy, steps.step("mul", dy, steps.number(a["alpha"])), steps.above(x, 0.0))
        case "swish" | "swish_backward":
            beta: dict[str, float] = {} if a["beta"] == 1.0 else {"beta": a["beta"]}
            steps.last(node.op.name, *steps.operands, **beta)
        case "gelu_tanh" | "gelu_tanh_backward":
            steps.last(node.op.name.replace("gelu_tanh", "gelu_approx_tanh"), *steps.operands)
        case _:
            steps.last(node.op.name, *steps.operands)


def _where(b: CudnnBuilder, node: Node) -> None:
    if node.result.type.dtype not in (DType.F32, DType.F16, DType.BF16):
        raise LoweringError(f"where in {node.result.type.dtype.value}: cuDNN would compute it in fp32")
    steps = CallWriter(b, node)
    mask, x, y = steps.operands
    steps.last("binary_select", x, y, mask)


def _elu(b: CudnnBuilder, node: Node) -> None:
    alpha = node.op.attributes["alpha"]
    if alpha == 1.0:
        steps = CallWriter(b, node)
        steps.last("elu", *steps.operands)
    else:
        _exponential_below_zero(b, node, above=1.0, inner=1.0, outer=alpha)


def _elu_backward(b: CudnnBuilder, node: Node) -> None:
    """Write dy where x > 0, and dy * (alpha * exp(x)) elsewhere: a select, because cuDNN's mode takes no alpha."""
    steps = CallWriter(b, node)
    dy, x = steps.operands
    slope = steps.step("mul", steps.step("exp", x), steps.number(node.op.attributes["alpha"]))
    steps.last("binary_select", dy, steps.step("mul", dy, slope), steps.above(x, 0.0))


def _exponential_below_zero(b: CudnnBuilder, node: Node, *, above: float, inner: float, outer: float) -> None:
    """Write above * x where x > 0, and outer * (exp(inner * x) - 1) elsewhere.

    This is a select, because cuDNN's max and min turn NaN into a number. An exponential that overflows is not selected.
    """
    steps = CallWriter(b, node)
    (x,) = steps.operands
    power = x if inner == 1.0 else steps.step("mul", x, steps.number(inner))
    below = steps.step("mul", steps.step("sub", steps.step("exp", power), steps.number(1.0)), steps.number(outer))
    scaled = x if above == 1.0 else steps.step("mul", x, steps.number(above))
    steps.last("binary_select", scaled, below, steps.above(x, 0.0))


def _clip(b: CudnnBuilder, node: Node) -> None:
    if not node.result.type.dtype.is_float:
        raise LoweringError(f"clip in {node.result.type.dtype.value}: cuDNN would compute it in fp32")
    low, high = node.op.attributes["min"], node.op.attributes["max"]
    steps = CallWriter(b, node)
    (x,) = steps.operands
    if low == 0.0 and high == math.inf:
        steps.last("relu", x)
    elif low == 0.0:
        steps.last("relu", x, lower_clip=0.0, upper_clip=high)  # keeps the precompiled engines
    elif low == -math.inf and high == math.inf:
        steps.last("identity", x)
    elif low == -math.inf:
        steps.last("min", x, steps.number(high))
    elif high == math.inf:
        steps.last("max", x, steps.number(low))
    else:
        fixed = (low, high) == (-FP8_LARGEST, FP8_LARGEST)  # other libraries saturate there
        steps.last("min", steps.step("max", x, steps.number(low, fixed)), steps.number(high, fixed))


def _hard_sigmoid(b: CudnnBuilder, node: Node) -> None:
    a, steps = node.op.attributes, CallWriter(b, node)
    line = steps.step("add", steps.step("mul", steps.operands[0], steps.number(a["alpha"])), steps.number(a["beta"]))
    steps.last("relu", line, lower_clip=0.0, upper_clip=1.0)


def _hard_swish(b: CudnnBuilder, node: Node) -> None:
    steps = CallWriter(b, node)
    (x,) = steps.operands
    line = steps.step("add", steps.step("mul", x, steps.number(1.0 / 6.0)), steps.number(0.5))
    steps.last("mul", x, steps.step("relu", line, lower_clip=0.0, upper_clip=1.0))


def _mish(b: CudnnBuilder, node: Node) -> None:
    """Write x * tanh(softplus(x)) as x / (1 + 2/n) with n = e^x (e^x + 2).

    Where n overflows the result is x. cuDNN's fused tanh would be NaN there.
    """
    steps = CallWriter(b, node)
    (x,) = steps.operands
    two, exponential = steps.number(2.0), steps.step("exp", x)
    n = steps.step("mul", exponential, steps.step("add", exponential, two))
    steps.last("div", x, steps.step("add", steps.step("div", two, n), steps.number(1.0)))


def _selu(b: CudnnBuilder, node: Node) -> None:
    a = node.op.attributes
    _exponential_below_zero(b, node, above=a["gamma"], inner=1.0, outer=a["alpha"] * a["gamma"])


def _celu(b: CudnnBuilder, node: Node) -> None:
    alpha = node.op.attributes["alpha"]
    _exponential_below_zero(b, node, above=1.0, inner=1.0 / alpha, outer=alpha)


def _softsign(b: CudnnBuilder, node: Node) -> None:
    steps = CallWriter(b, node)
    (x,) = steps.operands
    steps.last("div", x, steps.step("add", steps.step("abs", x), steps.number(1.0)))


def _thresholded_relu(b: CudnnBuilder, node: Node) -> None:
    steps = CallWriter(b, node)
    (x,) = steps.operands
    steps.last("binary_select", x, steps.number(0.0), steps.above(x, node.op.attributes["alpha"]))


def _prelu(b: CudnnBuilder, node: Node) -> None:
    steps = CallWriter(b, node)
    x, slope = steps.operands
    # a select, because max(x, 0) + slope * min(x, 0) is NaN for an infinite slope and a positive x
    above = steps.step("cmp_ge", x, steps.number(0.0), dtype=DType.BOOL)
    steps.last("binary_select", x, steps.step("mul", x, slope), above)


def _within_fp8(value: Value) -> bool:
    """Tell if numbers are clipped to the range of f8e4m3: beyond it, a cast gives NaN, and cuDNN the largest number."""
    limits = value.node.op.attributes if value.node is not None and value.node.op.name == "clip" else {}
    return bool(limits) and -FP8_LARGEST <= limits["min"] <= limits["max"] <= FP8_LARGEST


def _cast(b: CudnnBuilder, node: Node) -> None:
    source, target = node.operands[0].type.dtype, node.result.type.dtype
    stores = target is DType.F8E4M3 and node.result in b.stored and _within_fp8(node.operands[0])
    if not (target.is_float or stores) or source not in STORED:
        raise LoweringError(f"cast {source.value} to {target.value}: cuDNN's rounding is not the op's")
    value = node.operands[0]
    if source in (DType.I8, DType.F8E4M3) and value in b.uids:
        raise LoweringError(
            f"{quote(value.name)} is rounded to {source.value} only where it is stored, and read before"
        )
    virtual = node.result not in b.stored and node.result not in b.feeds_anchor
    exact = source.is_float or source in (DType.I8, DType.F8E4M3) or (source is DType.I32 and value in b.uids)
    if virtual and exact and value.scalar() is None:
        # no call, because registers hold fp32, and ops compute in fp32 with operands of other types
        b.uids[node.result] = b.operand(value, b.foldings[node])
        return
    steps = CallWriter(b, node)
    steps.last("identity", *steps.operands)


_SAME_MODE = (
    *("abs", "ceil", "erf", "exp", "floor", "identity", "log", "neg", "reciprocal", "relu", "rsqrt"),
    *("sigmoid", "softplus", "sqrt", "tanh", "gelu", "gelu_tanh", "swish", "leaky_relu", "logical_not"),
    *("add", "add_square", "sub", "mul", "div", "max", "min", "pow"),
    *("cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le", "logical_and", "logical_or"),
    *("relu_backward", "leaky_relu_backward", "sigmoid_backward", "tanh_backward", "gelu_backward"),
    *("gelu_tanh_backward", "softplus_backward", "swish_backward"),
)

POINTWISE: Mapping[str, Callable[[CudnnBuilder, Node], None]] = {
    **dict.fromkeys(_SAME_MODE, _direct),
    "where": _where,
    "elu": _elu,
    "elu_backward": _elu_backward,
    "clip": _clip,
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": _hard_swish,
    "mish": _mish,
    "selu": _selu,
    "celu": _celu,
    "softsign": _softsign,
    "thresholded_relu": _thresholded_relu,
    "prelu": _prelu,
    "cast": _cast,
}
