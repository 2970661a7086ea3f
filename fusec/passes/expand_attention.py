"""Attention as products and a softmax again, for the places where no engine takes it as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import numpy as np

from fusec.ir import Graph, Node, Op, Value
from fusec.ops import Attention, Expand, MatMul, Reshape, Softmax, Transpose, pw
from fusec.passes.rewrite import substitute


def expand(graph: Graph, names: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """Write out the attention nodes whose results have these names; for each, the values that stand for it now:
    scores, weights and result, the last under the name it had."""
    made: dict[str, tuple[str, ...]] = {}
    for node in list(graph.nodes):
        if isinstance(node.op, Attention) and node.result.name in names:
            name = node.result.name
            values = _written_out(graph, node, node.op)
            substitute(graph, node.result, values[-1], fresh=True)
            made[name] = tuple(v.name for v in values)
    return made


def _written_out(graph: Graph, node: Node, op: Attention) -> tuple[Value, ...]:
    def make(op: Op, *operands: Value) -> Value:
        return graph.insert(op, operands, before=node, origin=node.origin).result

    def number(value: float) -> Value:
        return graph.constant(np.asarray(value, dtype.numpy), before=node)

    q, k, v, *bias = node.operands
    dtype = q.type.dtype
    (_, heads, rows, _), (batch, groups, columns, _) = q.type.shape, k.type.shape
    if groups != heads:
        k, v = (_repeated(make, x, batch, groups, heads // groups) for x in (k, v))
    product = make(MatMul(), q, make(Transpose((0, 1, 3, 2)), k))
    scores = product if op.scale == 1.0 else make(pw("mul"), product, number(op.scale))
    if op.causal:
        later = np.arange(columns)[None, :] > np.arange(rows)[:, None]
        bias.append(graph.constant(np.where(later, -math.inf, 0.0).astype(dtype.numpy), before=node))
    for mask in bias:
        added = make(pw("add"), scores, mask)
        scores = make(pw("where"), make(pw("cmp_eq"), mask, number(-math.inf)), mask, added) if op.hides else added
    weights = make(Softmax(-1), scores)
    if op.guarded:
        weights = make(pw("where"), make(pw("is_nan"), weights), number(0.0), weights)
    return product, weights, make(MatMul(), weights, v)


def _repeated(make: Callable[..., Value], x: Value, batch: int, groups: int, times: int) -> Value:
    """Each head of keys or values as often as heads of queries share it."""
    *_, rows, columns = x.type.shape
    single = make(Reshape((batch, groups, 1, rows, columns)), x)
    return make(
        Reshape((batch, groups * times, rows, columns)), make(Expand((batch, groups, times, rows, columns)), single)
    )
