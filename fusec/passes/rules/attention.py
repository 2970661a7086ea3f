"""Recognise scaled dot-product attention as exporters spell it: two products and a softmax between them.

The rule is written by hand, because exports differ in many ways. The scale may be on queries, keys or scores, and the
mask inside or outside of it. Reshapes, transposes, casts and repeated heads may be between any two of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fusec.errors import VerifyError
from fusec.ir import Graph, Node, Value
from fusec.ops import Attention, Expand, Reshape, Transpose
from fusec.passes.rewriting.rewriter import NoMatch, local
from fusec.passes.rules.attention_mask import Maker, added_bias, split_causal
from fusec.passes.rules.attention_scores import Shape, scaled_by, scores_of, softmax_of
from fusec.system.dataclass import dataclass


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
    softmax, guarded = softmax_of(weights, node)
    scores = scores_of(softmax.operands[0], softmax, 1.0)
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
    make = Maker(graph, node)
    try:
        bias, hides = added_bias(make, scores, (batch, heads))
        bias, causal, seen = split_causal(make, bias)
        q = _placed(make, query, (batch, heads))
        k, held = (_placed(make, x, (batch, heads // key.repeats)) for x in (key, values))
        made = make(Attention(scale, causal, hides, guarded, seen), *(x for x in (q, k, held, bias) if x is not None))
        return made if made.type.shape == node.result.type.shape else make(Reshape(node.result.type.shape), made)
    except (NoMatch, VerifyError) as miss:
        make.undo()
        raise miss if isinstance(miss, NoMatch) else NoMatch(str(miss), node.result) from miss


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
                x, by = scaled_by(node)
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


def _placed(make: Maker, operand: _Operand, lead: tuple[int, int]) -> Value:
    """Reshape the operand to [batch, heads, rows, columns]."""
    value, shape = operand.value, operand.value.type.shape
    if math.prod(shape[:-2]) != math.prod(lead) or (operand.repeats > 1 and shape[:2] != lead):
        raise NoMatch(f"{list(shape)} is no matrix for each of {lead[0]} times {lead[1]} heads", value)
    wanted = (*lead, *shape[-2:])
    if shape != wanted:
        value = make(Reshape(wanted), value)
    return make(Transpose((0, 1, 3, 2)), value) if operand.swapped else value
