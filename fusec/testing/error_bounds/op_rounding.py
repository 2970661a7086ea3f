"""Describe the rounding of ops: exact ops, lengths of sums, approximations and discontinuities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fusec.ir import DType, Node, Op
from fusec.ops import (
    Attention,
    AttentionBackward,
    AttentionTrain,
    BatchNormBackward,
    BatchNormBySums,
    BatchNormTrain,
    Cast,
    ChannelSums,
    Conv,
    ConvTranspose,
    ConvWgrad,
    Cumulate,
    GroupNorm,
    LayerNorm,
    LayerNormBackward,
    LocalResponseNorm,
    MaxPoolBackward,
    Reduce,
    RmsNorm,
    Scatter,
)
from fusec.ops.pooling import AvgPool

Array = np.ndarray[Any, Any]

# Results are elements of the operands, or their negatives, or zero.
_MOVES = frozenset(
    (
        *("identity", "reshape", "transpose", "relayout", "expand", "concat", "split", "slice", "gather"),
        *("max_pool", "abs", "neg", "relu", "max", "min", "where", "relu_backward", "gen_index"),
        *("is_nan", "is_inf", "logical_not", "logical_and", "logical_or", "logical_xor"),
        *("cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right", "top_k"),
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
_SUMS = frozenset({"conv", "conv_transpose", "conv_wgrad", "matmul", "add_square"})
# An infinite result of these ops need not be an overflow.
POLES = frozenset(
    (
        *("div", "reciprocal", "rsqrt", "log", "pow", "atanh", "tan", "mod", "floor_mod", "reduce", "softmax"),
        *("batch_norm", "instance_norm", "group_norm", "layer_norm", "rms_norm", "lrn", "cast", "pad", "clip"),
        *("batch_norm_train", "channel_sums", "batch_norm_by_sums", "batch_norm_backward", "layer_norm_backward"),
        *("attention", "attention_train", "attention_backward"),
    )
)
# Gradients of functions whose slope tends to zero.
_FADING = frozenset(f"{name}_backward" for name in ("gelu", "gelu_tanh", "sigmoid", "tanh", "softplus", "swish"))
PRODUCTS = frozenset({"conv", "conv_transpose", "conv_wgrad", "matmul"})


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


def is_exact(node: Node, operands: list[Array], digits: int, operand_digits: int) -> bool:
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


def intermediate_size(op: Op, lowered: bool, operands: list[Array], result: Array) -> Array | None:
    """Estimate the largest intermediate number of each element, where the result may be far smaller.

    The logarithm of a sum of exponentials rounds a sum near 1. elu, selu and celu are lowered to exp(x) - 1. A norm's
    gradient subtracts from dy its mean and its share along x; with few elements, the difference is almost zero.
    Returns None for other ops.
    """
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
    op: LayerNormBackward | BatchNormBackward, dy: Array, x: Array, scale: Array, *stored: Array
) -> Array:
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


def approximation(op: Op, operands: list[Array], result: Array) -> Array | None:
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


def never_zero(op: Op) -> bool:
    """Tell if a result of zero means that it underflowed (or that the operand is minus infinity)."""
    return op.name in ("exp", "sigmoid", "softplus") or (op.name == "softmax" and not op.attributes["log"])


def sum_length(node: Node) -> int:
    """Count the terms that one element of the result adds up."""
    op, x = node.op, node.operands[0].type
    if isinstance(op, Conv):
        return math.prod(node.operands[1].type.shape[1:])
    if isinstance(op, Cumulate):
        return max(x.shape[op.axis], 1)
    if isinstance(op, Scatter):
        return 1 + node.operands[1].type.size
    if isinstance(op, ConvTranspose):
        return math.prod(node.operands[1].type.shape) // max(node.operands[1].type.shape[1], 1)
    if op.name == "matmul":
        return max(x.shape[-1], 1)
    if op.name in ("attention", "attention_train"):
        return max(x.shape[-1] + node.operands[1].type.shape[2], 1)
    if op.name == "attention_backward":
        return max(x.shape[-1] + 2 * node.operands[2].type.shape[2], 1)
    if isinstance(op, AvgPool):
        return math.prod(op.window)
    if isinstance(op, Reduce):
        return max(math.prod(x.shape[a] for a in op.axes), 1)
    if op.name == "softmax":
        return max(x.shape[op.attributes["axis"]], 1)
    if isinstance(op, (LayerNorm, RmsNorm)):
        return max(math.prod(x.shape[op.axis % x.rank :]), 1)
    if op.name == "instance_norm":
        return max(math.prod(x.shape[2:]), 1)
    if isinstance(op, ConvWgrad):
        return max(math.prod(node.operands[1].type.shape) // max(node.operands[1].type.shape[1], 1), 1)
    if isinstance(op, (BatchNormTrain, ChannelSums, BatchNormBySums, BatchNormBackward)):
        return max(x.size // x.shape[1], 1)
    if isinstance(op, LayerNormBackward):
        return max(x.size, 1)
    if isinstance(op, MaxPoolBackward):
        return math.prod(op.window)
    if isinstance(op, GroupNorm):
        return max(math.prod(x.shape[1:]) // op.groups, 1)
    if isinstance(op, LocalResponseNorm):
        return op.size
    return 4 if op.name == "resize" else 2 if op.name in ("add_square", "rotary") else 1


# discontinuities of ops ------------------------------------------------------------------------------------------

Label = Callable[[Any, list[Array]], Array]  # a discontinuity is between two points of different labels


def _side(op: Any, operands: list[Array]) -> Array:
    return np.sign(operands[0])


def _second_side(op: Any, operands: list[Array]) -> Array:
    return np.sign(np.broadcast_arrays(*operands)[1])


def _itself(op: Any, operands: list[Array]) -> Array:
    return op.reference(np, *operands)[0]


def _between_ones(op: Any, operands: list[Array]) -> Array:
    return np.sign(operands[0] - 1) * 3 + np.sign(operands[0] + 1)


def _power(op: Any, operands: list[Array]) -> Array:
    x, y = operands
    return np.sign(x) + 10 * ((x < 0) & (y == np.rint(y)))


LABELS: Mapping[str, Label] = {
    **dict.fromkeys(("floor", "ceil", "round", "sign", "is_nan", "is_inf"), _itself),
    **dict.fromkeys(("cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le"), lambda op, v: np.sign(v[0] - v[1])),
    **dict.fromkeys(("reciprocal", "rsqrt", "sqrt", "log"), _side),
    **dict.fromkeys(("div", "relu_backward", "leaky_relu_backward", "elu_backward"), _second_side),
    **dict.fromkeys(("acos", "asin", "atanh"), _between_ones),
    "thresholded_relu": lambda op, v: v[0] > op.alpha,
    "acosh": lambda op, v: np.sign(v[0] - 1),
    "tan": lambda op, v: np.floor(v[0] / math.pi + 0.5),
    # With an error of half a radian, any result is possible. The shift moves whole numbers away from a label's ends.
    **dict.fromkeys(("sin", "cos"), lambda op, v: np.floor(2 * v[0] + 0.37)),
    "mod": lambda op, v: np.trunc(v[0] / v[1]),
    "floor_mod": lambda op, v: np.floor(v[0] / v[1]),
    "pow": _power,
}


def label_of(op: Op) -> Label | None:
    """Return the function that labels the two sides of an op's discontinuity.

    Returns None if the op has none.
    """
    if isinstance(op, Cast):
        # A number that may be on both sides of zero may be zero, which alone is false. A number that may be infinite
        # may become any integer.
        return None if op.to.is_float else lambda _, v: np.sign(v[0]) if op.to is DType.BOOL else np.trunc(v[0])
    if isinstance(op, Reduce) and op.kind == "log_sum":
        return lambda _, v: np.sign(Reduce("sum", op.axes, op.keepdims).reference(np, *v)[0])
    return LABELS.get(op.name)


def undefined(op: Op, operands: list[Array]) -> Array | None:
    """Find casts whose result no standard defines: a float outside the integer type's range."""
    if not isinstance(op, Cast) or not op.to.is_int or operands[0].dtype.kind != "f":
        return None
    info, x = np.iinfo(op.to.numpy), np.trunc(operands[0])
    bad = ~((x >= float(info.min)) & (x <= float(info.max)))  # NaN too
    return bad if bad.any() else None


def vanished_slope(op: Op, operands: list[Array]) -> Array | None:
    """Find where an infinite gradient meets a slope that is not zero in float64, but may be zero in fp32."""
    if op.name not in _FADING or not np.isinf(operands[0]).any():
        return None
    loss, x = np.broadcast_arrays(*operands)
    (slope,) = op.reference(np, np.ones_like(x), x)
    bad = np.isinf(loss) & (np.abs(slope) < 2.0**-20)
    return bad if bad.any() else None


def dropping_nan(op: Op, operands: list[Array], upper: bool) -> Array | None:
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


def lost_in_attention(op: Op, operands: list[Array], result: Array) -> Array | None:
    """Find where fused attention may differ from single ops, because it meets NaN or an infinity.

    It masks before or after it adds, and skips blocks of masked keys. A query without keys gets zeros: only a
    guarded attention means that. In attention_backward each row and column gets gradients from all others, so one such
    number is enough.
    """
    if isinstance(op, AttentionBackward):
        return None if all(np.isfinite(x).all() for x in operands) else np.ones(result.shape, bool)
    if not isinstance(op, (Attention, AttentionTrain)):
        return None
    q, k, v, *bias = operands
    shared = q.shape[1] // k.shape[1]
    keys = np.isfinite(k).all(axis=(2, 3)) & np.isfinite(v).all(axis=(2, 3))
    right = np.isfinite(q).all(axis=3) & np.repeat(keys, shared, axis=1)[:, :, None]
    for mask in bias:
        rows = np.atleast_2d(mask)
        earlier = np.tri(q.shape[2], k.shape[2], dtype=np.bool_) if op.causal else True
        shown = (np.isfinite(rows) & earlier).any(axis=-1) | (isinstance(op, Attention) and op.guarded)
        right = right & ((np.isfinite(rows) | np.isneginf(rows)).all(axis=-1) & shown)
    bad = np.broadcast_to(~right[..., None], result.shape)
    return bad if bad.any() else None


_HUGE = 2.0**125  # half the divisor from which CUDA's __fdividef returns zero; rounding may double it


def infinite_divisors(op: Op, operands: list[Array]) -> Array | None:
    """Find divisors so large that cuDNN's division handles them as infinity."""
    if op.name not in ("div", "softsign") or operands[-1].dtype.kind != "f":
        return None
    bad = np.broadcast_arrays(*operands)[-1]
    bad = np.isfinite(bad) & (np.abs(bad) > _HUGE)
    return bad if bad.any() else None


def visible_below_masked(op: Op, operands: list[Array]) -> Array | None:
    """Find softmax rows in which all scores are as low as a masking number, and some are far lower.

    Attention reads the least number of a mask as -infinity: then only the lower score stays visible.
    """
    if op.name != "softmax" or op.attributes["log"] or 0 in operands[0].shape:
        return None
    (x,), axis = operands, op.attributes["axis"]
    most = x.max(axis=axis, keepdims=True)
    # because an addend moves a score, or fp16's least number, by less than half of it
    bad = (most < 0.5 * -65504) & (x.min(axis=axis, keepdims=True) < 1.5 * most)
    return np.broadcast_to(bad, x.shape) if bad.any() else None


def at_zero(op: Op, operands: list[Array]) -> Array | None:
    """Find where the sign of a zero decides between two infinities.

    Neither rules nor fused kernels preserve that sign.
    """
    if op.name not in ("reciprocal", "rsqrt", "div", "pow") or operands[-1].dtype.kind != "f":
        return None
    first, last = np.broadcast_arrays(operands[0], operands[-1])
    bad = (first == 0) & (last < 0) if op.name == "pow" else last == 0
    return bad if bad.any() else None
