"""Recognise scaled dot-product attention as exporters spell it: two products and a softmax between them.

The rule is written by hand, because exports differ in many ways. The scale may be on queries, keys or scores, and the
mask inside or outside of it. Reshapes, transposes, casts and repeated heads may be between any two of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import cast

import ml_dtypes
import numpy as np

from fusec.errors import VerifyError
from fusec.ir import Array, DType, Graph, Node, Op, Value
from fusec.ops import Attention, Cast, Expand, MatMul, Reshape, Softmax, Transpose, pw
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import NoMatch, local
from fusec.passes.rewriting.value_facts import small_constant
from fusec.reference import evaluate_node

Shape = tuple[int, ...]

NEVER = -1e30  # added to a score like -infinity: its weight becomes zero
MASK_BYTES = 1 << 26  # the numbers of larger constant masks are not read


@dataclass(frozen=True)
class _Term:
    """An addend of the scores, factor * value; `lead` are the leading dims of the scores where it is added."""

    value: Value
    factor: float
    lead: Shape


@dataclass
class _Scores:
    """Scores: factor * product + terms, and -infinity where a mask in `hidden` hides them."""

    product: Node
    factor: float = 1.0
    terms: list[_Term] = field(default_factory=list[_Term])
    hidden: list[tuple[_Term, bool]] = field(default_factory=list[tuple[_Term, bool]])  # mask, its value that shows
    leads: list[Shape] = field(default_factory=list[Shape])


@dataclass(frozen=True)
class _Operand:
    """A matrix of each head without its views: `value`, transposed if `swapped`, times `factor`, each head repeated."""

    value: Value
    swapped: bool = False
    factor: float = 1.0
    repeats: int = 1


@local("matmul", equation="matmul(softmax(scale * matmul(q, transpose(k)) + bias), v) = attention(q, k, v, bias)")
def attention(graph: Graph, node: Node) -> Value | None:
    """Replace two products and a softmax between them by the op `attention`."""
    weights, v = node.operands
    softmax, guarded = _softmax(weights, node)
    scores = _scores(softmax.operands[0], softmax, 1.0)
    scores.leads.append(node.result.type.shape[:-2])
    left, right = scores.product.operands
    query, key, values = _operand(left, scaled=True), _operand(right, scaled=True), _operand(v, scaled=False)
    key = replace(key, swapped=not key.swapped)
    scale = scores.factor * query.factor * key.factor
    if scale == 0 or not math.isfinite(scale):
        raise NoMatch(f"scores scaled by {scale:g}", scores.product.result)
    if key.repeats != values.repeats:
        raise NoMatch("keys and values are repeated differently", v)
    batch, heads = _heads(scores.leads, query, key)
    make = _Maker(graph, node)
    try:
        bias, hides = _bias(make, scores, (batch, heads))
        bias, causal, seen = _causal(make, bias)
        q = _placed(make, query, (batch, heads))
        k, held = (_placed(make, x, (batch, heads // key.repeats)) for x in (key, values))
        made = make(Attention(scale, causal, hides, guarded, seen), *(x for x in (q, k, held, bias) if x is not None))
        return made if made.type.shape == node.result.type.shape else make(Reshape(node.result.type.shape), made)
    except (NoMatch, VerifyError) as miss:
        make.undo()
        raise miss if isinstance(miss, NoMatch) else NoMatch(str(miss), node.result) from miss


class _Maker:
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


# from the weights up to the first product ----------------------------------------------------------------


def _alone(value: Value, *users: Node) -> None:
    if any(user not in users for user in value.users):
        raise NoMatch("used elsewhere too", value)


def _computed_by(value: Value) -> Node:
    if value.node is None or value.literal is not None:
        raise NoMatch("not computed", value)
    return value.node


def _softmax(weights: Value, user: Node) -> tuple[Node, bool]:
    """Find the softmax that computes weights; tell if rows of NaN become zero after it."""
    users, guarded = (user,), False
    while True:
        node = _computed_by(weights)
        _alone(weights, *users)
        if isinstance(node.op, Softmax):
            if node.op.log or node.op.axis % weights.type.rank != weights.type.rank - 1 or 0 in weights.type.shape:
                raise NoMatch("not a softmax of rows", weights)
            return node, guarded
        users = (node,)
        if node.op.name == "where":
            weights, guarded = _unguarded(node), True
            users = (node, cast(Node, node.operands[0].node))
        else:
            weights = _view(node)


def _unguarded(node: Node) -> Value:
    """Return the weights in where(is_nan(weights), 0, weights)."""
    condition, zero, weights = node.operands
    test = condition.node
    if test is None or test.op.name != "is_nan" or test.operands[0] is not weights or zero.scalar() != 0:
        raise NoMatch("not a guard against NaN", node.result)
    _alone(condition, node)
    return weights


def _view(node: Node) -> Value:
    """Return the operand of a cast between floats, or of a reshape that keeps rows and columns."""
    if isinstance(node.op, (Cast, Reshape)):
        (source,) = node.operands
        floats = isinstance(node.op, Reshape) or (source.type.dtype.is_float and node.op.to.is_float)
        if floats and source.type.shape[-2:] == node.result.type.shape[-2:]:
            return source
    raise NoMatch(f"{node.op.name} between the scores and the softmax is not a view", node.results[0])


def _scores(value: Value, user: Node, factor: float) -> _Scores:
    """Match the softmax's operand, `factor` times `value`, as product, scale and mask."""
    node = _computed_by(value)
    _alone(value, user)
    lead = value.type.shape[:-2]
    if isinstance(node.op, MatMul):
        return _Scores(node, factor, leads=[lead])
    found: _Scores
    match node.op.name:
        case "mul" | "div":
            x, by = _scaled(node)
            found = _scores(x, node, factor * by)
        case "add":
            found = _either(node, factor, lead)
        case "where":
            found = _where(node, factor, lead)
        case _:
            found = _scores(_view(node), node, factor)
    found.leads.append(lead)
    return found


def _scaled(node: Node) -> tuple[Value, float]:
    """Return x and c of x * c or x / c."""
    a, b = node.operands
    x, c = (b, a) if a.literal is not None and node.op.name == "mul" else (a, b)
    number = c.scalar()
    if number is None or number == 0 or not math.isfinite(number) or x.type.shape != node.result.type.shape:
        raise NoMatch("not scaled by a number", node.result)
    return x, 1.0 / number if node.op.name == "div" else number


def _either(node: Node, factor: float, lead: Shape) -> _Scores:
    """Match a sum, one of whose terms is the scores."""
    reason: NoMatch | None = None
    for x, b in (node.operands, node.operands[::-1]):
        try:
            if x.type.shape != node.result.type.shape:
                raise NoMatch("a bias wider than the scores", x)
            found = _scores(x, node, factor)
        except NoMatch as miss:
            reason = reason or miss
            continue
        found.terms.append(_Term(b, factor, lead))
        return found
    assert reason is not None
    raise reason


def _where(node: Node, factor: float, lead: Shape) -> _Scores:
    """Match scores where a mask allows them, else -infinity, or a number as low if the mask shows some key."""
    mask, x, y = node.operands
    keeps = x.literal is None
    visible, other = (x, y) if keeps else (y, x)
    number = other.scalar()
    if number is None or factor < 0 or visible.type.shape != node.result.type.shape:
        raise NoMatch("no number where it is masked", node.result)
    if number != -math.inf and not (number * factor <= _lowest(other) and _shows_some(mask, keeps)):
        raise NoMatch("not -infinity where it is masked", node.result)
    found = _scores(visible, node, factor)
    found.hidden.append((_Term(mask, 1.0, lead), keeps))
    return found


def _lowest(value: Value) -> float:
    """Return the number, in the type of a value, that hides a score next to others."""
    return max(NEVER, float(ml_dtypes.finfo(value.type.dtype.numpy).min))


def _shows_some(mask: Value, keeps: bool) -> bool:
    """Tell if a mask is known to leave each query some key."""
    array = _known(mask)
    return array is not None and bool((np.atleast_1d(array) == keeps).any(axis=-1).all())


# operands -------------------------------------------------------------------------------------------------


def _operand(value: Value, scaled: bool) -> _Operand:
    """Remove the views of heads from the operand of a product."""
    found = _Operand(value)
    while True:
        node = found.value.node
        if node is None or found.value.literal is not None:
            return found
        shape = found.value.type.shape
        rank = len(shape)
        if isinstance(node.op, Reshape) and node.operands[0].type.shape[-2:] == shape[-2:]:
            found = replace(found, value=node.operands[0])
        elif isinstance(node.op, Transpose) and node.op.perm == (*range(rank - 2), rank - 1, rank - 2):
            found = replace(found, value=node.operands[0], swapped=not found.swapped)
        elif isinstance(node.op, Expand) and found.repeats == 1 and _repeats(node):
            found = replace(found, value=node.operands[0], repeats=shape[2])
        elif scaled and node.op.name in ("mul", "div"):
            try:
                x, by = _scaled(node)
            except NoMatch:
                return found
            found = replace(found, value=x, factor=found.factor * by)
        else:
            return found


def _repeats(node: Node) -> bool:
    """Tell if [B, G, 1, rows, columns] is expanded along its third dim only."""
    source, shape = node.operands[0].type.shape, node.result.type.shape
    return len(source) == len(shape) == 5 and source[2] == 1 and (*source[:2], *source[3:]) == (*shape[:2], *shape[3:])


def _heads(leads: list[Shape], query: _Operand, key: _Operand) -> tuple[int, int]:
    """Return batch and heads: the scores' leading dims wherever there are two of them, else the query's."""
    total = math.prod(leads[-1])
    if key.repeats > 1:
        batch, groups = key.value.type.shape[:2]
        return batch, groups * key.repeats
    for lead in (*leads, query.value.type.shape[:-2]):
        if len(lead) == 2 and math.prod(lead) == total:
            return lead[0], lead[1]
    last = leads[-1]
    return (math.prod(last[:-1]), last[-1]) if len(last) > 2 else (total, 1)


def _placed(make: _Maker, operand: _Operand, lead: tuple[int, int]) -> Value:
    """Reshape the operand to [batch, heads, rows, columns]."""
    value, shape = operand.value, operand.value.type.shape
    if math.prod(shape[:-2]) != math.prod(lead) or (operand.repeats > 1 and shape[:2] != lead):
        raise NoMatch(f"{list(shape)} is no matrix for each of {lead[0]} times {lead[1]} heads", value)
    wanted = (*lead, *shape[-2:])
    if shape != wanted:
        value = make(Reshape(wanted), value)
    return make(Transpose((0, 1, 3, 2)), value) if operand.swapped else value


# masks ----------------------------------------------------------------------------------------------------


def _bias(make: _Maker, scores: _Scores, lead: tuple[int, int]) -> tuple[Value | None, bool]:
    """Add up all addends of the scores; tell if their -infinities hide scores."""
    dtype = scores.product.result.type.dtype
    total: Value | None = None
    for term in scores.terms:
        value = _with_lead(make, term, lead)
        if value.type.dtype is not dtype:
            value = make(Cast(dtype), value)
        if term.factor != 1.0:
            value = make(pw("mul"), value, make.number(term.factor, dtype))
        total = value if total is None else make(pw("add"), total, value)
    if scores.hidden and any(not _is_finite(term.value) for term in scores.terms):
        raise NoMatch("masked scores, to which a value is added that may be infinite", scores.product.result)
    for mask, keeps in scores.hidden:
        shown, never = total if total is not None else make.number(0.0, dtype), make.number(-math.inf, dtype)
        total = make(pw("where"), _with_lead(make, mask, lead), *((shown, never) if keeps else (never, shown)))
    return total, bool(scores.hidden)


def _with_lead(make: _Maker, term: _Term, lead: tuple[int, int]) -> Value:
    """Reshape a value that broadcasts with the scores to broadcast with the scores of four dims."""
    value, shape = term.value, term.value.type.shape
    if term.lead == lead or len(shape) <= 2:
        return value
    own = (1,) * (len(term.lead) + 2 - len(shape)) + shape
    if all(d == 1 for d in own[:-2]):
        return make(Reshape(own[-2:]), value)
    if own[:-2] == term.lead:
        return make(Reshape((*lead, *own[-2:])), value)
    raise NoMatch(f"a mask of shape {list(shape)} for {lead[0]} times {lead[1]} heads", value)


def _is_finite(value: Value) -> bool:
    array = small_constant(value)
    return array is not None and bool(np.isfinite(array).all())


def _causal(make: _Maker, bias: Value | None) -> tuple[Value | None, bool, bool]:
    """Split a causal mask off a bias.

    Returns the remaining mask, True if the mask was causal, and True if it leaves each query some key. A constant that
    hides a key becomes -infinity, because that survives a smaller storage type.
    """
    array = None if bias is None else _known(bias)
    if bias is None or array is None:
        return bias, False, False
    lowest = _lowest(bias)
    wide = np.atleast_2d(array.astype(np.float64))
    hidden = wide <= lowest
    if hidden.all(axis=-1).any() or np.isnan(wide).any():
        return bias, False, False
    rows, columns = wide.shape[-2:]
    later = np.arange(columns)[None, :] > np.arange(rows)[:, None]
    if rows > 1 and hidden.any() and not wide[~hidden].any() and bool((hidden == later).all()):
        return None, True, False
    if bias.literal is None or np.isneginf(wide[hidden]).all():
        return bias, False, True
    least = _WithInfinity(lowest)
    folded = derive(make.graph, make.before, bias.literal.type, [bias.literal], least, bias.literal)
    return make.keep(folded), False, True


def _known(value: Value, depth: int = 3) -> Array | None:
    """Return the array of a constant, or of new nodes on constants; None for other values, or large ones."""
    if value.type.nbytes > MASK_BYTES or depth == 0:
        return None
    if value.literal is not None:
        return value.literal.array
    if value.node is None:
        return None
    operands = [_known(v, depth - 1) for v in value.node.operands]
    known = [x for x in operands if x is not None]
    return evaluate_node(value.node, known)[0] if len(known) == len(operands) else None


class _WithInfinity:
    """Replaces numbers that low by -infinity."""

    def __init__(self, lowest: float):
        self.lowest = lowest

    def __call__(self, array: Array) -> Array:
        return np.where(array.astype(np.float64) <= self.lowest, -np.inf, array).astype(array.dtype)
