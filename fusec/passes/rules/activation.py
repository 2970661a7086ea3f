"""Recognise activations as frameworks spell them, after canonicalisation (x / c is x * (1/c), limits are clip)."""

from __future__ import annotations

from collections.abc import Callable

from fusec.ops.pointwise import SQRT_2_OVER_PI, SQRT_HALF
from fusec.passes.rewriting.expression import Apply
from fusec.passes.rewriting.pattern import Attribute, Match, Ops, Rule, Scalar, Sides, TracedTensor, rule
from fusec.passes.rewriting.rewriter import Rewriter

# gelu: several spellings of the half, and of the polynomial of the tanh variant ---------------------

_Outer = Callable[[Ops, TracedTensor, Apply], Apply]
_HALVED: dict[str, _Outer] = {
    "x_halved": lambda p, x, e: p.mul(p.mul(x, 0.5), p.add(e, 1.0)),
    "product_halved": lambda p, x, e: p.mul(p.mul(x, p.add(e, 1.0)), 0.5),
    "cdf_halved": lambda p, x, e: p.mul(x, p.mul(p.add(e, 1.0), 0.5)),
    "terms_halved": lambda p, x, e: p.mul(x, p.add(p.mul(e, 0.5), 0.5)),
}
_POLYNOMIAL: dict[str, Callable[[Ops, TracedTensor], Apply]] = {
    "cube": lambda p, x: p.mul(p.add(x, p.mul(p.mul(p.mul(x, x), x), 0.044715)), SQRT_2_OVER_PI),
    "nested": lambda p, x: p.mul(p.add(x, p.mul(x, p.mul(x, p.mul(x, 0.044715)))), SQRT_2_OVER_PI),  # TensorFlow
    "square": lambda p, x: p.mul(p.mul(x, SQRT_2_OVER_PI), p.add(p.mul(p.mul(x, x), 0.044715), 1.0)),
    "product": lambda p, x: p.mul(p.mul(x, SQRT_2_OVER_PI), p.add(p.mul(p.mul(x, 0.044715), x), 1.0)),
    "factored": lambda p, x: p.mul(p.mul(x, p.add(p.mul(p.mul(x, x), 0.044715), 1.0)), SQRT_2_OVER_PI),
}


def _gelu(halved: str) -> Rule:
    def written(p: Ops, x: TracedTensor) -> Sides:
        return _HALVED[halved](p, x, p.erf(p.mul(x, SQRT_HALF))), p.gelu(x)

    written.__name__ = f"gelu_{halved}"
    return rule(written)


def _gelu_tanh(halved: str, polynomial: str) -> Rule:
    def written(p: Ops, x: TracedTensor) -> Sides:
        return _HALVED[halved](p, x, p.tanh(_POLYNOMIAL[polynomial](p, x))), p.gelu_tanh(x)

    written.__name__ = f"gelu_tanh_{halved}_{polynomial}"
    return rule(written)


# sigmoid and its products -------------------------------------------------------------------------------


@rule
def sigmoid_from_exponential(p: Ops, x: TracedTensor) -> Sides:
    return p.reciprocal(p.add(p.exp(p.neg(x)), 1.0)), p.sigmoid(x)


@rule
def sigmoid_minus_one_times(p: Ops, x: TracedTensor) -> Sides:
    return p.reciprocal(p.add(p.exp(p.mul(x, -1.0)), 1.0)), p.sigmoid(x)


@rule
def swish(p: Ops, x: TracedTensor) -> Sides:
    return p.mul(x, p.sigmoid(x)), p.swish(x)


@rule
def swish_quotient(p: Ops, x: TracedTensor) -> Sides:
    return p.div(x, p.add(p.exp(p.neg(x)), 1.0)), p.swish(x)


@rule(sample={"b": 1.702})
def swish_beta(p: Ops, x: TracedTensor, b: Scalar) -> Sides:
    return p.mul(x, p.sigmoid(p.mul(x, b))), p.swish(x, beta=b)


@rule
def softplus_from_logarithm(p: Ops, x: TracedTensor) -> Sides:
    return p.log(p.add(p.exp(x), 1.0)), p.softplus(x)


@rule
def mish(p: Ops, x: TracedTensor) -> Sides:
    return p.mul(x, p.tanh(p.softplus(x))), p.mish(x)


@rule
def softsign_from_quotient(p: Ops, x: TracedTensor) -> Sides:
    return p.div(x, p.add(p.abs(x), 1.0)), p.softsign(x)


# the hard ones ------------------------------------------------------------------------------------------


def _reaches_one(m: Match) -> None:
    top, factor = m.known["c"], m.known["s"]
    m.require(factor > 0 and abs(top * factor - 1) <= 1e-6, f"{top:g} * {factor:g} is not 1", "x")


@rule(where=_reaches_one, sample={"b": 3.0, "c": 6.0, "s": 1 / 6})
def hard_sigmoid_scaled(p: Ops, x: TracedTensor, b: Scalar, c: Attribute, s: Scalar) -> Sides:
    return p.mul(p.clip(p.add(x, b), min=0.0, max=c), s), p.hard_sigmoid(x, alpha=s, beta=b * s)


@rule(sample={"a": 0.3, "b": 0.4})
def hard_sigmoid_line(p: Ops, x: TracedTensor, a: Scalar, b: Scalar) -> Sides:
    return p.clip(p.add(p.mul(x, a), b), min=0.0, max=1.0), p.hard_sigmoid(x, alpha=a, beta=b)


@rule
def hard_swish(p: Ops, x: TracedTensor) -> Sides:
    return p.mul(x, p.hard_sigmoid(x, alpha=1 / 6, beta=0.5)), p.hard_swish(x)


@rule
def hard_swish_product(p: Ops, x: TracedTensor) -> Sides:
    return p.mul(p.mul(x, p.clip(p.add(x, 3.0), min=0.0, max=6.0)), 1 / 6), p.hard_swish(x)


# one slope left of zero, another right of it ------------------------------------------------------------


def _slope_below_one(m: Match) -> None:
    m.require(m.known["a"] <= 1, f"a slope of {m.known['a']:g}: max would take the other side", "x")


@rule(where=_slope_below_one, sample={"a": 0.1})
def leaky_relu_max(p: Ops, x: TracedTensor, a: Scalar) -> Sides:
    return p.max(x, p.mul(x, a)), p.leaky_relu(x, alpha=a)


@rule(sample={"a": 0.1})
def leaky_relu_where(p: Ops, x: TracedTensor, a: Scalar) -> Sides:
    return p.where(p.cmp_gt(x, 0.0), x, p.mul(x, a)), p.leaky_relu(x, alpha=a)


@rule(sample={"a": 0.1})
def leaky_relu_where_or_zero(p: Ops, x: TracedTensor, a: Scalar) -> Sides:
    return p.where(p.cmp_ge(x, 0.0), x, p.mul(x, a)), p.leaky_relu(x, alpha=a)


@rule(sample={"a": -0.1})
def leaky_relu_parts(p: Ops, x: TracedTensor, a: Scalar) -> Sides:
    return p.add(p.relu(x), p.mul(p.relu(p.neg(x)), a)), p.leaky_relu(x, alpha=-a)


@rule
def relu_where(p: Ops, x: TracedTensor) -> Sides:
    """Not relu(x): a comparison with NaN is false, so NaN gives 0 here, and NaN there."""
    return p.where(p.cmp_gt(x, 0.0), x, 0.0), p.relu_backward(x, x)


@rule
def relu_where_or_zero(p: Ops, x: TracedTensor) -> Sides:
    return p.where(p.cmp_ge(x, 0.0), x, 0.0), p.relu_backward(x, x)


@rule(sample={"a": 1.5})
def elu_where(p: Ops, x: TracedTensor, a: Scalar) -> Sides:
    return p.where(p.cmp_gt(x, 0.0), x, p.mul(p.add(p.exp(x), -1.0), a)), p.elu(x, alpha=a)


@rule
def elu_where_one(p: Ops, x: TracedTensor) -> Sides:
    return p.where(p.cmp_gt(x, 0.0), x, p.add(p.exp(x), -1.0)), p.elu(x)


RULES: tuple[Rewriter, ...] = (
    *(_gelu(halved) for halved in _HALVED),
    *(_gelu_tanh(halved, polynomial) for halved in _HALVED for polynomial in _POLYNOMIAL),
    sigmoid_from_exponential,
    sigmoid_minus_one_times,
    swish,
    swish_quotient,
    swish_beta,
    softplus_from_logarithm,
    mish,
    softsign_from_quotient,
    hard_swish_product,
    hard_sigmoid_scaled,
    hard_sigmoid_line,
    hard_swish,
    leaky_relu_max,
    leaky_relu_where,
    leaky_relu_where_or_zero,
    leaky_relu_parts,
    relu_where,
    relu_where_or_zero,
    elu_where,
    elu_where_one,
)
