"""Merge the projections of queries, keys and values from one tensor into one product.

Their weights are concatenated, and attention reads slices of the result by strides. Only projections that attention
alone reads are merged, because another reader would have to copy its slice. A decoder's cache also reads keys and
values: in a step that adds one token to one sequence, a slice is a part of one row, which needs no copy. For several
sequences, a kernel that streams weights stores each slice as a value of its own, on GPUs that have it.

A product of 8-bit numbers takes its scale along, and its term of a zero point, which may be computed at run time. It
ends where it is cast to 16 bits. Products with packed weights merge if they have equal blocks and types.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np

from fusec.ir import Array, DType, Graph, Literal, Node, TensorType, Value
from fusec.ops import Attention, Cast, MatMul, PackedMatMul, Reshape, Rotary, Scatter, Slice, Transpose, pw
from fusec.ops.matmul import STREAMED_ROWS, can_stream
from fusec.passes.attention.projection import Columns, Projection, as_projection
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import single_use, substitute

HEADS_FIRST = (0, 2, 1, 3)  # from [batch, rows, heads, features]
PRODUCTS = (MatMul, PackedMatMul)
CLUSTERS = 90  # compute capability of the first GPUs with a kernel that streams weights


class MergeQkv(Pass):
    """Merge products of one tensor that go to attention."""

    name = "merge_qkv"

    def run(self, graph: Graph, options: Options) -> None:
        most_rows = STREAMED_ROWS if options.target.sm >= CLUSTERS else 1
        siblings: dict[tuple[Hashable, TensorType], list[Projection]] = {}
        for node in graph.nodes:
            if isinstance(node.op, PRODUCTS) and (branch := _branch(node, most_rows)) is not None:
                rows = TensorType(node.result.type.shape[:-1], branch.end.type.dtype)
                siblings.setdefault((branch.kind, rows), []).append(branch)
        for branches in siblings.values():
            if len(branches) > 1:
                _merge(graph, branches)


def _branch(product: Node, most_rows: int) -> Projection | None:
    found = as_projection(product)
    if found is None:
        return None
    most = most_rows if isinstance(product.op, MatMul) and can_stream(found.weights[0].type) else 1
    return found if feeds_only_attention(found.end) or _are_rows_of_step(found.end, most) else None


def feeds_only_attention(value: Value) -> bool:
    """Tell if a value is only viewed, once, as heads of an attention."""
    while single_use(value):
        ((user, place),) = value.uses
        if isinstance(user.op, Attention):
            return place < 3
        if not isinstance(user.op, (Reshape, Transpose)):
            return False
        value = user.result
    return False


def _are_rows_of_step(value: Value, most: int) -> bool:
    """Tell if at most `most` rows go to attention or to the cache of a decoder, perhaps through a rotary op."""
    return value.type.size <= most * value.type.shape[-1] and _feeds_step(value)


def _feeds_step(value: Value) -> bool:
    for user, place in value.uses:
        if isinstance(user.op, (Reshape, Transpose)) or (isinstance(user.op, Rotary) and place == 0):
            if not _feeds_step(user.result):
                return False
        elif not (isinstance(user.op, Attention) and place in (0, 1, 2)) and not (
            isinstance(user.op, Scatter) and place == 2
        ):
            return False
    return bool(value.uses)


def merged_product(graph: Graph, branches: Sequence[Projection]) -> Value:
    """Insert one product for projections of one operand; return their concatenated results."""
    first = branches[0].product
    if any(each is not None and each.number is not None for each in (branches[0].scale, branches[0].term)):
        ends = {b.end.node for b in branches}
        first = next(node for node in graph.nodes if node in ends)  # after the numbers, which each branch reads
    sizes = [b.columns for b in branches]
    weights = [
        _side_by_side(graph, branches[0].product, first, parts)
        for parts in zip(*(b.weights for b in branches), strict=True)
    ]
    origin = [o for b in branches for o in b.product.origin]
    product = branches[0].product
    total = graph.insert(product.op, [product.operands[0], *weights], before=first, origin=origin).result
    for name, columns in (("sub", [b.term for b in branches]), ("mul", [b.scale for b in branches])):
        given = [each for each in columns if each is not None]
        if not given:
            continue
        if total.type.dtype is not DType.F32:
            total = graph.add(Cast(DType.F32), total, before=first)
        row = _common_number(graph, first, columns)
        if row is None:
            row = _for_each_column(graph, first, [each and each.literal for each in columns], sizes)
        if given[0].number is not None:
            row = graph.add(pw("mul"), given[0].number, row, before=first)
        total = graph.add(pw(name), total, row, before=first)
    if any(b.bias is not None for b in branches):
        bias = _for_each_column(graph, first, [b.bias for b in branches], sizes)
        if total.type.dtype is not bias.type.dtype:
            total = graph.add(Cast(bias.type.dtype), total, before=first)
        total = graph.add(pw("add"), total, bias, before=first)
    if total.type.dtype is not branches[0].end.type.dtype:
        total = graph.add(Cast(branches[0].end.type.dtype), total, before=first)
    return total


def _side_by_side(graph: Graph, product: Node, before: Node, parts: Sequence[Literal]) -> Value:
    """Insert the weights of several products as one matrix. Packed weights have a row for each column of a result."""
    axis = 0 if isinstance(product.op, PackedMatMul) else 1
    shape = list(parts[0].type.shape)
    shape[axis] = sum(part.type.shape[axis] for part in parts)
    type = TensorType(tuple(shape), parts[0].type.dtype)
    return derive(graph, before, type, parts, partial(_concatenated, axis=axis), parts[0])


def _common_number(graph: Graph, before: Node, columns: Sequence[Columns | None]) -> Value | None:
    """Insert the number that all columns of all branches have; return None if there is no such number.

    More engines take a number than one for each column.
    """
    found = [each.literal.array.reshape(-1) for each in columns if each is not None and each.literal.type.size == 1]
    if len(found) < len(columns) or any(number != found[0] for number in found):
        return None
    return graph.constant(found[0].reshape(()), "scale", before)


def _for_each_column(graph: Graph, before: Node, constants: Sequence[Literal | None], sizes: Sequence[int]) -> Value:
    """Insert the numbers of all branches in a row, zeros for a branch without any."""
    named = next(c for c in constants if c is not None)
    dtype = named.type.dtype
    given = [c or Literal.of(np.zeros(n, dtype.numpy)) for c, n in zip(constants, sizes, strict=True)]
    type = TensorType((sum(sizes),), dtype)
    return derive(graph, before, type, given, partial(_in_a_row, sizes=tuple(sizes)), named)


def _merge(graph: Graph, branches: Sequence[Projection]) -> None:
    total = merged_product(graph, branches)
    sizes = [b.columns for b in branches]
    start, shape = 0, total.type.shape
    for branch, size in zip(branches, sizes, strict=True):
        part = Slice((*(0 for _ in shape[1:]), start), (*shape[:-1], size), (1,) * len(shape))
        node = branch.end.node
        assert node is not None
        substitute(graph, branch.end, graph.add(part, total, before=node), fresh=True)
        start += size


@recorded
def _concatenated(*weights: Array, axis: int) -> Array:
    return np.concatenate(weights, axis=axis)


@recorded
def _in_a_row(*constants: Array, sizes: tuple[int, ...]) -> Array:
    return np.concatenate([np.broadcast_to(c.reshape(-1), n) for c, n in zip(constants, sizes, strict=True)])
