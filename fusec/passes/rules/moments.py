"""Bring norms as JAX, Flax and Keras spell them into the spelling that the rules of norms know.

They take the variance from the mean of the squares, which loses digits where the mean is large, and in 16 bits nearly
all. They multiply the scale before the rows. ONNX's MeanVarianceNormalization divides by a deviation plus 1e-9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusec.ir import DType
from fusec.passes.rewriting.expression import Apply
from fusec.passes.rewriting.pattern import Attribute, Match, Ops, Rule, Scalar, Sides, TracedTensor, Weight, rule
from fusec.passes.rewriting.rewriter import Rewriter


def _count(m: Match) -> None:
    elements = 1
    for axis in m.known["axes"]:
        elements *= m["x"].type.shape[axis]
    m.require(abs(m.known["f"] * elements - 1) < 1e-5, f"{m.known['f']:g} is not 1/{elements}", "x")


@rule(where=_count, sample={"x": (2, 3, 4), "axes": (2,), "f": 0.25, "keep": True})
def mean_from_sum(p: Ops, x: TracedTensor, axes: Attribute, f: Scalar, keep: Attribute) -> Sides:
    """Compute the mean, because a sum of 16 bits overflows where the mean does not."""
    total = p.reduce(x, kind="sum", axes=axes, keepdims=keep)
    return p.mul(total, f), p.reduce(x, kind="mean", axes=axes, keepdims=keep)


_Variance = Callable[[Ops, TracedTensor, Apply, Attribute], Apply]


def _of_squares(p: Ops, x: TracedTensor, mean: Apply, axes: Attribute) -> Apply:
    return p.sub(p.reduce(p.mul(x, x), kind="mean", axes=axes), p.mul(mean, mean))


def _of_differences(p: Ops, x: TracedTensor, mean: Apply, axes: Attribute) -> Apply:
    d = p.sub(x, mean)
    return p.reduce(p.mul(d, d), kind="mean", axes=axes)


_VARIANCES: dict[str, _Variance] = {
    "clipped_squares": lambda p, x, mean, axes: p.relu(_of_squares(p, x, mean, axes)),
    "squares": _of_squares,
    "differences": _of_differences,
}
_sample = {"x": (2, 3, 4), "f": (4,), "b": (4,), "axes": (2,), "eps": 1e-3}


def _norm(p: Ops, x: TracedTensor, axes: Attribute, eps: Scalar) -> Apply:
    """Return the spelling of a norm without scale that the rules of norms know."""
    d = p.sub(x, p.reduce(x, kind="mean", axes=axes))
    return p.mul(d, p.rsqrt(p.add(p.reduce(p.mul(d, d), kind="mean", axes=axes), eps)))


def _plain(variance: str) -> Rule:
    def written(p: Ops, x: TracedTensor, axes: Attribute, eps: Scalar) -> Sides:
        mean = p.reduce(x, kind="mean", axes=axes)
        root = p.rsqrt(p.add(_VARIANCES[variance](p, x, mean, axes), eps))
        return p.mul(p.sub(x, mean), root), _norm(p, x, axes, eps)

    written.__name__ = f"norm_by_{variance}"
    return rule(sample=_sample)(written)


def _scaled(variance: str) -> Rule:
    """Return the rule for Flax, which multiplies the scale by the root first."""

    def written(p: Ops, x: TracedTensor, f: TracedTensor, axes: Attribute, eps: Scalar) -> Sides:
        mean = p.reduce(x, kind="mean", axes=axes)
        root = p.rsqrt(p.add(_VARIANCES[variance](p, x, mean, axes), eps))
        return p.mul(p.sub(x, mean), p.mul(root, f)), p.mul(_norm(p, x, axes, eps), f)

    written.__name__ = f"scaled_norm_by_{variance}"
    return rule(sample=_sample)(written)


def _line(variance: str, negated: bool) -> Rule:
    """Return the rule for Keras, which computes x·a + (b - mean·a). negated: as x·a + (-mean·a + b)."""

    def written(p: Ops, x: TracedTensor, f: Weight, b: Weight, axes: Attribute, eps: Scalar) -> Sides:
        mean = p.reduce(x, kind="mean", axes=axes)
        slope = p.mul(p.rsqrt(p.add(_VARIANCES[variance](p, x, mean, axes), eps)), f)
        shift = p.add(p.mul(p.neg(mean), slope), b) if negated else p.sub(b, p.mul(mean, slope))
        return p.add(p.mul(x, slope), shift), p.add(p.mul(_norm(p, x, axes, eps), f), b)

    written.__name__ = f"{'negated_' if negated else ''}line_norm_by_{variance}"
    return rule(sample=_sample)(written)


def _is_tiny(m: Match) -> None:
    """Check that the addend of a deviation changes results by no more than rounding, unless that is tiny, too."""
    most = 1e-15 if m["x"].type.dtype is DType.F64 else 1e-8
    m.require(0 <= m.known["eps"] <= most, f"{m.known['eps']:g} is not between 0 and {most:g}", "x")
    m.known["inner"] = m.known["eps"] ** 2


def _by_deviation(variance: str) -> Rule:
    """Return the rule for ONNX: a tiny number is added to the deviation, and its square to the variance of a norm."""

    def written(p: Ops, x: TracedTensor, axes: Attribute, eps: Scalar, inner: Attribute) -> Sides:
        mean = p.reduce(x, kind="mean", axes=axes)
        deviation = p.sqrt(_VARIANCES[variance](p, x, mean, axes))
        return p.div(p.sub(x, mean), p.add(deviation, eps)), _norm(p, x, axes, inner)

    written.__name__ = f"norm_by_deviation_of_{variance}"
    return rule(where=_is_tiny, sample={**_sample, "eps": 1e-16})(written)


def _rules() -> Sequence[Rewriter]:
    known = [_plain(variance) for variance in ("clipped_squares", "squares")]
    known += [_scaled(variance) for variance in _VARIANCES]
    known += [_by_deviation(variance) for variance in _VARIANCES]
    return known + [_line(variance, negated) for variance in _VARIANCES for negated in (False, True)]


RULES: tuple[Rewriter, ...] = (mean_from_sum, *_rules())
