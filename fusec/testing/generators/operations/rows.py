"""Draw ops along some dims of a tensor: norms, reductions, softmax, running sums and recurrences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fusec.ir import DType, TensorType, Value
from fusec.ops import (
    BatchNorm,
    BatchNormBackward,
    BatchNormBySums,
    BatchNormTrain,
    Cast,
    ChannelSums,
    Cumulate,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LayerNormBackward,
    LinearScan,
    LocalResponseNorm,
    NonMaxSuppression,
    Reduce,
    Reshape,
    RmsNorm,
    Softmax,
    TopK,
)
from fusec.testing.generators.graph_builder import RandomGraph, Unfit
from fusec.testing.generators.operations.pointwise import integer_value

MAX_BOXES = 4400  # four classes of more boxes than a kernel compares together
MAX_DRAWN_BOXES = 96  # the rest repeats these, moved by whole numbers


def _channel_parameters(b: RandomGraph, x: Value, styles: Sequence[str]) -> list[Value]:
    """Draw vectors of one number per channel, one for each style; one without a style is rarely not a constant."""
    type = TensorType((x.type.shape[1],), x.type.dtype)
    return [
        b.fresh(type) if not style and b.chance(6) else b.constant(type.shape, type.dtype, style) for style in styles
    ]


def _epsilon(b: RandomGraph) -> float:
    return b.pick([1e-5, 1e-3, 1e-2, 0.5])


def batch_norm(b: RandomGraph) -> None:
    x = b.float_value(2, 5)
    b.add(BatchNorm(_epsilon(b)), x, *_channel_parameters(b, x, ["", "", "", "positive"]))


def instance_norm(b: RandomGraph) -> None:
    x = b.float_value(3, 5)
    b.add(InstanceNorm(_epsilon(b)), x, *_channel_parameters(b, x, ["", ""]))


def group_norm(b: RandomGraph) -> None:
    x = b.float_value(2, 5)
    groups = b.pick([g for g in (1, 2, 4, x.type.shape[1]) if g and x.type.shape[1] % g == 0] or [1])
    b.add(GroupNorm(groups, _epsilon(b)), x, *_channel_parameters(b, x, ["", ""]))


def _trailing(b: RandomGraph) -> tuple[Value, int, tuple[int, ...]]:
    x = b.float_value(1, 5)
    axis = x.type.rank - b.pick([1, 1, 1, min(2, x.type.rank), x.type.rank])
    return x, (axis - x.type.rank if b.chance(30) else axis), x.type.shape[axis:]


def layer_norm(b: RandomGraph) -> None:
    x, axis, shape = _trailing(b)
    scale = b.constant(b.broadcast_shape(shape) if b.chance(20) else shape, x.type.dtype)
    bias = [b.constant(b.broadcast_shape(shape) if b.chance(20) else shape, x.type.dtype)] if b.chance(60) else []
    b.add(LayerNorm(axis, _epsilon(b)), x, scale, *bias)


def rms_norm(b: RandomGraph) -> None:
    x, axis, shape = _trailing(b)
    b.add(RmsNorm(axis, _epsilon(b)), x, b.constant(b.broadcast_shape(shape) if b.chance(20) else shape, x.type.dtype))


def lrn(b: RandomGraph) -> None:
    x = b.float_value(2, 4)
    b.add(LocalResponseNorm(b.pick([3, 1, 2, 5]), b.pick([1e-4, 0.5]), b.pick([0.75, 0.5]), b.pick([1.0, 2.0])), x)


def reduce(b: RandomGraph) -> None:
    kind = b.pick(["sum", "mean", "max", "min", "prod", "l1", "l2", "sum_square", "log_sum", "log_sum_exp"])
    whole = kind not in ("l2", "log_sum", "log_sum_exp", "mean") and b.chance(10)
    x = integer_value(b) if whole else b.float_value()
    axes = (
        tuple(sorted({b.below(x.type.rank) for _ in range(b.between(0, 2) if b.chance(20) else 1)}))
        if x.type.rank
        else ()
    )
    if x.type.rank >= 3 and b.chance(30):
        axes = tuple(range(2, x.type.rank))
    elif 1 in x.type.shape and b.chance(25):  # over dims of size 1, where a sum is x, but l1 and sum_square are not
        axes = tuple(i for i, d in enumerate(x.type.shape) if d == 1)
    if kind == "log_sum":
        x = b.away_from_zero(x)
        axes = tuple(a for a in axes if a < x.type.rank)
    b.add(Reduce(kind, axes, not b.chance(30)), x)


def softmax(b: RandomGraph) -> None:
    x = b.float_value(1, 5)
    axis = b.below(x.type.rank)
    b.add(Softmax(axis - x.type.rank if b.chance(40) else axis, b.chance(25)), x)


def top_k(b: RandomGraph) -> None:
    """Draw a TopK of integers, because rounding can change which of two floats is larger."""
    x = integer_value(b)
    if x.type.rank == 0:
        raise Unfit("a scalar")
    axis = b.below(x.type.rank)
    k = b.below(x.type.shape[axis] + 1)
    b.insert(TopK(k, axis - x.type.rank if b.chance(20) else axis, b.chance(60)), x)


def non_max_suppression(b: RandomGraph) -> None:
    """Draw the suppression of known boxes by scores that are integers, so that rounding changes no choice."""
    x = integer_value(b)
    count = x.type.size
    if not 0 < count <= MAX_BOXES:
        raise Unfit("no boxes, or many")
    classes = b.pick([d for d in range(1, 5) if count % d == 0])
    boxes = count // classes
    scores = b.add(Reshape((1, classes, boxes)), b.add(Cast(DType.F32), x))
    drawn = min(boxes, MAX_DRAWN_BOXES)
    corners = np.array([b.between(-4, 12) for _ in range(2 * drawn)]).reshape(drawn, 2)
    sizes = np.array([b.between(-8, 12) for _ in range(2 * drawn)]).reshape(drawn, 2)
    corners, sizes = (np.resize(x, (1, boxes, 2)) for x in (corners, sizes))
    both = np.concatenate([corners + np.arange(boxes)[:, None] // drawn, corners + sizes], 2).astype(np.float32)
    op = NonMaxSuppression(b.pick([1, 3, 1000]), b.pick([0.0, 0.37, 0.71]), b.pick([-math.inf, 0.5]), b.chance(30))
    b.insert(op, b.graph.constant(both), scores)


def cumulate(b: RandomGraph) -> None:
    x = b.float_value(1, 5) if b.chance(60) else integer_value(b)
    if x.type.rank == 0:
        raise Unfit("a scalar")
    kind = b.pick(["sum", "prod"])
    if kind == "prod" and x.type.dtype.is_float:
        x = b.bounded(x, -1.5, 1.5)
    b.add(Cumulate(kind, b.below(x.type.rank)), x)


def linear_scan(b: RandomGraph) -> None:
    """Draw a recurrence whose factors are at most one, because errors would grow with every step."""
    x = b.float_value(1, 5)
    a = b.bounded(b.like(x), -1.0, 1.0)
    b.add(LinearScan(b.below(x.type.rank)), a, x)


def batch_norm_train(b: RandomGraph) -> None:
    x = b.image()
    b.insert(BatchNormTrain(_epsilon(b)), x, *_channel_parameters(b, x, ["", ""]))


def channel_sums(b: RandomGraph) -> None:
    b.insert(ChannelSums(), b.image())


def batch_norm_by_sums(b: RandomGraph) -> None:
    """Draw a batch norm by the sums of the image itself, which is clipped, because a large mean loses precision."""
    x = b.pointwise("clip", b.image(), min=-2.0, max=2.0)
    parameters = _channel_parameters(b, x, ["", ""])
    sums = b.insert(ChannelSums(), x).results
    b.insert(BatchNormBySums(b.pick([1e-2, 0.5])), x, *parameters, *sums)


def batch_norm_backward(b: RandomGraph) -> None:
    x = b.image()
    relu = b.chance(30)
    styles = ["", "", "positive", *([""] if relu else [])]
    b.insert(BatchNormBackward(relu), b.like(x), x, *_channel_parameters(b, x, styles))


def layer_norm_backward(b: RandomGraph) -> None:
    x, axis, shape = _trailing(b)
    if math.prod(shape) < 3:
        raise Unfit("the gradient of rows of one or two elements is zero, except for rounding")
    b.insert(LayerNormBackward(axis, _epsilon(b), b.chance(60)), b.like(x), x, b.constant(shape, x.type.dtype))
