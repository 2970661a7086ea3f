"""Add a constant to the parts of a concat, where all parts but one are constants.

So the position embedding of a vision transformer is added to the class token at compile time. The kernel that copies
the patches next to the token adds it to them.
"""

from __future__ import annotations

from itertools import accumulate

from fusec.ir import Graph, Node, Value
from fusec.ops import Concat, Slice, pw
from fusec.passes.base import RulePass
from fusec.passes.rewriting.rewriter import NoMatch, local, made_by, single_use


@local("add", equation="concat(x, y) + c = concat(x + c[:n], y + c[n:]) for constants x and c")
def add_to_each_part(graph: Graph, node: Node) -> Value | None:
    """Add parts of a constant to the operands of a concat."""
    joined, c = node.operands
    concat = made_by(joined, Concat)
    if concat is None or joined.node is None or c.literal is None:
        raise NoMatch("no constant is added to a concat", node.result)
    parts, axis = joined.node.operands, concat.axis % joined.type.rank
    if not single_use(joined):
        raise NoMatch("used elsewhere too", joined)
    if sum(part.literal is None for part in parts) != 1:
        raise NoMatch("not all parts but one are constants", joined)
    if node.result.type.shape != joined.type.shape:
        raise NoMatch("the sum is broadcast", node.result)
    starts = (0, *accumulate(part.type.shape[axis] for part in parts))
    made: list[Value] = []
    for part, start in zip(parts, starts, strict=False):
        along = slice(start, start + part.type.shape[axis])
        made.append(graph.add(pw("add"), part, _part_of(graph, c, axis - joined.type.rank, along, node), before=node))
    return graph.add(concat, *made, before=node)


def _part_of(graph: Graph, c: Value, axis: int, along: slice, before: Node) -> Value:
    """Return the part of a constant along an axis, which is counted from the last one."""
    if -axis > c.type.rank or c.type.shape[axis] == 1:
        return c
    starts, sizes = [0] * c.type.rank, list(c.type.shape)
    starts[axis], sizes[axis] = along.start, along.stop - along.start
    return graph.add(Slice(tuple(starts), tuple(sizes), (1,) * c.type.rank), c, before=before)


class AddBeforeConcat(RulePass):
    """Add constants to the parts of a concat of which only one is computed."""

    name = "add_before_concat"
    rules = (add_to_each_part,)
