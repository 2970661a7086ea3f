"""Recognise norms and softmax in the ops that frameworks write for them, and join scale and bias to norms."""

from __future__ import annotations

from fusec.passes.rewriting.expression import Apply
from fusec.passes.rewriting.pattern import Attribute, Match, Ops, Scalar, Sides, TracedTensor, Weight, rule
from fusec.passes.rewriting.rewriter import Rewriter
from fusec.passes.rewriting.value_facts import all_equal

# layer and RMS norm: over trailing dims -----------------------------------------------------------------


def _trailing(m: Match) -> None:
    """Check that `axes` are all dims from some axis on; give the replacement `axis` and their `shape`."""
    rank, axes = m["x"].type.rank, m.known["axes"]
    m.require(axes == tuple(range(rank - len(axes), rank)), f"axes {list(axes)} are not trailing", "x")
    m.require(len(axes) < rank, "normalises the whole tensor", "x")
    m.known["axis"] = rank - len(axes)
    m.known["shape"] = m["x"].type.shape[rank - len(axes) :]


def _trailing_of_sequence(m: Match) -> None:
    _trailing(m)
    spatial = m["x"].type.rank >= 4 and m.known["axis"] == 2
    m.require(not spatial, "over all of space: an instance norm", "x")


def _whole(m: Match) -> None:
    m.require(m.known["axes"] == tuple(range(m["x"].type.rank)), "not over the whole tensor", "x")


def _all_but_channels(m: Match) -> None:
    rank = m["x"].type.rank
    m.require(rank >= 3 and m.known["axes"] == (0, *range(2, rank)), "not over all dims but the channels", "x")
    m.known["channels"] = (m["x"].type.shape[1],)


def _all_of_space(m: Match) -> None:
    rank = m["x"].type.rank
    m.require(rank >= 4 and m.known["axes"] == tuple(range(2, rank)), "not over all of space", "x")
    m.known["channels"] = (m["x"].type.shape[1],)


_over_last = {"x": (2, 3, 4), "axes": (2,), "eps": 1e-3}
_over_space = {"x": (2, 3, 4, 5), "axes": (2, 3), "eps": 1e-3}


def _standardised(p: Ops, x: TracedTensor, axes: Attribute, eps: Scalar) -> Apply:
    d = p.sub(x, p.reduce(x, kind="mean", axes=axes))
    variance = p.reduce(p.mul(d, d), kind="mean", axes=axes)
    return p.mul(d, p.rsqrt(p.add(variance, eps)))


@rule(where=_trailing_of_sequence, sample=_over_last)
def layer_norm_from_moments(
    p: Ops, x: TracedTensor, axes: Attribute, eps: Scalar, axis: Attribute, shape: Attribute
) -> Sides:
    return _standardised(p, x, axes, eps), p.layer_norm(x, p.full(shape, 1.0), axis=axis, epsilon=eps)


@rule(where=_all_of_space, sample=_over_space)
def instance_norm_from_moments(p: Ops, x: TracedTensor, axes: Attribute, eps: Scalar, channels: Attribute) -> Sides:
    return (
        _standardised(p, x, axes, eps),
        p.instance_norm(x, p.full(channels, 1.0), p.full(channels, 0.0), epsilon=eps),
    )


@rule(where=_whole, sample={**_over_last, "axes": (0, 1, 2)})
def layer_norm_of_all(p: Ops, x: TracedTensor, axes: Attribute, eps: Scalar) -> Sides:
    return _standardised(p, x, axes, eps), p.layer_norm(x, 1.0, axis=0, epsilon=eps)


@rule(where=_all_but_channels, sample={**_over_last, "axes": (0, 2)})
def batch_norm_from_moments(p: Ops, x: TracedTensor, axes: Attribute, eps: Scalar, channels: Attribute) -> Sides:
    return (
        _standardised(p, x, axes, eps),
        p.batch_norm_train(x, p.full(channels, 1.0), p.full(channels, 0.0), epsilon=eps),
    )


@rule(where=_trailing, sample=_over_last)
def rms_norm_from_mean_square(
    p: Ops, x: TracedTensor, axes: Attribute, eps: Scalar, axis: Attribute, shape: Attribute
) -> Sides:
    mean = p.reduce(p.mul(x, x), kind="mean", axes=axes)
    return p.mul(x, p.rsqrt(p.add(mean, eps))), p.rms_norm(x, p.full(shape, 1.0), axis=axis, epsilon=eps)


def _fits_trailing(m: Match) -> None:
    """Check that the weight varies along the normalised dims only; give the replacement its `shape` there."""
    x, f = m["x"].type, m["f"].type
    axis = m.known["axis"] % x.rank
    own = (1,) * (x.rank - f.rank) + f.shape
    m.require(f.rank <= x.rank and all(d == 1 for d in own[:axis]), "varies beyond the normalised dims", "f")
    m.known["shape"] = own[axis:]


_with_scale = {"x": (2, 3, 4), "s": (4,), "f": (1, 1, 4), "axis": 2, "eps": 1e-3}


@rule(where=_fits_trailing, sample=_with_scale)
def layer_norm_scale(
    p: Ops, x: TracedTensor, s: TracedTensor, f: Weight, axis: Attribute, eps: Attribute, shape: Attribute
) -> Sides:
    scale = p.mul(s, p.reshape(f, shape=shape))
    return p.mul(p.layer_norm(x, s, axis=axis, epsilon=eps), f), p.layer_norm(x, scale, axis=axis, epsilon=eps)


@rule(where=_fits_trailing, sample=_with_scale)
def layer_norm_bias(
    p: Ops, x: TracedTensor, s: TracedTensor, f: Weight, axis: Attribute, eps: Attribute, shape: Attribute
) -> Sides:
    bias = p.reshape(f, shape=shape)
    return p.add(p.layer_norm(x, s, axis=axis, epsilon=eps), f), p.layer_norm(x, s, bias, axis=axis, epsilon=eps)


@rule(where=_fits_trailing, sample=_with_scale)
def rms_norm_scale(
    p: Ops, x: TracedTensor, s: TracedTensor, f: Weight, axis: Attribute, eps: Attribute, shape: Attribute
) -> Sides:
    scale = p.mul(s, p.reshape(f, shape=shape))
    return p.mul(p.rms_norm(x, s, axis=axis, epsilon=eps), f), p.rms_norm(x, scale, axis=axis, epsilon=eps)


# instance and group norm: scale and bias per channel ----------------------------------------------------


def _per_channel(m: Match) -> None:
    """Check that the weight varies along channels only; give the replacement its `shape` as a vector."""
    x, f = m["x"].type, m["f"].type
    own = (1,) * (x.rank - f.rank) + f.shape
    fits = f.rank <= x.rank and all(d == 1 for i, d in enumerate(own) if i != 1)
    m.require(fits, "varies beyond the channels", "f")
    m.known["shape"] = (own[1],)


_with_channels = {"x": (2, 6, 4, 5), "s": (6,), "b": (6,), "f": (6, 1, 1), "eps": 1e-3, "groups": 2}


@rule(where=_per_channel, sample=_with_channels)
def instance_norm_scale(
    p: Ops, x: TracedTensor, s: TracedTensor, b: TracedTensor, f: Weight, eps: Attribute, shape: Attribute
) -> Sides:
    factor = p.reshape(f, shape=shape)
    return (
        p.mul(p.instance_norm(x, s, b, epsilon=eps), f),
        p.instance_norm(x, p.mul(s, factor), p.mul(b, factor), epsilon=eps),
    )


@rule(where=_per_channel, sample=_with_channels)
def instance_norm_bias(
    p: Ops, x: TracedTensor, s: TracedTensor, b: TracedTensor, f: Weight, eps: Attribute, shape: Attribute
) -> Sides:
    bias = p.add(b, p.reshape(f, shape=shape))
    return p.add(p.instance_norm(x, s, b, epsilon=eps), f), p.instance_norm(x, s, bias, epsilon=eps)


@rule(where=_per_channel, sample=_with_channels)
def instance_norm_shift(p: Ops, x: TracedTensor, f: Weight, s: TracedTensor, b: TracedTensor, eps: Attribute) -> Sides:
    return p.instance_norm(p.add(x, f), s, b, epsilon=eps), p.instance_norm(x, s, b, epsilon=eps)


@rule(where=_per_channel, sample=_with_channels)
def group_norm_scale(
    p: Ops,
    x: TracedTensor,
    s: TracedTensor,
    b: TracedTensor,
    f: Weight,
    eps: Attribute,
    groups: Attribute,
    shape: Attribute,
) -> Sides:
    factor = p.reshape(f, shape=shape)
    return (
        p.mul(p.group_norm(x, s, b, groups=groups, epsilon=eps), f),
        p.group_norm(x, p.mul(s, factor), p.mul(b, factor), groups=groups, epsilon=eps),
    )


@rule(where=_per_channel, sample=_with_channels)
def group_norm_bias(
    p: Ops,
    x: TracedTensor,
    s: TracedTensor,
    b: TracedTensor,
    f: Weight,
    eps: Attribute,
    groups: Attribute,
    shape: Attribute,
) -> Sides:
    bias = p.add(b, p.reshape(f, shape=shape))
    return (
        p.add(p.group_norm(x, s, b, groups=groups, epsilon=eps), f),
        p.group_norm(x, s, bias, groups=groups, epsilon=eps),
    )


def _groups_of_channels(m: Match) -> None:
    """Check that x is viewed as [N, groups, …] and back, and that the groups' norm has no scale and bias."""
    x = m["x"].type
    m.require(m.known["back"] == x.shape, f"goes on as {list(m.known['back'])}", "x")
    _require_groups(m)


def _groups_in_a_row(m: Match) -> None:
    """Check the same, where the view back keeps the channels and gives the dims after them another shape."""
    x, back = m["x"].type, m.known["back"]
    m.require(back != x.shape and len(back) >= 3 and back[:2] == x.shape[:2], f"goes on as {list(back)}", "x")
    _require_groups(m)


def _require_groups(m: Match) -> None:
    x, grouped = m["x"].type, m.known["grouped"]
    m.require(x.rank >= 3 and len(grouped) >= 3 and grouped[0] == x.shape[0], f"grouped as {list(grouped)}", "x")
    m.require(x.shape[1] % grouped[1] == 0, f"{grouped[1]} groups of {x.shape[1]} channels", "x")
    for name, number in (("o", 1.0), ("z", 0.0)):
        m.require(name not in m.values or all_equal(m[name], number), f"is not {number:g} everywhere", name)
    m.known["groups"], m.known["channels"] = grouped[1], (x.shape[1],)


_grouped = {"x": (2, 6, 4, 5), "grouped": (2, 3, 40), "back": (2, 6, 4, 5), "eps": 1e-3}


@rule(where=_groups_of_channels, sample={**_grouped, "o": (3, 1.0), "z": (3, 0.0)})
def group_norm_from_instance_norm(
    p: Ops, x: TracedTensor, o: Weight, z: Weight, grouped: Attribute, back: Attribute, eps: Attribute,
    groups: Attribute, channels: Attribute,
) -> Sides:  # fmt: skip
    return (
        p.reshape(p.instance_norm(p.reshape(x, shape=grouped), o, z, epsilon=eps), shape=back),
        p.group_norm(x, p.full(channels, 1.0), p.full(channels, 0.0), groups=groups, epsilon=eps),
    )


@rule(where=_groups_in_a_row, sample={**_grouped, "back": (2, 6, 20), "o": (3, 1.0), "z": (3, 0.0)})
def group_norm_flattened(
    p: Ops, x: TracedTensor, o: Weight, z: Weight, grouped: Attribute, back: Attribute, eps: Attribute,
    groups: Attribute, channels: Attribute,
) -> Sides:  # fmt: skip
    return (
        p.reshape(p.instance_norm(p.reshape(x, shape=grouped), o, z, epsilon=eps), shape=back),
        p.group_norm(
            p.reshape(x, shape=back), p.full(channels, 1.0), p.full(channels, 0.0), groups=groups, epsilon=eps
        ),
    )


@rule(where=_groups_of_channels, sample={**_grouped, "o": (40, 1.0)})
def group_norm_of_rows(
    p: Ops, x: TracedTensor, o: Weight, grouped: Attribute, back: Attribute, eps: Attribute,
    groups: Attribute, channels: Attribute,
) -> Sides:  # fmt: skip
    return (
        p.reshape(p.layer_norm(p.reshape(x, shape=grouped), o, axis=2, epsilon=eps), shape=back),
        p.group_norm(x, p.full(channels, 1.0), p.full(channels, 0.0), groups=groups, epsilon=eps),
    )


# softmax ------------------------------------------------------------------------------------------------


def _one_axis(m: Match) -> None:
    m.require(len(m.known["axes"]) == 1, f"over axes {list(m.known['axes'])}", "x")


_softmax = {"axes": (1,)}


@rule(where=_one_axis, sample=_softmax)
def softmax_from_exponentials(p: Ops, x: TracedTensor, axes: Attribute) -> Sides:
    e = p.exp(p.sub(x, p.reduce(x, kind="max", axes=axes)))
    return p.div(e, p.reduce(e, kind="sum", axes=axes)), p.softmax(x, axis=axes[0])


@rule(where=_one_axis, sample=_softmax)
def softmax_times_reciprocal(p: Ops, x: TracedTensor, axes: Attribute) -> Sides:
    e = p.exp(p.sub(x, p.reduce(x, kind="max", axes=axes)))
    return p.mul(e, p.reciprocal(p.reduce(e, kind="sum", axes=axes))), p.softmax(x, axis=axes[0])


@rule(sample={"axis": 1})
def log_of_softmax(p: Ops, x: TracedTensor, axis: Attribute) -> Sides:
    return p.log(p.softmax(x, axis=axis)), p.softmax(x, axis=axis, log=True)


@rule(where=_one_axis, sample=_softmax)
def log_softmax_from_exponentials(p: Ops, x: TracedTensor, axes: Attribute) -> Sides:
    t = p.sub(x, p.reduce(x, kind="max", axes=axes))
    return p.sub(t, p.log(p.reduce(p.exp(t), kind="sum", axes=axes))), p.softmax(x, axis=axes[0], log=True)


RULES: tuple[Rewriter, ...] = (
    layer_norm_from_moments,
    instance_norm_from_moments,
    layer_norm_of_all,
    batch_norm_from_moments,
    rms_norm_from_mean_square,  # after layer norm, whose last product looks the same
    layer_norm_scale,
    layer_norm_bias,
    rms_norm_scale,
    group_norm_from_instance_norm,
    group_norm_flattened,
    group_norm_of_rows,
    instance_norm_scale,
    instance_norm_bias,
    instance_norm_shift,
    group_norm_scale,
    group_norm_bias,
    softmax_from_exponentials,
    softmax_times_reciprocal,
    log_of_softmax,
    log_softmax_from_exponentials,
)
