"""Merge the projections of queries, keys and values from one tensor into one product.

Their weights are concatenated, and attention reads slices of the result by strides. Only projections that attention
alone reads are merged, because another reader would have to copy its slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fusec.ir import HALVES, Array, Graph, Literal, Node, TensorType, Value
from fusec.ops import Attention, MatMul, Reshape, Slice, Transpose, pw
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import single_use, substitute

HEADS_FIRST = (0, 2, 1, 3)  # from [batch, rows, heads, features]
ALIGNED = 8  # columns: slices begin on 16 bytes, as attention kernels need


@dataclass(frozen=True)
class Projection:
    """A product by a constant, perhaps a constant bias, and the value that then goes to attention."""

    product: Node
    weight: Literal
    bias: Literal | None
    end: Value


class MergeProjections(Pass):
    """Merge products of one tensor that go to attention."""

    name = "merge_qkv"

    def run(self, graph: Graph, options: Options) -> None:
        siblings: dict[tuple[Value, TensorType], list[Projection]] = {}
        for node in graph.nodes:
            if isinstance(node.op, MatMul) and (branch := _branch(node)) is not None:
                rows = TensorType(node.result.type.shape[:-1], node.result.type.dtype)
                siblings.setdefault((node.operands[0], rows), []).append(branch)
        for branches in siblings.values():
            if len(branches) > 1:
                _merge(graph, branches)


def _branch(product: Node) -> Projection | None:
    found = as_projection(product)
    return found if found is not None and feeds_only_attention(found.end) else None


def as_projection(product: Node) -> Projection | None:
    """Return a 16-bit product by a constant of aligned columns, with its bias if it has one; else None."""
    x, w = product.operands
    columns = product.result.type.shape[-1]
    if w.literal is None or w.type.rank != 2 or x.literal is not None or x.type.dtype not in HALVES:
        return None
    if columns % ALIGNED or 0 in product.result.type.shape or not single_use(product.result):
        return None
    end, bias = product.result, None
    (user,) = end.users
    if user.op.name == "add":
        b = user.operands[1] if user.operands[0] is end else user.operands[0]
        vector = b.literal is not None and b.type.size == columns == b.type.shape[-1]
        if not vector or user.result.type.shape != end.type.shape:
            return None
        end, bias = user.result, b.literal
    return Projection(product, w.literal, bias, end)


def feeds_only_attention(value: Value) -> bool:
    """Return True if a value is only viewed, once, as heads of an attention."""
    while single_use(value):
        ((user, place),) = value.uses
        if isinstance(user.op, Attention):
            return place < 3
        if not isinstance(user.op, (Reshape, Transpose)):
            return False
        value = user.result
    return False


def merged_product(graph: Graph, branches: Sequence[Projection]) -> Value:
    """Insert one product for projections of one operand; return their concatenated results."""
    first = branches[0].product
    x, dtype = first.operands[0], first.result.type.dtype
    sizes = [b.weight.type.shape[1] for b in branches]
    wide = TensorType((branches[0].weight.type.shape[0], sum(sizes)), dtype)
    weights = derive(graph, first, wide, [b.weight for b in branches], _in_columns, branches[0].weight)
    origin = [o for b in branches for o in b.product.origin]
    total = graph.insert(MatMul(), [x, weights], before=first, origin=origin).result
    if any(b.bias is not None for b in branches):
        biases = [b.bias or Literal.of(np.zeros(n, dtype.numpy)) for b, n in zip(branches, sizes, strict=True)]
        bias = derive(graph, first, TensorType((sum(sizes),), dtype), biases, _in_a_row, biases[0])
        total = graph.add(pw("add"), total, bias, before=first)
    return total


def _merge(graph: Graph, branches: Sequence[Projection]) -> None:
    total = merged_product(graph, branches)
    sizes = [b.weight.type.shape[1] for b in branches]
    start, shape = 0, total.type.shape
    for branch, size in zip(branches, sizes, strict=True):
        part = Slice((*(0 for _ in shape[1:]), start), (*shape[:-1], size), (1,) * len(shape))
        node = branch.end.node
        assert node is not None
        substitute(graph, branch.end, graph.add(part, total, before=node), fresh=True)
        start += size


def _in_columns(*weights: Array) -> Array:
    return np.concatenate(weights, axis=1)


def _in_a_row(*biases: Array) -> Array:
    return np.concatenate([b.reshape(-1) for b in biases])
