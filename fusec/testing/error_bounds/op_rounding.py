"""Describe the rounding of ops: exact ops, lengths of sums, and approximations of functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fusec.ir import HostArray, Node, Op
from fusec.ops import AttentionTrain, BatchNormBackward, LayerNormBackward, Reduce, Scatter

# Results are elements of the operands, or their negatives, or zero.
_MOVES = frozenset(
    (
        *("identity", "reshape", "transpose", "relayout", "expand", "concat", "split", "slice", "gather"),
        *("max_pool", "max_pool_train", "abs", "neg", "relu", "max", "min", "where", "relu_backward", "gen_index"),
        *("is_nan", "is_inf", "logical_not", "logical_and", "logical_or", "logical_xor"),
        *("cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right", "top_k"),
        "dilate",
        "non_max_suppression",
        *("random_bits", "all_finite"),
    )
)
# One IEEE operation: exact wherever its result can be represented.
_SINGLE = frozenset(
    (
        *("add", "sub", "mul", "leaky_relu", "prelu", "thresholded_relu", "leaky_relu_backward", "clip", "pad"),
        *("sign", "floor", "ceil", "round", "mod", "cast"),
    )
)
# Sums of products: exact if the operands are small multiples of a power of two.
_SUMS = frozenset({"conv", "conv_flipped", "conv_transpose", "conv_wgrad", "matmul", "add_square"})
# An infinite result of these ops need not be an overflow.
POLES = frozenset(
    (
        *("div", "reciprocal", "rsqrt", "log", "pow", "atanh", "tan", "mod", "floor_mod", "reduce", "softmax"),
        *("batch_norm", "instance_norm", "group_norm", "layer_norm", "rms_norm", "lrn", "cast", "pad", "clip"),
        *("batch_norm_train", "channel_sums", "batch_norm_by_sums", "batch_norm_backward", "layer_norm_backward"),
        *("attention", "attention_train", "attention_backward"),
    )
)
PRODUCTS = frozenset({"conv", "conv_flipped", "conv_transpose", "conv_wgrad", "matmul"})

# Gradients of functions whose slope tends to zero.
FADING = frozenset(f"{name}_backward" for name in ("gelu", "gelu_tanh", "sigmoid", "tanh", "softplus", "swish"))


def is_move(op: Op) -> bool:
    """Tell if the op only passes elements on, without arithmetic."""
    if isinstance(op, Reduce):
        return op.kind in ("max", "min")
    if isinstance(op, Scatter):
        return op.reduction in ("none", "max", "min")
    return op.name in _MOVES or (op.name == "resize" and op.attributes["mode"] == "nearest")


def is_single(op: Op) -> bool:
    """Tell if the op rounds at most once, and is exact if its result can be represented.

    An op with an attribute that is no fp32 number is not: the attribute itself is rounded.
    """
    numbers = [v for v in op.attributes.values() if isinstance(v, float)]
    return op.name in _SINGLE and all(float(np.float32(v)) == v for v in numbers)


def is_exact(node: Node, operands: list[HostArray], digits: int, operand_digits: int) -> bool:
    """Tell if a sum is exact in every order of its terms.

    Operands must be multiples of a power of two so small that no partial sum needs more bits.
    digits: significand bits of the accumulator. operand_digits: significand bits of an operand.
    """
    op = node.op
    factors = operands
    if isinstance(op, Reduce):
        if op.kind not in ("sum", "l1", "sum_square", "mean"):
            return False
        if op.kind == "mean" and math.frexp(sum_length(node))[0] != 0.5:
            return False
        factors = [*operands, *operands] if op.kind == "sum_square" else operands
    elif op.name == "add_square":
        factors = [operands[0], operands[1], operands[1]]
    elif op.name not in _SUMS:
        return False
    top = float(sum_length(node))
    for x in factors:
        if x.size == 0:
            continue
        most = float(np.abs(x).max())
        if not most < 1e9:
            return False
        bits = next((k for k in (0, 1, 4, 8) if np.array_equal(scaled := x * 2.0**k, np.rint(scaled))), None)
        if bits is None or most * 2.0**bits >= 2.0**operand_digits:
            return False
        top *= max(most * 2.0**bits, 1.0)
    return top < 2.0**digits


# The factor of the sum is the first operand: x, or the gradient.
_ADD_ONE = frozenset({"gelu", "gelu_tanh", "gelu_backward", "gelu_tanh_backward"})


def intermediate_size(
    op: Op, lowered: bool, spelled: bool, operands: list[HostArray], results: list[HostArray], at: int
) -> HostArray | None:
    """Estimate the largest intermediate number of each element, where the result may be far smaller.

    The logarithm of a sum of exponentials rounds a sum near 1. elu, selu and celu are lowered to exp(x) - 1. A norm's
    gradient subtracts from dy its mean and its share along x; with few elements, the difference is almost zero.
    attention_train subtracts from the scores the logarithm of the sum of their exponentials. That number is rounded,
    which changes all weights of a query by the same factor, and their sum from 1. In ONNX, gelu and its gradients add
    1 to a number near -1. A cubic grid_sample adds up products with weights of both signs.

    lowered, spelled: the op is executed, or is computed as the single ops that ONNX writes for it.
    at: the place of the result in `results`. Returns None for other ops.
    """
    result = results[at]
    if isinstance(op, AttentionTrain):
        size = np.abs(results[1]) * np.abs(result) if at == 0 else np.ones(result.shape)
        return np.where(np.isfinite(size), size, 0.0)
    if spelled and op.name in _ADD_ONE:
        size = np.broadcast_to(np.abs(operands[0]), result.shape)
        return np.where(np.isfinite(size), size, 0.0)
    if op.name == "grid_sample" and op.attributes["mode"] == "cubic":
        image = np.abs(operands[0])
        return np.full(result.shape, image[np.isfinite(image)].max(initial=0.0))
    if (op.name == "softmax" and op.attributes["log"]) or (isinstance(op, Reduce) and op.kind == "log_sum_exp"):
        return np.isfinite(result) * 1.0
    if lowered and op.name in ("elu", "selu", "celu"):
        scale = abs(math.prod(v for v in op.attributes.values() if isinstance(v, float)))
        return (result < 0) * scale
    if isinstance(op, (LayerNormBackward, BatchNormBackward)) and result.shape == operands[1].shape:
        size = _norm_gradient_terms(op, *operands)
        return np.where(np.isfinite(size), size, 0.0)
    return None


def _norm_gradient_terms(
    op: LayerNormBackward | BatchNormBackward, dy: HostArray, x: HostArray, scale: HostArray, *stored: HostArray
) -> HostArray:
    """Find the size of the terms that a norm's gradient adds up for each element.

    The mean of dy and its share along x are at most its root mean square, also where dy itself is zero.
    """
    if isinstance(op, BatchNormBackward):
        axes = (0, *range(2, x.ndim))
        scaled = dy * (scale * stored[1]).reshape(-1, *(1,) * (x.ndim - 2))
    else:
        axes = tuple(range(op.axis % x.ndim, x.ndim))
        centred = x - x.mean(axis=axes, keepdims=True) if op.centred else x
        scaled = dy * scale / np.sqrt((centred * centred).mean(axis=axes, keepdims=True) + op.epsilon)
    return np.abs(scaled) + np.sqrt((scaled * scaled).mean(axis=axes, keepdims=True))


# Absolute errors of cuDNN's functions in fp32, by the function, measured on an H200 over -12 to 12, normals and
# 1e-3 to 1e3: a quarter of the worst, for bounds are several samples wide. Times the magnitude of the last
# operand where it is over 1 (`grows`), times that of the gradient where there is one.
_APPROXIMATE: Mapping[str, tuple[float, bool]] = {
    "tanh": (3e-6, False),
    "softplus": (3e-7, True),
    "log": (3e-7, False),
    "sin": (1e-7, True),
    "cos": (1e-7, True),
    "tan": (1e-7, True),
    "erf": (3e-7, False),
    "exp": (0.0, True),
    "gelu": (1e-7, True),
    "gelu_tanh": (2e-6, True),
    "swish": (1e-7, True),
    "mish": (3e-6, True),
    "selu": (1e-7, True),
    "elu": (1e-7, True),
    "celu": (1e-7, True),
    "sigmoid": (3e-8, False),
    "hard_sigmoid": (3e-8, True),
    "hard_swish": (1e-7, True),
    "tanh_backward": (8e-6, False),
    "sigmoid_backward": (1e-7, True),
    "softplus_backward": (1e-7, True),
    "swish_backward": (3e-7, True),
    "gelu_backward": (3e-7, True),
    "gelu_tanh_backward": (3e-6, True),
    "elu_backward": (1e-7, True),
}


def approximation(op: Op, operands: list[HostArray], result: HostArray) -> HostArray | None:
    """Bound the error of a GPU's function by element; None for ops that are not approximated."""
    known = _APPROXIMATE.get(op.name)
    if known is None:
        return None
    (error, grows), x = known, operands[-1]
    with np.errstate(all="ignore"):
        size = np.maximum(1.0, np.abs(x)) if grows else 1.0
        if op.name == "tan":
            size = size * (1.0 + np.square(result))
        if op.name == "exp":
            return np.abs(result) * size * 2e-8
        if len(operands) == 2:
            size = size * np.abs(operands[0])
        scale = max([1.0, *(abs(v) for v in op.attributes.values() if isinstance(v, float))])
        return np.broadcast_to(error * scale * size, result.shape)


_SMALLEST = 2.0**-126  # positive fp32 number that is not subnormal; arithmetic may turn smaller ones to zero
# Functions that multiply a fading exponential by x or by a gradient.
_EXPONENTIAL = frozenset(("swish", "mish", "gelu", "gelu_tanh", *FADING))


def flushed(op: Op, operands: list[HostArray]) -> HostArray | None:
    """Bound the error by element if an exponential inside a function becomes zero; None for other ops.

    The result may be larger than the exponential: mish(-89) is -89 times a number that is subnormal in fp32.
    """
    if op.name not in _EXPONENTIAL:
        return None
    with np.errstate(all="ignore"):
        size = np.maximum(1.0, np.abs(operands[-1])) * (np.abs(operands[0]) if len(operands) == 2 else 1.0)
    return _SMALLEST * np.where(np.isfinite(size), size, 0.0)


def never_zero(op: Op) -> bool:
    """Tell if a result of zero means that it underflowed (or that the operand is minus infinity)."""
    return op.name in ("exp", "sigmoid", "softplus") or (op.name == "softmax" and not op.attributes["log"])


Shapes = Sequence[tuple[int, ...]]


def _channel_size(op: Any, shapes: Shapes) -> int:
    return math.prod(shapes[0]) // max(shapes[0][1], 1)


def _filter_terms(op: Any, shapes: Shapes) -> int:
    return math.prod(shapes[1]) // max(shapes[1][1], 1)


# terms that one element of the result adds up, from the op and the shapes of its operands; 1 for other ops
_SUM_LENGTHS: Mapping[str, Callable[[Any, Shapes], int]] = {
    **dict.fromkeys(("conv", "conv_flipped"), lambda op, shapes: math.prod(shapes[1][1:])),
    "conv_transpose": _filter_terms,
    "deform_conv": lambda op, shapes: 4 * math.prod(shapes[1][1:]),
    "conv_wgrad": _filter_terms,
    "matmul": lambda op, shapes: shapes[0][-1],
    "packed_matmul": lambda op, shapes: shapes[0][-1],
    "attention": lambda op, shapes: shapes[0][-1] + shapes[1][2],
    "attention_train": lambda op, shapes: shapes[0][-1] + shapes[1][2],
    "attention_backward": lambda op, shapes: shapes[0][-1] + 2 * shapes[2][2],
    "rotary": lambda op, shapes: 2,
    "add_square": lambda op, shapes: 2,
    "avg_pool": lambda op, shapes: math.prod(op.window),
    "max_pool_backward": lambda op, shapes: math.prod(op.window),
    "reduce": lambda op, shapes: math.prod(shapes[0][axis] for axis in op.axes),
    "cumulate": lambda op, shapes: shapes[0][op.axis],
    # an error of a step is one of all steps after it, and the bound takes the root of this
    "linear_scan": lambda op, shapes: (2 * shapes[0][op.axis]) ** 2,
    "scatter": lambda op, shapes: 1 + math.prod(shapes[1]),
    "softmax": lambda op, shapes: shapes[0][op.axis],
    "layer_norm": lambda op, shapes: math.prod(shapes[0][op.axis % len(shapes[0]) :]),
    "rms_norm": lambda op, shapes: math.prod(shapes[0][op.axis % len(shapes[0]) :]),
    "layer_norm_backward": lambda op, shapes: math.prod(shapes[0]),
    "instance_norm": lambda op, shapes: math.prod(shapes[0][2:]),
    "group_norm": lambda op, shapes: math.prod(shapes[0][1:]) // op.groups,
    "lrn": lambda op, shapes: op.size,
    "batch_norm_train": _channel_size,
    "batch_norm_by_sums": _channel_size,
    "batch_norm_backward": _channel_size,
    "channel_sums": _channel_size,
    "resize": lambda op, shapes: 4,
    "grid_sample": lambda op, shapes: 16 if op.mode == "cubic" else 4,
    # an error of a step is one of all steps after it, and the bound takes the root of this
    "recurrent": lambda op, shapes: (shapes[0][0] * (shapes[1][2] + 8)) ** 2,
}


def sum_length(node: Node) -> int:
    """Count the terms that one element of the result adds up."""
    count = _SUM_LENGTHS.get(node.op.name)
    return max(count(node.op, [v.type.shape for v in node.operands]), 1) if count is not None else 1


def dropping_nan(op: Op, operands: list[HostArray], upper: bool) -> HostArray | None:
    """Compute the op as cuDNN's modes do that drop NaN; None for other ops, and if nothing is NaN.

    A maximum or minimum gives the other operand, a clip gives a bound, and relu_backward gives the whole gradient.
    upper: use a clip's upper bound if it has two, because rules may apply that one first.
    """
    if op.name not in ("max", "min", "clip", "relu_backward") or operands[-1].dtype.kind != "f":
        return None
    if not any(np.isnan(x).any() for x in operands):
        return None
    if op.name == "relu_backward":
        dy, x = operands
        return np.where(x <= 0, 0.0, dy)
    if op.name != "clip":
        return (np.fmax if op.name == "max" else np.fmin)(*operands)
    bounds = [b for b in (op.attributes["min"], op.attributes["max"]) if math.isfinite(b)]
    (x,) = operands
    return np.where(np.isnan(x), bounds[-1 if upper else 0], *op.reference(np, x)) if bounds else x
