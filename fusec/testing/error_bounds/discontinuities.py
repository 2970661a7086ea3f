"""Find where rounding may move a result across a discontinuity.

Examples are a comparison, a floor, and an infinity times zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fusec.ir import DType, HostArray, Node, Op
from fusec.ops import Attention, AttentionBackward, AttentionTrain, Cast, Reduce
from fusec.testing.error_bounds.op_rounding import FADING, PRODUCTS, is_move
from fusec.testing.error_bounds.perturbed import SAFETY, Rounding, Samples


def flips(node: Node, operands: list[Samples], result: HostArray, rounding: Rounding) -> HostArray | None:
    """Find the elements whose result may be on the other side of a discontinuity; None if there are none.

    operands: exact ones with their disturbed samples.
    result: the exact result.
    rounding: says if results are judged as the meaning of the graph, or as an execution of it.
    """
    op, plain = node.op, [s.plain for s in operands]
    found = [
        _undefined_cast(op, operands) if isinstance(op, Cast) else _at_zero(op, plain),
        _other_side(node, operands, result),
    ]
    if rounding.exported and op.name == "roi_align" and not np.isfinite(plain[0]).all():
        found.append(np.ones(result.shape, np.bool_))  # in ONNX, samples outside of the image are pixels times zero
    if rounding.meaning:
        found.append(_visible_below_masked(op, plain))
    elif result.size:
        found += [_infinite_divisors(op, plain), _zero_times_infinity(op, operands, result), _vanished_slope(op, plain)]
        # the samples are checked, too, because an operand may overflow its storage there
        found += [
            _lost_in_attention(op, list(arrays), result)
            for arrays in zip(*([s.plain, *s.disturbed] for s in operands), strict=True)
        ]
    places = [mask for mask in found if mask is not None]
    anywhere = functools.reduce(np.logical_or, places) if places else None
    return anywhere if anywhere is not None and anywhere.any() else None


def ties_before_odd_zero_point(node: Node, operands: list[HostArray]) -> HostArray | None:
    """Return the step from a rounded tie to the other whole number next to it, and 0 elsewhere; None without ties.

    cuDNN adds the zero point of a quantisation before it rounds. An odd one changes which neighbour of a tie is even.
    """
    if node.op.name != "round" or not any(u.op.name in ("add", "sub") and _adds_odd(u) for u in node.result.users):
        return None
    (x,) = operands
    step = np.where(np.abs(x - np.floor(x)) == 0.5, np.floor(x) + np.ceil(x) - 2 * np.rint(x), 0.0)
    return step if step.any() else None


def _adds_odd(node: Node) -> bool:
    arrays = [v.literal.array for v in node.operands if v.literal is not None]
    return any((np.mod(a.astype(np.float64), 2) == 1).any() for a in arrays)


def _other_side(node: Node, operands: list[Samples], result: HostArray) -> HostArray | None:
    """Find where operands may have a label of the op that their undisturbed values do not have."""
    label = label_of(node.op)
    if label is None or all(s.exact for s in operands) or not any(v.type.dtype.is_float for v in node.operands):
        return None
    plain = [s.plain for s in operands]
    reach = [s.reach() if s.plain.dtype.kind == "f" else None for s in operands]
    here = label(node.op, plain)
    flipped = np.zeros(result.shape, np.bool_)
    for signs in ((1, 1), (-1, -1)) if len(plain) == 1 else ((1, 1), (-1, -1), (1, -1), (-1, 1)):
        moved = [
            x if r is None else _moved(x, s * SAFETY * r[s > 0]) for x, r, s in zip(plain, reach, signs, strict=False)
        ]
        there = label(node.op, moved)
        flipped = flipped | ~((there == here) | ((there != there) & (here != here)))
    return flipped


def _moved(x: HostArray, by: HostArray) -> HostArray:
    """Add `by` to numbers; a NaN that may be any number becomes an infinity."""
    return np.where(np.isnan(x) & np.isinf(by), by, x + by)


def _zero_times_infinity(op: Op, operands: list[Samples], result: HostArray) -> HostArray | None:
    """Find terms of an infinity (for a resize also NaN) and a number that is zero, or may be rounded to zero."""
    plain = [s.plain for s in operands]
    if op.name == "resize" and not is_move(op) and not np.isfinite(plain[0]).all():
        return np.ones(result.shape, np.bool_)  # because some implementations leave out terms of weight zero
    if op.name not in (*PRODUCTS, "mul") or all(s.exact for s in operands):
        return None
    found = ~np.isfinite(result) if any(np.isinf(x).any() for x in plain) else np.zeros(result.shape, np.bool_)
    if op.name == "mul":
        for zero, large in ((0, 1), (1, 0)):
            reach = operands[zero].spread()
            vanishes = (np.abs(plain[zero]) <= reach) & np.isfinite(reach)  # what overflows, too, does not vanish
            found = found | (vanishes & _overflows(operands[large]))
    return found


def _overflows(operand: Samples) -> HostArray:
    """Find the finite elements that overflow in a sample."""
    overflowed = np.logical_or.reduce([np.isinf(sample) for sample in operand.disturbed])
    return np.isfinite(operand.plain) & overflowed


def _undefined_cast(op: Cast, operands: list[Samples]) -> HostArray | None:
    """Find casts of floats outside the integer type's range, and floats made of an uncertain integer.

    No standard defines the first. A rule that removes a pair of casts keeps the float, which may be NaN.
    """
    (value,) = operands
    if value.plain.dtype.kind in "iu" and op.to.is_float and not value.exact:
        return value.spread() > 0
    own = DType.of(value.plain.dtype)
    if not op.to.is_int or not (own.is_float or (own.is_narrow and not own.is_narrow_int)):
        return None
    info, x = np.iinfo(op.to.numpy), np.trunc(value.plain.astype(np.float64))
    return ~((x >= float(info.min)) & (x <= float(info.max)))  # NaN too


# discontinuities of ops ------------------------------------------------------------------------------------------

Label = Callable[[Any, list[HostArray]], HostArray]  # a discontinuity is between two points of different labels


def _side(op: Any, operands: list[HostArray]) -> HostArray:
    return np.sign(operands[0])


def _second_side(op: Any, operands: list[HostArray]) -> HostArray:
    return np.sign(np.broadcast_arrays(*operands)[1])


def _itself(op: Any, operands: list[HostArray]) -> HostArray:
    return op.reference(np, *operands)[0]


def _between_ones(op: Any, operands: list[HostArray]) -> HostArray:
    return np.sign(operands[0] - 1) * 3 + np.sign(operands[0] + 1)


def _power(op: Any, operands: list[HostArray]) -> HostArray:
    x, y = operands
    return np.sign(x) + 10 * ((x < 0) & (y == np.rint(y)))


_LABELS: Mapping[str, Label] = {
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
    return _LABELS.get(op.name)


def _vanished_slope(op: Op, operands: list[HostArray]) -> HostArray | None:
    """Find where an infinite gradient is multiplied by a slope that is not zero in float64, but may be zero in fp32."""
    if op.name not in FADING or not np.isinf(operands[0]).any():
        return None
    loss, x = np.broadcast_arrays(*operands)
    (slope,) = op.reference(np, np.ones_like(x), x)
    return np.isinf(loss) & (np.abs(slope) < 2.0**-20)


def _lost_in_attention(op: Op, operands: list[HostArray], result: HostArray) -> HostArray | None:
    """Find where fused attention may differ from single ops, because an operand is NaN or infinite.

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
    return np.broadcast_to(~right[..., None], result.shape)


_HUGE = 2.0**125  # half the divisor from which CUDA's __fdividef returns zero; rounding may double it


def _infinite_divisors(op: Op, operands: list[HostArray]) -> HostArray | None:
    """Find divisors so large that cuDNN's division handles them as infinity."""
    if op.name not in ("div", "softsign") or operands[-1].dtype.kind != "f":
        return None
    divisor = np.broadcast_arrays(*operands)[-1]
    return np.isfinite(divisor) & (np.abs(divisor) > _HUGE)


def _visible_below_masked(op: Op, operands: list[HostArray]) -> HostArray | None:
    """Find softmax rows in which all scores are as low as a masking number, and some are far lower.

    Attention reads the least number of a mask as -infinity: then only the lower score stays visible.
    """
    if op.name != "softmax" or op.attributes["log"] or 0 in operands[0].shape:
        return None
    (x,), axis = operands, op.attributes["axis"]
    most = x.max(axis=axis, keepdims=True)
    # because an addend moves a score, or fp16's least number, by less than half of it
    bad = (most < 0.5 * -65504) & (x.min(axis=axis, keepdims=True) < 1.5 * most)
    return np.broadcast_to(bad, x.shape)


def _at_zero(op: Op, operands: list[HostArray]) -> HostArray | None:
    """Find where the sign of a zero decides between two infinities.

    Neither rules nor fused kernels preserve that sign.
    """
    if op.name not in ("reciprocal", "rsqrt", "div", "pow") or operands[-1].dtype.kind != "f":
        return None
    first, last = np.broadcast_arrays(operands[0], operands[-1])
    return (first == 0) & (last < 0) if op.name == "pow" else last == 0
