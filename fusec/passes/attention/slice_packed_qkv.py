"""Let attention read queries, keys and values where one projection wrote them side by side.

Models turn the whole projection so that its three parts lie one behind the other, then take each. Cut out
first, each part is turned by strides alone. Last, since without attention the parts would be copied one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, cast

from fusec.ir import Graph, Node, Value
from fusec.ops import Attention, Reshape, Slice, Transpose
from fusec.passes.attention.merge_qkv import ALIGNED, HALVES, goes_to_attention
from fusec.passes.base import Options
from fusec.passes.cleanup.simplify import reshape_of_reshape, transpose_of_transpose
from fusec.passes.layout.compose_views import common_dims, one_transpose
from fusec.passes.rewriting.affine_ops import single_use
from fusec.passes.rewriting.rewriter import NoMatch, Rewriter, local, rewrite

Shape = tuple[int, ...]
Part = tuple[int, int]


@local("slice", equation="slice(reshape(transpose(reshape(x)))) = reshape(transpose(reshape(slice(x)))) for attention")
def _slice_first(graph: Graph, node: Node) -> Value | None:
    value, op = node.operands[0], cast(Slice, node.op)
    if value.type.dtype not in HALVES or any(step != 1 for step in op.steps) or 0 in (*op.sizes, *value.type.shape):
        raise NoMatch("not 16 bits wide, empty, or not side by side", value)
    if not all(isinstance(user.op, Slice) and goes_to_attention(user.result) for user in value.users):
        raise NoMatch("does not go to attention in slices alone", value)
    starts, sizes = op.starts, op.sizes
    chain: list[tuple[Node, Shape]] = []  # the views passed, and what they are to give
    while (view := _view(value)) is not None and (not chain or single_use(value)):
        chain.append((view, sizes))
        (source,) = view.operands
        if isinstance(view.op, Transpose):
            perm = view.op.perm
            places = sorted(range(len(perm)), key=perm.__getitem__)
            starts, sizes = tuple(starts[i] for i in places), tuple(sizes[i] for i in places)
        else:
            starts, sizes = _before_reshape(source.type.shape, value.type.shape, starts, sizes)
        value = source
    if not any(isinstance(view.op, Transpose) for view, _ in chain) or value.literal is not None or not starts:
        raise NoMatch("not transposed", value)
    aligned = not any(n % ALIGNED for n in (starts[-1], sizes[-1], value.type.shape[-1]))
    if not aligned or sizes[:-1] != value.type.shape[:-1]:
        raise NoMatch("no columns side by side, aligned as attention wants them", value)
    _require_view(value, sizes, chain[::-1], node.result)
    part = graph.add(Slice(starts, sizes, (1,) * len(starts)), value, before=node)
    for view, shape in reversed(chain):
        part = graph.add(Reshape(shape) if isinstance(view.op, Reshape) else view.op, part, before=node)
    return part


def _view(value: Value) -> Node | None:
    return value.node if value.node is not None and isinstance(value.node.op, (Reshape, Transpose)) else None


def _require_view(source: Value, sizes: Shape, chain: Sequence[tuple[Node, Shape]], end: Value) -> None:
    """NoMatch unless a slice of the source, taken through the chain and what follows it, is read by strides."""
    while single_use(end) and not isinstance(end.users[0].op, Attention):
        (user,) = end.users
        end = user.result
        chain = (*chain, (user, end.type.shape))
    parts = [((size, stride),) for size, stride in zip(sizes, source.type.strides, strict=True)]
    for view, wanted in chain:
        if isinstance(view.op, Transpose):
            parts = [parts[p] for p in view.op.perm]
        else:
            parts = _regrouped([part for dim in parts for part in dim if part[0] != 1], wanted)
    for dim in parts:
        if any(outer != size * inner for (_, outer), (size, inner) in pairwise(dim)):
            raise NoMatch("a dim of what attention reads has no stride", end)
    if parts[-1] and parts[-1][-1][1] != 1:
        raise NoMatch("its features do not lie side by side", end)


def _regrouped(parts: Sequence[Part], shape: Shape) -> list[tuple[Part, ...]]:
    """The dims of a shape as parts (size, stride), split where need be."""
    inner, outer = common_dims(tuple(size for size, _ in parts), shape)
    split: list[Part] = []
    for (_, stride), sizes in zip(parts, inner, strict=True):
        split += [(size, stride * math.prod(sizes[i + 1 :])) for i, size in enumerate(sizes)]
    each = iter(split)
    return [tuple(next(each) for _ in sizes) for sizes in outer]


def _before_reshape(source: Shape, shape: Shape, starts: Shape, sizes: Shape) -> tuple[Shape, Shape]:
    """The slice of the reshape's operand that holds a slice of its result; NoMatch if it is no block of it."""
    inner, outer = common_dims(source, shape)
    names = iter(range(sum(map(len, outer))))
    cut: dict[int, tuple[int, int]] = {}  # parts of which only some are taken
    for parts, size, start, taken in zip(outer, shape, starts, sizes, strict=True):
        own = [(next(names), part) for part in parts]
        if taken == size:
            continue
        within = size // own[0][1]
        if start % within or taken % within:
            raise NoMatch("cut inside of a dim that is split")
        cut[own[0][0]] = (start // within, taken // within)
    names = iter(range(sum(map(len, inner))))
    first, many = list[int](), list[int]()
    for parts, size in zip(inner, source, strict=True):
        own = [(next(names), part) for part in parts]
        if any(name in cut for name, _ in own[1:]):
            raise NoMatch("cut in the middle of a dim")
        if own and own[0][0] in cut:
            within = math.prod(part for _, part in own[1:])
            start, taken = cut[own[0][0]]
            first.append(start * within)
            many.append(taken * within)
        else:
            first.append(0)
            many.append(size)
    return tuple(first), tuple(many)


RULES: tuple[Rewriter, ...] = (_slice_first, reshape_of_reshape, transpose_of_transpose, one_transpose)


@dataclass(frozen=True)
class ReadPacked:
    """Slices for attention in front of the views they were taken behind."""

    name: ClassVar[str] = "read_packed"
    rules: ClassVar[tuple[Rewriter, ...]] = RULES

    def run(self, graph: Graph, options: Options) -> None:
        if any(isinstance(node.op, Attention) for node in graph.nodes):
            rewrite(graph, RULES, options.disable)
