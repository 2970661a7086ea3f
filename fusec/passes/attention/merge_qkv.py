"""Merge the projections of queries, keys and values from one tensor into one product.

Their weights are concatenated, and attention reads slices of the result by strides. Only projections that attention
alone reads are merged, because another reader would have to copy its slice. A decoder's cache also reads keys and
values: in a step that adds one token to one sequence, a slice is a part of one row, which needs no copy. For several
sequences, a kernel that streams weights stores each slice as a value of its own, on GPUs that have it.

A product of 8-bit numbers takes its scale along, and ends where it is cast to 16 bits. Products with packed weights
merge if they have equal blocks and types.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fusec.ir import HALVES, Array, DType, Graph, Literal, Node, TensorType, Value
from fusec.ops import Attention, Cast, MatMul, PackedMatMul, Reshape, Rotary, Scatter, Slice, Transpose, pw
from fusec.ops.matmul import STREAMED_ROWS, SUMMED_IN, can_stream
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import single_use, substitute

HEADS_FIRST = (0, 2, 1, 3)  # from [batch, rows, heads, features]
ALIGNED = 8  # columns: slices begin on 16 bytes, as attention kernels need
PRODUCTS = (MatMul, PackedMatMul)
CLUSTERS = 90  # compute capability of the first GPUs with a kernel that streams weights


@dataclass(frozen=True)
class Projection:
    """A product by a constant, perhaps a constant bias, and the value that then goes to attention.

    weights: the matrix; of a product with packed weights its codes, scales and zero points.
    scale: factor of the sums of a product of 8-bit numbers, in fp32, before the bias.
    """

    product: Node
    weights: tuple[Literal, ...]
    bias: Literal | None
    end: Value
    scale: Literal | None = None

    @property
    def columns(self) -> int:
        return self.product.result.type.shape[-1]

    @property
    def kind(self) -> Hashable:
        """Return what is equal for products that can be merged."""
        return self.product.operands[0], self.product.op, tuple(w.type.dtype for w in self.weights)


class MergeProjections(Pass):
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


def as_projection(product: Node) -> Projection | None:
    """Return a product by a constant of aligned columns, with its bias if it has one; None if it is not in 16 bits.

    A product of 8-bit numbers ends in 16 bits, after its scale and bias. A bias in 16 bits follows the cast to 16 bits.
    """
    x, *constants = product.operands
    weights = tuple(w.literal for w in constants if w.literal is not None and w.type.rank == 2)
    columns, end = product.result.type.shape[-1], product.result
    if len(weights) < len(constants) or x.literal is not None or x.type.dtype not in (*HALVES, *SUMMED_IN):
        return None
    if columns % ALIGNED or 0 in end.type.shape or not single_use(end):
        return None
    if x.type.dtype in HALVES:
        end, bias = _with_constant(end, "add")
        return Projection(product, weights, bias, end)
    end, scale = _with_constant(_cast(end, (DType.F32,)) or end, "mul")
    scaled = _cast(end, HALVES)
    end, bias = _with_constant(scaled or end, "add")
    narrow = end if scaled is not None else _cast(end, HALVES)
    return None if scale is None or narrow is None else Projection(product, weights, bias, narrow, scale)


def _cast(value: Value, to: Sequence[DType]) -> Value | None:
    """Return a value after its only reader, a cast to one of these types; None if that is another op."""
    node = value.users[0] if single_use(value) else None
    return node.result if node is not None and isinstance(node.op, Cast) and node.op.to in to else None


def _with_constant(value: Value, name: str) -> tuple[Value, Literal | None]:
    """Return a value after the op that alone reads it with a number for each column, and these; else the value."""
    node = value.users[0] if single_use(value) else None
    if node is None or node.op.name != name or node.result.type.shape != value.type.shape:
        return value, None
    other = node.operands[1] if node.operands[0] is value else node.operands[0]
    columns = value.type.shape[-1]
    is_vector = other.type.size == columns == other.type.shape[-1]
    if other.literal is None or not (is_vector or other.type.size == 1):
        return value, None
    return node.result, other.literal


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
    sizes = [b.columns for b in branches]
    weights = [_side_by_side(graph, first, parts) for parts in zip(*(b.weights for b in branches), strict=True)]
    origin = [o for b in branches for o in b.product.origin]
    total = graph.insert(first.op, [first.operands[0], *weights], before=first, origin=origin).result
    if any(b.scale is not None for b in branches):
        if total.type.dtype is not DType.F32:
            total = graph.add(Cast(DType.F32), total, before=first)
        scale = _common_scale(graph, first, branches)
        if scale is None:
            scale = _for_each_column(graph, first, [b.scale for b in branches], sizes)
        total = graph.add(pw("mul"), total, scale, before=first)
    if any(b.bias is not None for b in branches):
        bias = _for_each_column(graph, first, [b.bias for b in branches], sizes)
        if total.type.dtype is not bias.type.dtype:
            total = graph.add(Cast(bias.type.dtype), total, before=first)
        total = graph.add(pw("add"), total, bias, before=first)
    if total.type.dtype is not branches[0].end.type.dtype:
        total = graph.add(Cast(branches[0].end.type.dtype), total, before=first)
    return total


def _side_by_side(graph: Graph, product: Node, parts: Sequence[Literal]) -> Value:
    """Insert the weights of several products as one matrix. Packed weights have a row for each column of a result."""
    axis = 0 if isinstance(product.op, PackedMatMul) else 1
    shape = list(parts[0].type.shape)
    shape[axis] = sum(part.type.shape[axis] for part in parts)
    type = TensorType(tuple(shape), parts[0].type.dtype)
    return derive(graph, product, type, parts, partial(_concatenated, axis=axis), parts[0])


def _common_scale(graph: Graph, before: Node, branches: Sequence[Projection]) -> Value | None:
    """Insert the number by which all branches are scaled; return None if there is no such number.

    More engines take a number than one for each column.
    """
    scales = [b.scale.array.reshape(-1) for b in branches if b.scale is not None and b.scale.type.size == 1]
    if len(scales) < len(branches) or any(scale != scales[0] for scale in scales):
        return None
    return graph.constant(scales[0].reshape(()), "scale", before)


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


def _concatenated(*weights: Array, axis: int) -> Array:
    return np.concatenate(weights, axis=axis)


def _in_a_row(*constants: Array, sizes: tuple[int, ...]) -> Array:
    return np.concatenate([np.broadcast_to(c.reshape(-1), n) for c, n in zip(constants, sizes, strict=True)])
