"""Merge the rotary embeddings of queries and keys that are neighbours in one row.

In a step of a decoder that adds one token to one sequence, queries and keys are parts of the result of one product
(`merge_qkv`). One kernel then computes both embeddings, and its parts are views.
"""

from __future__ import annotations

from fusec.ir import Graph, Node, Value
from fusec.ops import Reshape, Rotary, Slice
from fusec.passes.attention.merge_rotary_qkv import for_any_head
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import made_by, only_operand, substitute


class MergeRotaryParts(Pass):
    """Merge rotary embeddings with the same angles, of parts of one row that are next to each other."""

    name = "merge_rotary_parts"

    def run(self, graph: Graph, options: Options) -> None:
        ends: dict[tuple[Value, int, Value, Value], Node] = {}  # by the row, where a part ends, and the angles
        for node in list(graph.nodes):
            place = _place(node) if isinstance(node.op, Rotary) else None
            if place is None:
                continue
            (row, start, end), (cos, sin) = place, node.operands[1:]
            before = ends.pop((row, start, cos, sin), None)
            if before is not None and before.result.type.shape[3] == node.result.type.shape[3]:
                _merge(graph, before, node)
            else:
                ends[row, end, cos, sin] = node


def _place(node: Node) -> tuple[Value, int, int] | None:
    """Return the row that the heads [1, heads, 1, features] of a rotary op are a part of, and the part's columns."""
    x = node.operands[0]
    if len(node.operands) != 3 or x.type.rank != 4 or x.type.shape[0] != 1 or x.type.shape[2] != 1:
        return None
    if not all(map(for_any_head, node.operands[1:])):
        return None
    while made_by(x, Reshape):
        x = only_operand(x)
    part = made_by(x, Slice)
    if part is None or part.steps[-1] != 1:
        return None
    row = only_operand(x)
    if row.type.size != row.type.shape[-1]:
        return None
    return row, part.starts[-1], part.starts[-1] + part.sizes[-1]


def _merge(graph: Graph, first: Node, second: Node) -> None:
    place = _place(first)
    assert place is not None
    row, start, _ = place
    counts, features = [node.result.type.shape[1] for node in (first, second)], first.result.type.shape[3]
    width, rank = sum(counts) * features, row.type.rank
    part = Slice((*(0 for _ in range(rank - 1)), start), (*row.type.shape[:-1], width), (1,) * rank)
    heads = graph.add(Reshape((1, sum(counts), 1, features)), graph.add(part, row, before=first), before=first)
    origin = (*first.origin, *second.origin)
    both = graph.insert(first.op, [heads, *first.operands[1:]], before=first, origin=origin).result
    starts = (0, counts[0])
    parts = [
        graph.add(Slice((0, at, 0, 0), (1, count, 1, features), (1,) * 4), both, before=first)
        for at, count in zip(starts, counts, strict=True)
    ]
    for node, value in zip((first, second), parts, strict=True):
        substitute(graph, node.result, value, fresh=True)
