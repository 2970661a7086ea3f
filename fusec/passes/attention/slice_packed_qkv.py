"""Let attention read queries, keys and values directly from the projection that holds all three.

Models transpose the whole projection so that its three parts come one after the other, then slice it. Sliced first,
each part is transposed by strides alone. The pass runs late, because without attention the parts would be copied one
by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from fusec.ir import HALVES, Graph, Node, Value
from fusec.ops import Attention, Reshape, Slice, Transpose
from fusec.passes.attention.merge_qkv import feeds_only_attention
from fusec.passes.attention.projection import ALIGNED
from fusec.passes.base import Options, RulePass
from fusec.passes.cleanup.simplify import reshape_of_reshape, transpose_of_transpose
from fusec.passes.layout.compose_views import common_dims, one_transpose
from fusec.passes.rewriting.rewriter import NoMatch, local, single_use

Shape = tuple[int, ...]
Part = tuple[int, int]


@local("slice", equation="slice(reshape(transpose(reshape(x)))) = reshape(transpose(reshape(slice(x)))) for attention")
def _slice_first(graph: Graph, node: Node) -> Value | None:
    """Slice the columns of a packed projection before its views, so that attention reads them in place."""
    value, op = node.operands[0], cast(Slice, node.op)
    if value.type.dtype not in HALVES or any(step != 1 for step in op.steps) or 0 in (*op.sizes, *value.type.shape):
        raise NoMatch("not 16 bits wide, empty, or not contiguous", value)
    if not all(isinstance(user.op, Slice) and feeds_only_attention(user.result) for user in value.users):
        raise NoMatch("does not go to attention in slices alone", value)
    starts, sizes = op.starts, op.sizes
    views: list[tuple[Node, Shape]] = []  # the views moved past, and their new shapes
    while (view := _view(value)) is not None and (not views or single_use(value)):
        views.append((view, sizes))
        (source,) = view.operands
        if isinstance(view.op, Transpose):
            perm = view.op.perm
            places = sorted(range(len(perm)), key=perm.__getitem__)
            starts, sizes = tuple(starts[i] for i in places), tuple(sizes[i] for i in places)
        else:
            starts, sizes = _before_reshape(source.type.shape, value.type.shape, starts, sizes)
        value = source
    if not any(isinstance(view.op, Transpose) for view, _ in views) or value.literal is not None or not starts:
        raise NoMatch("not transposed", value)
    aligned = not any(n % ALIGNED for n in (starts[-1], sizes[-1], value.type.shape[-1]))
    if not aligned or sizes[:-1] != value.type.shape[:-1]:
        raise NoMatch("no contiguous columns, aligned as attention needs them", value)
    _require_view(value, sizes, views[::-1], node.result)
    part = graph.add(Slice(starts, sizes, (1,) * len(starts)), value, before=node)
    for view, shape in reversed(views):
        part = graph.add(Reshape(shape) if isinstance(view.op, Reshape) else view.op, part, before=node)
    return part


def _view(value: Value) -> Node | None:
    return value.node if value.node is not None and isinstance(value.node.op, (Reshape, Transpose)) else None


def _require_view(source: Value, sizes: Shape, views: Sequence[tuple[Node, Shape]], end: Value) -> None:
    """Check that a slice of the source is read by strides through the views and what follows them.

    Raises NoMatch if a dim of the result has no stride.
    """
    while single_use(end) and not isinstance(end.users[0].op, Attention):
        (user,) = end.users
        end = user.result
        views = (*views, (user, end.type.shape))
    parts = [((size, stride),) for size, stride in zip(sizes, source.type.strides, strict=True)]
    for view, wanted in views:
        if isinstance(view.op, Transpose):
            parts = [parts[p] for p in view.op.perm]
        else:
            parts = _regrouped([part for dim in parts for part in dim if part[0] != 1], wanted)
    for dim in parts:
        if any(outer != size * inner for (_, outer), (size, inner) in pairwise(dim)):
            raise NoMatch("a dim of what attention reads has no stride", end)
    if parts[-1] and parts[-1][-1][1] != 1:
        raise NoMatch("its features are not contiguous", end)


def _regrouped(parts: Sequence[Part], shape: Shape) -> list[tuple[Part, ...]]:
    """Return the dims of a shape as parts (size, stride), split where necessary."""
    inner, outer = common_dims(tuple(size for size, _ in parts), shape)
    split: list[Part] = []
    for (_, stride), sizes in zip(parts, inner, strict=True):
        split += [(size, stride * math.prod(sizes[i + 1 :])) for i, size in enumerate(sizes)]
    each = iter(split)
    return [tuple(next(each) for _ in sizes) for sizes in outer]


def _before_reshape(source: Shape, shape: Shape, starts: Shape, sizes: Shape) -> tuple[Shape, Shape]:
    """Return the slice of the reshape's operand that holds a slice of its result.

    Raises NoMatch if that is no block of the operand.
    """
    inner, outer = common_dims(source, shape)
    names = iter(range(sum(map(len, outer))))
    ranges: dict[int, tuple[int, int]] = {}  # parts of which only a range is taken
    for parts, size, start, taken in zip(outer, shape, starts, sizes, strict=True):
        own = [(next(names), part) for part in parts]
        if taken == size:
            continue
        within = size // own[0][1]
        if start % within or taken % within:
            raise NoMatch("sliced inside of a dim that is split")
        ranges[own[0][0]] = (start // within, taken // within)
    names = iter(range(sum(map(len, inner))))
    first, many = list[int](), list[int]()
    for parts, size in zip(inner, source, strict=True):
        own = [(next(names), part) for part in parts]
        if any(name in ranges for name, _ in own[1:]):
            raise NoMatch("sliced in the middle of a dim")
        if own and own[0][0] in ranges:
            within = math.prod(part for _, part in own[1:])
            start, taken = ranges[own[0][0]]
            first.append(start * within)
            many.append(taken * within)
        else:
            first.append(0)
            many.append(size)
    return tuple(first), tuple(many)


class SlicePackedQkv(RulePass):
    """Slice packed projections before the views of attention's operands."""

    name = "slice_packed_qkv"
    rules = (_slice_first, reshape_of_reshape, transpose_of_transpose, one_transpose)

    def run(self, graph: Graph, options: Options) -> None:
        if any(isinstance(node.op, Attention) for node in graph.nodes):
            super().run(graph, options)
