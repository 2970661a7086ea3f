"""Follow the weights of attention back to its first product, through softmax, scale and mask."""

from __future__ import annotations

import math
from dataclasses import field
from typing import cast

import ml_dtypes
import numpy as np

from fusec.ir import Array, Node, Value
from fusec.ops import Cast, MatMul, Reshape, Softmax
from fusec.passes.rewriting.rewriter import NoMatch
from fusec.reference import evaluate_node
from fusec.system.dataclass import dataclass

Shape = tuple[int, ...]

NEVER = -1e30  # added to a score like -infinity: its weight becomes zero
MASK_BYTES = 1 << 26  # the numbers of larger constant masks are not read


@dataclass(frozen=True)
class Term:
    """An addend of the scores, factor * value; `lead` are the leading dims of the scores where it is added."""

    value: Value
    factor: float
    lead: Shape


@dataclass
class Scores:
    """Scores: factor * product + terms, and -infinity where a mask in `hidden` hides them."""

    product: Node
    factor: float = 1.0
    terms: list[Term] = field(default_factory=list[Term])
    hidden: list[tuple[Term, bool]] = field(default_factory=list[tuple[Term, bool]])  # mask, its value that shows
    leads: list[Shape] = field(default_factory=list[Shape])


def _alone(value: Value, *users: Node) -> None:
    if any(user not in users for user in value.users):
        raise NoMatch("used elsewhere too", value)


def _computed_by(value: Value) -> Node:
    if value.node is None or value.literal is not None:
        raise NoMatch("not computed", value)
    return value.node


def softmax_of(weights: Value, user: Node) -> tuple[Node, bool]:
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


def scores_of(value: Value, user: Node, factor: float) -> Scores:
    """Match the softmax's operand, `factor` times `value`, as product, scale and mask."""
    node = _computed_by(value)
    _alone(value, user)
    lead = value.type.shape[:-2]
    if isinstance(node.op, MatMul):
        return Scores(node, factor, leads=[lead])
    found: Scores
    match node.op.name:
        case "mul" | "div":
            x, by = scaled_by(node)
            found = scores_of(x, node, factor * by)
        case "add":
            found = _either(node, factor, lead)
        case "where":
            found = _where(node, factor, lead)
        case _:
            found = scores_of(_view(node), node, factor)
    found.leads.append(lead)
    return found


def scaled_by(node: Node) -> tuple[Value, float]:
    """Return x and c of x * c or x / c."""
    a, b = node.operands
    x, c = (b, a) if a.literal is not None and node.op.name == "mul" else (a, b)
    number = c.scalar()
    if number is None or number == 0 or not math.isfinite(number) or x.type.shape != node.result.type.shape:
        raise NoMatch("not scaled by a number", node.result)
    return x, 1.0 / number if node.op.name == "div" else number


def _either(node: Node, factor: float, lead: Shape) -> Scores:
    """Match a sum, one of whose terms is the scores."""
    reason: NoMatch | None = None
    for x, b in (node.operands, node.operands[::-1]):
        try:
            if x.type.shape != node.result.type.shape:
                raise NoMatch("a bias wider than the scores", x)
            found = scores_of(x, node, factor)
        except NoMatch as miss:
            reason = reason or miss
            continue
        found.terms.append(Term(b, factor, lead))
        return found
    assert reason is not None
    raise reason


def _where(node: Node, factor: float, lead: Shape) -> Scores:
    """Match scores where a mask allows them, else -infinity, or a number as low if the mask shows some key."""
    mask, x, y = node.operands
    keeps = x.literal is None
    visible, other = (x, y) if keeps else (y, x)
    number = other.scalar()
    if number is None or factor < 0 or visible.type.shape != node.result.type.shape:
        raise NoMatch("no number where it is masked", node.result)
    if number != -math.inf and not (number * factor <= lowest(other) and _shows_some(mask, keeps)):
        raise NoMatch("not -infinity where it is masked", node.result)
    found = scores_of(visible, node, factor)
    found.hidden.append((Term(mask, 1.0, lead), keeps))
    return found


def lowest(value: Value) -> float:
    """Return the number, in the type of a value, that hides a score next to others."""
    return max(NEVER, float(ml_dtypes.finfo(value.type.dtype.numpy).min))


def _shows_some(mask: Value, keeps: bool) -> bool:
    """Tell if a mask is known to leave each query some key."""
    array = known_array(mask)
    return array is not None and bool((np.atleast_1d(array) == keeps).any(axis=-1).all())


def known_array(value: Value, depth: int = 3) -> Array | None:
    """Return the array of a constant, or of new nodes on constants; None for other values, or large ones."""
    if value.type.nbytes > MASK_BYTES or depth == 0:
        return None
    if value.literal is not None:
        return value.literal.array
    if value.node is None:
        return None
    operands = [known_array(v, depth - 1) for v in value.node.operands]
    known = [x for x in operands if x is not None]
    return evaluate_node(value.node, known)[0] if len(known) == len(operands) else None
