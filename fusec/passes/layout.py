"""Choose the memory order of every value, so that cuDNN's fast forms are reached with the fewest copies.

Values tied by ops that keep positions (pointwise, pooling, concat, norms over channels…) form a region
that has one order: channels last if a convolution writes into it, else what makes a transposition free,
else row-major. Inputs and outputs of the graph keep row-major, the caller's order; a copy (`relayout`)
stands only where a region meets a tensor whose order is fixed. A convolution reads any order: cuDNN's
engines take images in NCHW beside results in NHWC.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fusec.ir import Constant, Graph, Node, TensorType, Value, channels_last
from fusec.ops import (
    AvgPool,
    BatchNorm,
    Cast,
    Concat,
    Conv,
    ConvTranspose,
    GroupNorm,
    InstanceNorm,
    LocalResponseNorm,
    MaxPool,
    Pad,
    Pointwise,
    Reduce,
    Relayout,
    Resize,
    Slice,
    Split,
    Transpose,
)
from fusec.passes.base import Options

_FIRST_OPERAND = (
    AvgPool,
    BatchNorm,
    Cast,
    GroupNorm,
    InstanceNorm,
    LocalResponseNorm,
    MaxPool,
    Pad,
    Resize,
    Slice,
    Split,
)
# what cuDNN runs over one iteration space: there the operands' order must be the result's
_LOWERED_AS_ONE = (Pointwise, Cast, InstanceNorm)


@dataclass(frozen=True)
class Layout:
    """See the module; it has no options."""

    name: ClassVar[str] = "layout"

    def run(self, graph: Graph, options: Options) -> None:
        regions = _Regions(graph)
        for value in _movable(graph):
            graph.set_type(value, value.type.with_order(settled(value.type, regions.order_of(value))))
        copies: dict[tuple[Value, tuple[int, ...]], Value] = {}
        for node in list(graph.nodes):
            if isinstance(node.op, (Conv, ConvTranspose)):
                _order_filters(graph, node)
            if not isinstance(node.op, _LOWERED_AS_ONE):
                continue  # kernels read any order
            for index in tied_operands(node):
                wanted, operand = node.results[0].type.order, node.operands[index]
                if settled(operand.type, operand.type.order) != settled(operand.type, wanted):
                    graph.set_input(node, index, _copy(graph, operand, wanted, node, copies))
        self._fix_outputs(graph)

    def _fix_outputs(self, graph: Graph) -> None:
        """Outputs are row-major; where memory already is, only the name of the order changes."""
        last = graph.return_node
        copies: dict[tuple[Value, tuple[int, ...]], Value] = {}
        for index, value in enumerate(graph.outputs):
            if settled(value.type, value.type.order):
                graph.set_input(last, index, _copy(graph, value, (), last, copies))


def settled(type: TensorType, order: tuple[int, ...]) -> tuple[int, ...]:
    """The order to write down: row-major wherever the dims that are not 1 lie so."""
    wide = [d for d in (order or range(type.rank)) if type.shape[d] != 1]
    return () if wide == sorted(wide) else order


def tied_operands(node: Node) -> Iterator[int]:
    """Indices of the operands that must lie in memory like the (first) result."""
    if isinstance(node.op, Pointwise):
        shape = node.result.type.shape
        yield from (i for i, v in enumerate(node.operands) if v.type.shape == shape)
    elif isinstance(node.op, Concat):
        yield from range(len(node.operands))
    elif isinstance(node.op, _FIRST_OPERAND) or (isinstance(node.op, Reduce) and node.op.keepdims):
        yield 0


def _movable(graph: Graph) -> Iterator[Value]:
    """Values whose order is free: results of nodes, constants left out (they are stored as first used)."""
    for node in graph.nodes:
        if not isinstance(node.op, (Constant, Relayout)):
            yield from node.results


class _Regions:
    """Union-find over the movable values, and the order each region takes."""

    def __init__(self, graph: Graph):
        self.parent: dict[Value, Value] = {v: v for v in _movable(graph)}
        self.orders: dict[Value, tuple[int, ...]] = {}
        for node in graph.nodes:
            tied = [node.operands[i] for i in tied_operands(node)]
            if not tied:
                continue
            for value in (*node.results, *tied):
                if value in self.parent and node.results[0] in self.parent:
                    self._join(value, node.results[0])
        for node in graph.nodes:
            if isinstance(node.op, (Conv, ConvTranspose)):
                self.orders.setdefault(self._find(node.result), channels_last(node.result.type.rank))
        for node in graph.nodes:  # after the convolutions: they come first
            if isinstance(node.op, Transpose):
                self.orders.setdefault(self._find(node.result), self._free_order(node, node.op))

    def _free_order(self, node: Node, op: Transpose) -> tuple[int, ...]:
        """The order in which a transposition moves nothing."""
        operand = node.operands[0]
        source = self.order_of(operand) if operand in self.parent else operand.type.order
        place = {dim: i for i, dim in enumerate(op.perm)}
        return tuple(place[dim] for dim in (settled(operand.type, source) or range(operand.type.rank)))

    def order_of(self, value: Value) -> tuple[int, ...]:
        return self.orders.get(self._find(value), ())

    def _find(self, value: Value) -> Value:
        root = value
        while self.parent[root] is not root:
            root = self.parent[root]
        while self.parent[value] is not root:
            self.parent[value], value = root, self.parent[value]
        return root

    def _join(self, a: Value, b: Value) -> None:
        self.parent[self._find(a)] = self._find(b)


def _order_filters(graph: Graph, node: Node) -> None:
    """Constant filters are stored channels last, like the images they meet."""
    filters = node.operands[1]
    if filters.literal is not None and len(filters.users) == len(filters.uses):
        graph.set_type(filters, filters.type.with_order(settled(filters.type, channels_last(filters.type.rank))))


def _copy(
    graph: Graph,
    value: Value,
    order: tuple[int, ...],
    before: Node,
    copies: dict[tuple[Value, tuple[int, ...]], Value],
) -> Value:
    """The value in another order: a constant is simply stored so, anything else copied, once per order."""
    if (value, order) not in copies:
        literal = value.literal
        op = Relayout(order) if literal is None else Constant(literal)
        operands = [value] if literal is None else []
        types = [value.type.with_order(order)]
        node = graph.insert(op, operands, before=before, names=(value.name,), types=types)
        copies[value, order] = node.result
    return copies[value, order]
