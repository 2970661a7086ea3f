"""Import normalisations and softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, OpFunction, Table, axes_of
from fusec.frontends.onnx.model_file.tensors import dtype_of
from fusec.ir import DType, TensorType, Value
from fusec.ops import (
    BatchNorm,
    BatchNormTrain,
    Expand,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LocalResponseNorm,
    Reduce,
    RmsNorm,
    Softmax,
    Transpose,
    pw,
)
from fusec.ops.spec import normalize_axis, require

_F32 = 1  # ONNX's number of the type
_MVN_EPSILON = 1e-9


def batch_norm(
    g: Emitter,
    x: Value,
    scale: Value,
    bias: Value,
    mean: Value,
    var: Value,
    /,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,  # used by training outputs only
    spatial: int = 1,
    training_mode: int = 0,
) -> Value | tuple[Value, ...]:
    require(spatial == 1, "spatial=0 is not supported")
    require(training_mode == 0 or g.opset >= 14, "training_mode=1 is not supported before opset 14")
    dtype = x.type.dtype
    if training_mode:
        return _training_batch_norm(g, x, (scale, bias, mean, var), epsilon, momentum)
    # from version 15 on, parameters may be wider than x; the widest type is then used for all
    wide = max((v.type.dtype for v in (x, scale, bias, mean, var)), key=lambda d: d.itemsize)
    y = g(BatchNorm(epsilon), *(g.cast(v, wide) for v in (x, scale, bias, mean, var)))
    return g.cast(y, dtype)


def _training_batch_norm(
    g: Emitter, x: Value, parameters: tuple[Value, Value, Value, Value], epsilon: float, momentum: float
) -> tuple[Value, ...]:
    """Normalise by the mean and variance of the batch, and move the running mean and variance towards them.

    parameters: scale, bias, running mean and running variance.
    """
    scale, bias, mean, var = parameters
    require(x.type.rank >= 2, f"needs a channel dim, x has shape {list(x.type.shape)}")
    axes = (0, *range(2, x.type.rank))
    wide = g.cast(x, mean.type.dtype)
    own_mean = g(Reduce("mean", axes), wide)
    centred = g(pw("sub"), wide, own_mean)
    own_var = g(Reduce("mean", axes), g(pw("mul"), centred, centred))
    own = [g.reshape(v, (x.type.shape[1],)) for v in (own_mean, own_var)]
    y = g(BatchNorm(epsilon), wide, g.cast(scale, wide.type.dtype), g.cast(bias, wide.type.dtype), *own)

    def moved(running: Value, now: Value) -> Value:
        old = g(pw("mul"), running, g.scalar(momentum, running))
        return g(pw("add"), old, g(pw("mul"), g.cast(now, running.type.dtype), g.scalar(1 - momentum, running)))

    return g.cast(y, x.type.dtype), moved(mean, own[0]), moved(var, own[1])


def instance_norm(g: Emitter, x: Value, scale: Value, bias: Value, /, *, epsilon: float = 1e-5) -> Value:
    return g(InstanceNorm(epsilon), x, scale, bias)


def group_norm_18(
    g: Emitter, x: Value, scale: Value, bias: Value, /, *, num_groups: int, epsilon: float = 1e-5
) -> Value:
    """Import GroupNormalization of version 18, which has one scale and bias per group (version 21: per channel)."""
    require(x.type.rank >= 2, f"needs a channel dim, x has shape {list(x.type.shape)}")
    channels = x.type.shape[1]
    require(
        num_groups >= 1 and channels % num_groups == 0, f"{channels} channels do not divide into {num_groups} groups"
    )

    def per_channel(v: Value) -> Value:
        require(v.type.shape == (num_groups,), f"parameter of shape {list(v.type.shape)} for {num_groups} groups")
        spread = g(Expand((num_groups, channels // num_groups)), g.reshape(v, (num_groups, 1)))
        return g.reshape(spread, (channels,))

    return g(GroupNorm(num_groups, epsilon), x, per_channel(scale), per_channel(bias))


def group_norm(
    g: Emitter,
    x: Value,
    scale: Value,
    bias: Value,
    /,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Value:
    dtype = _at_least(stash_type, x)
    return g.cast(g(GroupNorm(num_groups, epsilon), *(g.cast(v, dtype) for v in (x, scale, bias))), x.type.dtype)


def layer_norm(
    g: Emitter,
    x: Value,
    scale: Value,
    bias: Value | None = None,
    /,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Value | tuple[Value, ...]:
    """Import LayerNormalization. Its second and third results are the mean and the inverse deviation, in f32.

    If parameters and data have different types, the wider type is used for all.
    """
    axis, dtypes = normalize_axis(axis, x.type.rank), {v.type.dtype for v in (x, scale, bias) if v is not None}
    if stash_type != _F32 or len(dtypes) > 1:
        wide = _at_least(stash_type, x) if stash_type != _F32 else _wider_type(g, dtypes)
        bias = None if bias is None else g.cast(bias, wide)
        results = layer_norm(g, g.cast(x, wide), g.cast(scale, wide), bias, axis=axis, epsilon=epsilon)
        y, *more = results if isinstance(results, tuple) else (results,)
        return (g.cast(y, x.type.dtype), *(g.cast(v, dtype_of(stash_type)) for v in more))
    parameters = [_trailing(g, v, axis, x) for v in ((scale,) if bias is None else (scale, bias))]
    known = [v for v in parameters if v is not None]
    if len(known) == len(parameters):
        y = g(LayerNorm(axis, epsilon), x, *known)
    else:
        y = g(pw("mul"), g(LayerNorm(axis, epsilon), x, _ones(g, x, axis)), scale)
        y = y if bias is None else g(pw("add"), y, bias)
    if g.outputs == 1:
        return y
    wide, axes = g.cast(x, DType.F32), tuple(range(axis, x.type.rank))
    mean = g(Reduce("mean", axes), wide)
    centred = g(pw("sub"), wide, mean)
    variance = g(Reduce("mean", axes), g(pw("mul"), centred, centred))
    return y, mean, g(pw("rsqrt"), g(pw("add"), variance, g.scalar(epsilon, variance)))


def _wider_type(g: Emitter, dtypes: set[DType]) -> DType:
    """Return the type in which to compute a LayerNormalization whose parameters have another type than the data.

    The standard does not allow it, but exporters of half precision write it.
    """
    require(all(d.is_float for d in dtypes), f"takes floats, not {', '.join(sorted(d.value for d in dtypes))}")
    g.note("LayerNormalization has parameters of another type than its data; its result has the type of the data")
    return DType.F64 if DType.F64 in dtypes else DType.F32


def rms_norm(
    g: Emitter, x: Value, scale: Value, /, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Value:
    axis, dtype = normalize_axis(axis, x.type.rank), _at_least(stash_type, x)
    wide, scale_type = g.cast(x, dtype), scale.type.dtype
    scale = g.cast(scale, dtype) if dtype is not x.type.dtype else scale
    parameter = _trailing(g, scale, axis, wide)
    if parameter is not None:
        y = g(RmsNorm(axis, epsilon), wide, parameter)
    else:
        y = g(pw("mul"), g(RmsNorm(axis, epsilon), wide, _ones(g, wide, axis)), scale)
    return g.cast(y, scale_type)


def _at_least(stash_type: int, x: Value) -> DType:
    """Return the type to compute a norm in: that of x, or f64 if the model asks for it.

    Norms of 16 bits are computed in f32 in any case. That is no less exact than the 16 bits that a model may ask for.
    """
    stash = dtype_of(stash_type)
    require(stash.is_float, f"stash_type={stash_type} is {stash.value}, no float")
    return DType.F64 if stash is DType.F64 else x.type.dtype


def _trailing(g: Emitter, v: Value, axis: int, x: Value) -> Value | None:
    """Reshape a parameter to the dims from `axis` on; None if it varies along an earlier dim."""
    extra = v.type.rank - (x.type.rank - axis)
    if extra <= 0:
        return v
    return g.reshape(v, v.type.shape[extra:]) if math.prod(v.type.shape[:extra]) == 1 else None


def _ones(g: Emitter, x: Value, axis: int) -> Value:
    return g.full(TensorType(x.type.shape[axis:], x.type.dtype), np.ones((), x.type.dtype.numpy))


def mean_variance_norm(g: Emitter, x: Value, /, *, axes: Sequence[int] = (0, 2, 3)) -> Value:
    """Import MeanVarianceNormalization as one norm.

    ONNX adds 1e-9 to the deviation; a norm adds the square of that to the variance. In f32, the two differ by more
    than rounding where the deviation is below 1e-3, and by 0.1 % where it is 1e-6. In f64 ONNX's formula is computed.
    """
    if not x.type.size:  # a batch of 0
        return x
    dims = axes_of(axes, x.type.rank) or tuple(range(x.type.rank))  # no axes: all, as of a reduction
    if x.type.dtype is not DType.F64:
        return _standardized(g, x, dims, _MVN_EPSILON**2)
    centred = g(pw("sub"), x, g(Reduce("mean", dims), x))
    deviation = g(pw("sqrt"), g(Reduce("mean", dims), g(pw("mul"), centred, centred)))
    return g(pw("div"), centred, g(pw("add"), deviation, g.scalar(_MVN_EPSILON, x)))


def _standardized(g: Emitter, x: Value, dims: tuple[int, ...], epsilon: float) -> Value:
    """Normalise over some dims by the op that needs the fewest launches."""
    shape, rank, dtype = x.type.shape, x.type.rank, x.type.dtype
    others = tuple(d for d in range(rank) if d not in dims)
    order = (*others, *dims)
    if order == tuple(range(rank)):
        if rank == 2 or len(others) not in (1, 2):
            return g(LayerNorm(len(others), epsilon), x, g.scalar(1, x))
        op = GroupNorm(1, epsilon) if len(others) == 1 else InstanceNorm(epsilon)
        return g(op, x, *_of_channels(g, shape[1], dtype))
    first, last = others[0], others[-1] + 1
    if len(others) == last - first:  # neighbours: the channels of a batch
        batch = [math.prod(part) for part in (shape[:first], shape[first:last], shape[last:])]
        image = g.reshape(x, shape if others == (1,) else batch)
        parameters = _of_channels(g, image.type.shape[1], DType.F32)
        y, *_ = g.many(BatchNormTrain(epsilon), image, *parameters)
        return g.reshape(y, shape)
    y = g(LayerNorm(len(others), epsilon), g(Transpose(order), x), g.scalar(1, x))
    return g(Transpose(tuple(order.index(d) for d in range(rank))), y)


def _of_channels(g: Emitter, channels: int, dtype: DType) -> tuple[Value, Value]:
    """Return a scale of ones and a bias of zeros."""
    one, zero = (g.full(TensorType((channels,), dtype), np.array(number, dtype.numpy)) for number in (1, 0))
    return one, zero


def lp_norm(g: Emitter, x: Value, /, *, axis: int = -1, p: int = 2) -> Value:
    """Import LpNormalization. Where the norm is zero x is zero, so the result is x / 1 there."""
    require(p in (1, 2), f"p={p} is not supported, only 1 and 2")
    norm = g(Reduce(f"l{p}", (normalize_axis(axis, x.type.rank),)), x)
    zero = g(pw("cmp_eq"), norm, g.scalar(0, x))
    return g(pw("div"), x, g(pw("where"), zero, g.scalar(1, x), norm))


def lrn(g: Emitter, x: Value, /, *, size: int, alpha: float = 0.0001, beta: float = 0.75, bias: float = 1.0) -> Value:
    return g(LocalResponseNorm(size, alpha, beta, bias), x)


def _flat(log: bool) -> OpFunction:
    """Import softmax of versions before 13: flatten the operand to a matrix at `axis` and normalise its rows."""

    def emit(g: Emitter, x: Value, /, *, axis: int = 1) -> Value:
        shape = x.type.shape
        require(-len(shape) <= axis <= len(shape), f"axis {axis} is out of range for rank {len(shape)}")
        axis = axis + len(shape) if axis < 0 else axis
        rows, columns = math.prod(shape[:axis]), math.prod(shape[axis:])
        if axis < len(shape) and shape[axis] == columns:  # all later dims are 1
            return g(Softmax(axis, log), x)
        return g.reshape(g(Softmax(1, log), g.reshape(x, (rows, columns))), shape)

    return emit


def _along(log: bool) -> OpFunction:
    def emit(g: Emitter, x: Value, /, *, axis: int = -1) -> Value:
        return g(Softmax(normalize_axis(axis, x.type.rank), log), x)

    return emit


TABLE: Table = {
    ("BatchNormalization", 7): batch_norm,
    ("InstanceNormalization", 6): instance_norm,
    ("GroupNormalization", 18): group_norm_18,
    ("GroupNormalization", 21): group_norm,
    ("LayerNormalization", 17): layer_norm,
    ("RMSNormalization", 23): rms_norm,
    ("MeanVarianceNormalization", 9): mean_variance_norm,
    ("LpNormalization", 1): lp_norm,
    ("LRN", 1): lrn,
    ("Softmax", 1): _flat(log=False),
    ("Softmax", 13): _along(log=False),
    ("LogSoftmax", 1): _flat(log=True),
    ("LogSoftmax", 13): _along(log=True),
}
