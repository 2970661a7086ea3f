"""Recognise rotary position embeddings as exporters spell them: rotated halves of each row, times cos and sin."""

from __future__ import annotations

from fusec.ir import Graph, Node, Value
from fusec.ops import Concat, Slice, Split, pw
from fusec.passes.rewriting.pattern import Attribute, Match, Ops, Sides, TracedTensor, rule
from fusec.passes.rewriting.rewriter import Rewriter, local, single_use


def _halves(m: Match) -> None:
    """Check that the slices are the two halves of x's last dim, concatenated along it."""
    shape, half = m["x"].type.shape, m["x"].type.shape[-1] // 2
    zeros = (0,) * (len(shape) - 1)
    m.require(m.known["sizes"] == (*shape[:-1], half) and shape[-1] % 2 == 0, "not halves of the last dim", "x")
    m.require(m.known["low"] == (*zeros, 0) and m.known["high"] == (*zeros, half), "not its two halves", "x")
    m.require(all(s == 1 for s in m.known["steps"]), "a step other than 1", "x")
    m.require(m.known["axis"] % len(shape) == len(shape) - 1, "concatenated along another dim", "x")


_rotated = {
    "x": (2, 3, 4),
    "c": (3, 4),
    "s": (1, 3, 4),
    "low": (0, 0, 0),
    "high": (0, 0, 2),
    "sizes": (2, 3, 2),
    "steps": (1, 1, 1),
    "axis": 2,
}


@rule(where=_halves, sample=_rotated)
def rotary_from_halves(
    p: Ops, x: TracedTensor, c: TracedTensor, s: TracedTensor,
    low: Attribute, high: Attribute, sizes: Attribute, steps: Attribute, axis: Attribute,
) -> Sides:  # fmt: skip
    first = p.slice(x, starts=low, sizes=sizes, steps=steps)
    second = p.slice(x, starts=high, sizes=sizes, steps=steps)
    return p.add(p.mul(x, c), p.mul(p.concat(p.neg(second), first, axis=axis), s)), p.rotary(x, c, s)


@local("concat", equation="concat(neg(high), low) where low, high = split(x): the same of slices of x")
def halves_of_split(graph: Graph, node: Node) -> Value | None:
    """Write a split into halves as slices where a rotary embedding may read it, so that the rule above finds it."""
    if len(node.operands) != 2 or not _multiplied_and_added(node.result):
        return None
    negated, first = (value.node for value in node.operands)
    if negated is None or first is None or negated.op.name != "neg" or not isinstance(first.op, Split):
        return None
    x, axis = first.operands[0], node.result.type.rank - 1
    dims = [op.axis % (axis + 1) for op in (node.op, first.op) if isinstance(op, (Concat, Split))]
    if dims != [axis, axis] or len(first.results) != 2 or list(node.operands) != [negated.result, first.results[0]]:
        return None
    if negated.operands[0] is not first.results[1] or len(set(first.op.sizes)) != 1:
        return None
    starts = [(0,) * axis + (start,) for start in (0, first.op.sizes[0])]
    low, high = (graph.add(Slice(s, first.results[0].type.shape, (1,) * (axis + 1)), x, before=node) for s in starts)
    return graph.add(Concat(axis), graph.add(pw("neg"), high, before=node), low, before=node)


def _multiplied_and_added(value: Value) -> bool:
    """Tell if only a product reads a value, and only a sum that product."""
    for op in ("mul", "add"):
        if not single_use(value) or value.users[0].op.name != op:
            return False
        value = value.users[0].result
    return True


RULES: tuple[Rewriter, ...] = (halves_of_split, rotary_from_halves)
