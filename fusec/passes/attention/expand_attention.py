"""Expand attention into products and a softmax, for attention that no engine runs as one step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from fusec.ir import HALVES, DType, Graph, Node, Op, Value
from fusec.ops import (
    ATTENTION_OPS,
    Attention,
    AttentionBackward,
    AttentionTrain,
    Cast,
    Expand,
    MatMul,
    Reduce,
    Reshape,
    Softmax,
    Transpose,
    pw,
)
from fusec.passes.rewriting.rewriter import erase_unused
from fusec.system.dataclass import dataclass


def expand(graph: Graph, names: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """Expand the attention nodes whose results have these names.

    Returns for each name the values that replace it: scores, weights and result. The result keeps its name.
    """
    made: dict[str, tuple[str, ...]] = {}
    for node in list(graph.nodes):
        if not isinstance(node.op, ATTENTION_OPS) or node.results[0].name not in names:
            continue
        name, maker = node.results[0].name, _Maker(graph, node)
        if isinstance(node.op, AttentionBackward):
            values = results = maker.backward(node.op)
        else:
            values, sums = maker.forward(node.op)
            results = (values[-1], *sums)
        for old, new in zip(node.results, results, strict=True):
            old_name = old.name
            graph.replace(old, new)
            graph.rename(new, old_name)
        erase_unused(graph, node)
        made[name] = tuple(v.name for v in values)
    return made


@dataclass
class _Maker:
    """Inserts nodes before the node that they replace."""

    graph: Graph
    node: Node

    def make(self, op: Op, *operands: Value) -> Value:
        return self.graph.insert(op, operands, before=self.node, origin=self.node.origin).result

    def number(self, value: float, like: Value) -> Value:
        return self.graph.constant(np.asarray(value, like.type.dtype.numpy), before=self.node)

    def forward(self, op: Attention | AttentionTrain) -> tuple[tuple[Value, ...], list[Value]]:
        """Return scores, weights and result, and in training the sums of the softmax."""
        q, k, v, *bias = self.node.operands
        k, v = self.repeated(k, q), self.repeated(v, q)
        product, scores = self.scores(q, k, bias, op)
        trains = isinstance(op, AttentionTrain)
        sums = [self.make(Reduce("log_sum_exp", (3,)), self.wide(scores))] if trains else []
        weights = self.make(Softmax(-1), scores)
        if isinstance(op, Attention) and op.guarded:
            gone = self.make(pw("is_nan"), weights)
            weights = self.make(pw("where"), gone, self.number(0.0, weights), weights)
        return (product, weights, self.make(MatMul(), weights, v)), sums

    def backward(self, op: AttentionBackward) -> tuple[Value, ...]:
        dy, q, k, v, y, sums, *bias = self.node.operands
        shared, narrow = k, dy.type.dtype
        k, v = self.repeated(k, q), self.repeated(v, q)
        _, scores = self.scores(q, k, bias, op)
        make, swapped = self.make, Transpose((0, 1, 3, 2))
        weights = make(pw("exp"), make(pw("sub"), self.wide(scores), self.wide(sums)))
        along = make(Reduce("sum", (3,)), make(pw("mul"), self.wide(dy), self.wide(y)))
        slopes = make(pw("sub"), self.wide(make(MatMul(), dy, make(swapped, v))), along)
        slopes = make(pw("mul"), make(pw("mul"), weights, slopes), self.number(op.scale, weights))
        if weights.type.dtype is not narrow:
            weights, slopes = (make(Cast(narrow), x) for x in (weights, slopes))
        dq = make(MatMul(), slopes, k)
        dk, dv = make(MatMul(), make(swapped, slopes), q), make(MatMul(), make(swapped, weights), dy)
        return dq, self.summed(dk, shared), self.summed(dv, shared)

    def scores(
        self, q: Value, k: Value, bias: Sequence[Value], op: Attention | AttentionTrain | AttentionBackward
    ) -> tuple[Value, Value]:
        """Return the bare product, and the scores."""
        make, scale, hides = self.make, op.scale, isinstance(op, Attention) and op.hides
        product = make(MatMul(), q, make(Transpose((0, 1, 3, 2)), k))
        scores = product if scale == 1.0 else make(pw("mul"), product, self.number(scale, product))
        if op.causal:
            rows, columns = scores.type.shape[-2:]
            later = np.where(np.arange(columns)[None, :] > np.arange(rows)[:, None], -math.inf, 0.0)
            bias = [*bias, self.graph.constant(later.astype(q.type.dtype.numpy), before=self.node)]
        for mask in bias:
            added = make(pw("add"), scores, mask)
            hidden = make(pw("cmp_eq"), mask, self.number(-math.inf, mask)) if hides else None
            scores = added if hidden is None else make(pw("where"), hidden, mask, added)
        return product, scores

    def wide(self, x: Value) -> Value:
        return self.make(Cast(DType.F32), x) if x.type.dtype in HALVES else x

    def repeated(self, x: Value, q: Value) -> Value:
        """Repeat each head of keys or values for the heads of queries that share it."""
        batch, groups, rows, columns = x.type.shape
        heads = q.type.shape[1]
        if groups == heads:
            return x
        single = self.make(Reshape((batch, groups, 1, rows, columns)), x)
        each = self.make(Expand((batch, groups, heads // groups, rows, columns)), single)
        return self.make(Reshape((batch, heads, rows, columns)), each)

    def summed(self, x: Value, shared: Value) -> Value:
        """Sum the gradient of repeated heads."""
        batch, heads, rows, columns = x.type.shape
        groups = shared.type.shape[1]
        if groups == heads:
            return x
        return self.make(
            Reduce("sum", (2,), False), self.make(Reshape((batch, groups, heads // groups, rows, columns)), x)
        )
