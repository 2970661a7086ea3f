"""Merge the projections of queries, keys and values where a rotary embedding follows, and merge both rotary ops.

The rotary kernel reads its slice of the product by strides. Attention reads slices of the kernel's result, and values
from the product.
"""

from __future__ import annotations

from typing import cast

from fusec.ir import Graph, Node, Value
from fusec.ops import Attention, Reshape, Rotary, Slice, Transpose
from fusec.passes.attention.merge_qkv import HEADS_FIRST, PRODUCTS, merged_product
from fusec.passes.attention.projection import Projection, as_projection
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import made_by, only_operand, single_use, substitute


class MergeRotaryQkv(Pass):
    """Merge products of one tensor that go to attention, two of them through a rotary embedding."""

    name = "merge_rotary_qkv"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if isinstance(node.op, Attention):
                _merge(graph, node)


def _merge(graph: Graph, attention: Node) -> None:
    q, k, v = attention.operands[:3]
    if not all(made_by(x, Rotary) and single_use(x) for x in (q, k)):
        return
    first, second = cast(Node, q.node), cast(Node, k.node)
    if first.operands[1:] != second.operands[1:] or not all(map(for_any_head, first.operands[1:])):
        return
    heads = (first.operands[0], second.operands[0], v)
    branches = [branch for value in heads if (branch := _projection_of(value)) is not None]
    kinds = {branch.kind for branch in branches}
    if len(branches) < 3 or len(kinds) > 1 or len({(x.type.shape[0], x.type.shape[2:]) for x in heads}) > 1:
        return
    (batch, _, rows, size), counts = q.type.shape, [value.type.shape[1] for value in heads]
    if branches[0].product.result.type.shape != (batch, rows, counts[0] * size):
        return
    total = merged_product(graph, branches)
    packed = graph.add(Reshape((batch, rows, sum(counts), size)), total, before=attention)
    angles = [graph.add(Reshape(_by_row(angle.type.shape)), angle, before=attention) for angle in first.operands[1:]]

    def part(value: Value, start: int, count: int) -> Value:
        heads = Slice((0, 0, start, 0), (batch, rows, count, size), (1,) * 4)
        return graph.add(heads, value, before=attention)

    def heads_first(value: Value, start: int, count: int) -> Value:
        return graph.add(Transpose(HEADS_FIRST), part(value, start, count), before=attention)

    of_q, of_k, of_v = counts
    origin = (*first.origin, *second.origin)
    both = graph.insert(Rotary(), [part(packed, 0, of_q + of_k), *angles], before=attention, origin=origin).result
    substitute(graph, first.result, heads_first(both, 0, of_q), fresh=True)
    substitute(graph, second.result, heads_first(both, of_q, of_k), fresh=True)
    substitute(graph, v, heads_first(packed, of_q + of_k, of_v), fresh=True)


def _by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return [rows, 1, features] for angles [1, rows, features], or without the 1."""
    if len(shape) < 2:
        return shape
    return (*shape[:-3], shape[-2], 1, shape[-1])


def _projection_of(heads: Value) -> Projection | None:
    """Return the linear layer whose columns are viewed as heads [batch, heads, rows, features]; None without one.

    Nothing else may read the layer or the views between.
    """
    transpose = made_by(heads, Transpose)
    if transpose is None or transpose.perm != HEADS_FIRST or not single_use(heads):
        return None
    split = only_operand(heads)
    if not made_by(split, Reshape) or not single_use(split):
        return None
    end = only_operand(split)
    if end.node is None or not single_use(end) or end.type.rank != 3:
        return None
    product = next((v.node for v in (end, *end.node.operands) if made_by(v, *PRODUCTS)), None)
    branch = as_projection(product) if product is not None else None
    return branch if branch is not None and branch.end is end else None


def for_any_head(angle: Value) -> bool:
    """Tell if an angle is the same for all heads."""
    return angle.type.rank < 3 or angle.type.shape[-3] == 1
