"""Make the bias of an attention from the masks and addends of its scores, and split a causal mask off it."""

from __future__ import annotations

import math
from functools import partial
from math import prod

import numpy as np

from fusec.ir import Array, DType, Graph, Node, Op, TensorType, Value
from fusec.ops import Cast, Expand, Reshape, pw
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import NoMatch
from fusec.passes.rewriting.value_facts import small_constant
from fusec.passes.rules.attention_scores import MASK_BYTES, Scores, Term, known_array, lowest


class Maker:
    """Inserts nodes before another, and can remove them again."""

    def __init__(self, graph: Graph, before: Node):
        self.graph = graph
        self.before = before
        self._made: list[Node] = []

    def __call__(self, op: Op, *operands: Value) -> Value:
        return self.keep(self.graph.insert(op, operands, before=self.before).result)

    def number(self, value: float, dtype: DType) -> Value:
        return self.keep(self.graph.constant(np.asarray(value, dtype.numpy), before=self.before))

    def keep(self, value: Value) -> Value:
        assert value.node is not None
        self._made.append(value.node)
        return value

    def undo(self) -> None:
        for node in reversed(self._made):
            self.graph.erase(node)


def added_bias(make: Maker, scores: Scores, lead: tuple[int, int]) -> tuple[Value | None, bool]:
    """Add up all addends of the scores; tell if their -infinities hide scores."""
    dtype = scores.product.result.type.dtype
    total: Value | None = None
    for term in scores.terms:
        value = _with_lead(make, term, lead)
        if value.type.dtype is not dtype:
            value = make(Cast(dtype), value)
        if term.factor != 1.0:
            value = make(pw("mul"), value, make.number(term.factor, dtype))
        total = value if total is None else _sum(make, total, value)
    if scores.hidden and any(not _is_finite(term.value) for term in scores.terms):
        raise NoMatch("masked scores, to which a value is added that may be infinite", scores.product.result)
    for mask, keeps in scores.hidden:
        shown, never = total if total is not None else make.number(0.0, dtype), make.number(-math.inf, dtype)
        total = make(pw("where"), _with_lead(make, mask, lead), *((shown, never) if keeps else (never, shown)))
    return total, bool(scores.hidden)


def _sum(make: Maker, a: Value, b: Value) -> Value:
    """Add two addends. The sum of constants is a constant, although it is much larger than each of them."""
    op = pw("add")
    (type,) = op.infer(a.type, b.type)
    if a.literal is None or b.literal is None or type.nbytes > MASK_BYTES:
        return make(op, a, b)
    return make.keep(derive(make.graph, make.before, type, [a.literal, b.literal], _added, a.literal))


@recorded
def _added(a: Array, b: Array) -> Array:
    return pw("add").reference(np, a, b)[0]


def _with_lead(make: Maker, term: Term, lead: tuple[int, int]) -> Value:
    """Reshape a value that broadcasts with the scores to broadcast with the scores of four dims.

    Several dims may form the batch, as images and windows do. A mask that has only some of them is repeated. A constant
    is repeated now, or in each call if its copies are large.
    """
    value, shape = term.value, term.value.type.shape
    if term.lead == lead or len(shape) <= 2:
        return value
    own = (1,) * (len(term.lead) + 2 - len(shape)) + shape
    if all(d == 1 for d in own[:-2]):
        return make(Reshape(own[-2:]), value)
    cuts = [i for i in range(len(term.lead) + 1) if (prod(term.lead[:i]), prod(term.lead[i:])) == lead]
    if not cuts:
        raise NoMatch(f"a mask of shape {list(shape)} for {lead[0]} times {lead[1]} heads", value)
    parts = [(own[: cuts[0]], term.lead[: cuts[0]]), (own[cuts[0] : -2], term.lead[cuts[0] :])]
    filled = [dims if all(d == 1 for d in dims) else whole for dims, whole in parts]
    wanted, whole = (*map(prod, filled), *own[-2:]), (*filled[0], *filled[1], *own[-2:])
    if whole == own:
        return make(Reshape(wanted), value)
    if value.literal is None or prod(wanted) * value.type.dtype.itemsize > MASK_BYTES:
        return make(Reshape(wanted), make(Expand(whole), make(Reshape(own), value)))
    repeated = TensorType(wanted, value.type.dtype)
    copies = partial(_repeated, shape=own, whole=whole)
    return make.keep(derive(make.graph, make.before, repeated, [value.literal], copies, value.literal))


@recorded
def _repeated(array: Array, shape: tuple[int, ...], whole: tuple[int, ...]) -> Array:
    """Repeat an array of some shape along its dims of size one."""
    return np.broadcast_to(array.reshape(shape), whole)


def _is_finite(value: Value) -> bool:
    array = small_constant(value)
    return array is not None and bool(np.isfinite(array).all())


def split_causal(make: Maker, bias: Value | None) -> tuple[Value | None, bool, bool]:
    """Split a causal mask off a bias.

    Returns the remaining mask, True if the mask was causal, and True if it leaves each query some key. A constant that
    hides a key becomes -infinity, because that survives a smaller storage type.
    """
    array = None if bias is None else known_array(bias)
    if bias is None or array is None:
        return bias, False, False
    least_number = lowest(bias)
    # Not as fp64, because copies of a mask for each window take long.
    wide = np.atleast_2d(array if array.dtype.itemsize >= 4 else array.astype(np.float32))
    hidden = wide <= least_number
    if hidden.all(axis=-1).any() or np.isnan(wide).any():
        return bias, False, False
    rows, columns = wide.shape[-2:]
    later = np.arange(columns)[None, :] > np.arange(rows)[:, None]
    if rows > 1 and hidden.any() and not wide[~hidden].any() and bool((hidden == later).all()):
        return None, True, False
    if bias.literal is None or np.isneginf(wide[hidden]).all():
        return bias, False, True
    least = partial(_with_infinity, lowest=least_number)
    folded = derive(make.graph, make.before, bias.literal.type, [bias.literal], least, bias.literal)
    return make.keep(folded), False, True


@recorded
def _with_infinity(array: Array, lowest: float) -> Array:
    """Replace numbers that low by -infinity."""
    return np.where(array.astype(np.float64) <= lowest, -np.inf, array).astype(array.dtype)
