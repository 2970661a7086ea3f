"""Merge the projections of queries, keys and values where a rotary embedding follows, and merge both rotary ops.

The rotary kernel reads its slice of the product by strides. Attention reads slices of the kernel's result, and values
from the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fusec.ir import Graph, Node, Value
from fusec.ops import Attention, MatMul, Reshape, Rotary, Slice, Transpose
from fusec.passes.attention.merge_qkv import Projection, as_projection, merged_product
from fusec.passes.base import Options
from fusec.passes.rewriting.affine_ops import single_use
from fusec.passes.rewriting.rewriter import substitute

HEADS_FIRST = (0, 2, 1, 3)


@dataclass(frozen=True)
class _Heads:
    """A linear layer whose columns are viewed as heads: [batch, heads, rows, features]."""

    branch: Projection
    value: Value


@dataclass(frozen=True)
class MergeRotaryProjections:
    """Merge products of one tensor that go to attention, two of them through a rotary embedding."""

    name: ClassVar[str] = "merge_turned"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if isinstance(node.op, Attention):
                _merge(graph, node)


def _merge(graph: Graph, attention: Node) -> None:
    q, k, v = attention.operands[:3]
    rotary = [value.node for value in (q, k)]
    if not all(node is not None and isinstance(node.op, Rotary) and single_use(node.result) for node in rotary):
        return
    first, second = (node for node in rotary if node is not None)
    heads = [_heads(value) for value in (first.operands[0], second.operands[0], v)]
    if first.operands[1:] != second.operands[1:] or not all(_for_any_head(angle) for angle in first.operands[1:]):
        return
    known = [each for each in heads if each is not None]
    if len(known) < 3 or len({_source(each) for each in known}) > 1:
        return
    (batch, _, rows, size), counts = known[0].value.type.shape, [each.value.type.shape[1] for each in known]
    branches = [each.branch for each in known]
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
    substitute(graph, known[2].value, heads_first(packed, of_q + of_k, of_v), fresh=True)


def _by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return [rows, 1, features] for angles [1, rows, features], or without the 1."""
    if len(shape) < 2:
        return shape
    return (*shape[:-3], shape[-2], 1, shape[-1])


def _heads(value: Value) -> _Heads | None:
    """Match transpose(reshape(linear layer)), where nothing else reads any of these; None if it does not match."""
    turn = value.node
    if turn is None or not isinstance(turn.op, Transpose) or turn.op.perm != HEADS_FIRST or not single_use(value):
        return None
    split = turn.operands[0].node
    if split is None or not isinstance(split.op, Reshape) or not single_use(split.result):
        return None
    end = split.operands[0]
    if end.node is None or not single_use(end) or end.type.rank != 3:
        return None
    product = end.node
    if product.op.name == "add":
        product = next((o.node for o in product.operands if o.node is not None and isinstance(o.node.op, MatMul)), None)
    branch = as_projection(product) if product is not None and isinstance(product.op, MatMul) else None
    return _Heads(branch, value) if branch is not None and branch.end is end else None


def _source(heads: _Heads) -> tuple[Value, int, int, int]:
    """Return the operand and dims that mergeable projections share: all but the number of heads."""
    batch, _, rows, size = heads.value.type.shape
    return heads.branch.product.operands[0], batch, rows, size


def _for_any_head(angle: Value) -> bool:
    return angle.type.rank < 3 or angle.type.shape[-3] == 1
