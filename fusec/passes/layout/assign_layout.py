"""Choose the memory order of every value, so that fast cuDNN engines are reached with the fewest copies.

Ops that keep positions (pointwise, pooling, concat, norms over channels…) tie values to a region with one order. A
region is channels last if a convolution writes into it, and row-major if a matmul or row norm does. Else it takes the
order that copies the fewest bytes; reshapes and transposes that are views of memory are free.

Inputs and outputs of the graph have the orders that the caller chose (`io_layout`), except filters that stay on the
device between calls. A copy (`relayout`) is made only where tensors of different orders meet in one cuDNN graph. A
convolution reads any order, because cuDNN's engines take images in NCHW with results in NHWC.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fusec.ir import Constant, Graph, Node, Return, TensorType, Value, channels_last
from fusec.ops import (
    ATTENTION_OPS,
    CONVOLUTIONS,
    AttentionBackward,
    AvgPool,
    BatchNorm,
    BatchNormBackward,
    BatchNormBySums,
    BatchNormTrain,
    Cast,
    Concat,
    Conv,
    ConvTranspose,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LayerNormBackward,
    LocalResponseNorm,
    MatMul,
    MaxPool,
    MaxPoolBackward,
    Pad,
    Pointwise,
    Reduce,
    Relayout,
    Reshape,
    Resize,
    RmsNorm,
    Rotary,
    Slice,
    Softmax,
    Split,
    Transpose,
)
from fusec.passes.base import Options
from fusec.passes.layout.io_layout import Order, normal_order, returned, set_input_orders
from fusec.schedule.aliasing import operand_order, result_order, same_storage, would_view

_FIRST_OPERAND = (
    AvgPool,
    BatchNorm,
    BatchNormBySums,
    BatchNormTrain,
    Cast,
    GroupNorm,
    InstanceNorm,
    LocalResponseNorm,
    MaxPool,
    Pad,
    Resize,
    Rotary,
    Slice,
    Split,
)
_FIRST_TWO = (BatchNormBackward, MaxPoolBackward)
# ops that cuDNN runs over one iteration space, where operands need the result's order
_LOWERED_AS_ONE = (Pointwise, Cast, InstanceNorm)
# kernels write any order, but are fastest in the operand's
_KERNELS = (
    *(AvgPool, Concat, GroupNorm, LocalResponseNorm, MaxPool, Pad, Resize, Rotary),
    *(BatchNormTrain, BatchNormBySums, BatchNormBackward, MaxPoolBackward),
)
_ROW_MAJOR = (MatMul, LayerNorm, RmsNorm, LayerNormBackward)  # cuDNN and the kernel write rows
_READS_ROWS = (MatMul, LayerNorm, RmsNorm, LayerNormBackward, Softmax)
_FREE_VIEWS = (Reshape, Transpose)  # free if the orders of operand and result fit
_CANDIDATES = 4  # orders compared per region, so that the pass stays linear


@dataclass(frozen=True)
class AssignLayout:
    """Choose memory orders; the pass has no options."""

    name: ClassVar[str] = "layout"

    def run(self, graph: Graph, options: Options) -> None:
        shapes = _filter_shapes(graph)
        filters = {v.name: v for v in graph.inputs if v.name in dict(options.state) and v.type.shape in shapes}
        for value in filters.values():  # filters, and their optimiser state
            graph.set_type(value, value.type.with_order(normal_order(value.type, channels_last(value.type.rank))))
        set_input_orders(graph, options)
        wanted_of = returned(graph, options)
        regions = _Regions(graph, wanted_of)
        regions.decide()
        if _copy_inputs_first(graph, regions):
            regions = _Regions(graph, wanted_of)
            regions.decide()
        for value in _movable(graph):
            graph.set_type(value, regions.type_of(value) or value.type)
        copies: dict[tuple[Value, Order], Value] = {}
        for node in list(graph.nodes):
            if isinstance(node.op, CONVOLUTIONS):
                _order_filters(graph, node, copies)
            if not isinstance(node.op, _LOWERED_AS_ONE):
                continue  # kernels read any order
            tied = set(tied_operands(node))
            for index, operand in enumerate(node.operands):
                if index not in tied and (operand.literal is None or not isinstance(node.op, Pointwise)):
                    continue  # a broadcast operand is read in any order
                wanted = _broadcast(node.results[0].type.order, operand.type)
                if not same_storage(operand.type.shape, operand.type.order, wanted):
                    graph.set_input(node, index, _copy(graph, operand, wanted, node, copies))
        last = graph.return_node
        for index, (value, wanted) in enumerate(zip(graph.outputs, wanted_of, strict=True)):
            if normal_order(value.type, value.type.order) != wanted:
                graph.set_input(last, index, _copy(graph, value, wanted, last, copies))


def _copy_inputs_first(graph: Graph, regions: _Regions) -> bool:
    """Make kernels read the copy of an input that a cuDNN graph needs; return True if there is such an input.

    Those kernels then write the order that a convolution after them wants.
    """
    found = False
    for value in graph.inputs:
        orders = {
            result.order
            for user, index in value.uses
            if isinstance(user.op, _LOWERED_AS_ONE) and index in tied_operands(user)
            if (result := regions.type_of(user.results[0])) is not None and result.order
        }
        kernels = [(user, index) for user, index in value.uses if isinstance(user.op, _KERNELS) and index == 0]
        if len(orders) != 1 or not kernels:
            continue
        (order,) = orders
        if same_storage(value.type.shape, value.type.order, order):
            continue
        users = set(value.users)
        first = next(node for node in graph.nodes if node in users)
        copy = _copy(graph, value, order, first, {})
        for user, index in list(value.uses):
            tied = isinstance(user.op, _LOWERED_AS_ONE) and index in tied_operands(user)
            if user is not copy.node and ((user, index) in kernels or tied):
                graph.set_input(user, index, copy)
        found = True
    return found


def _filter_shapes(graph: Graph) -> set[tuple[int, ...]]:
    """Collect the shapes of filters, and of tensors that are cast or padded to filters.

    Optimiser state of a parameter has the parameter's shape.
    """
    shapes: set[tuple[int, ...]] = set()
    for node in graph.nodes:
        if isinstance(node.op, (Conv, ConvTranspose)) and node.result.type.rank >= 4:
            value = node.operands[1]
            shapes.add(value.type.shape)
            while value.node is not None and isinstance(value.node.op, (Cast, Pad)):
                value = value.node.operands[0]
                shapes.add(value.type.shape)
    return shapes


def _broadcast(order: Order, type: TensorType) -> Order:
    """Return a result's memory order for an operand that is broadcast to it."""
    lead = len(order) - type.rank
    return normal_order(type, tuple(d - lead for d in order if d >= lead)) if order else ()


def tied_operands(node: Node) -> Iterator[int]:
    """Yield indices of operands that must have the memory order of the (first) result."""
    if isinstance(node.op, Pointwise):
        shape = node.result.type.shape
        yield from (i for i, v in enumerate(node.operands) if v.type.shape == shape)
    elif isinstance(node.op, Concat):
        yield from range(len(node.operands))
    elif isinstance(node.op, _FIRST_OPERAND) or (isinstance(node.op, Reduce) and node.op.keepdims):
        yield 0
    elif isinstance(node.op, _FIRST_TWO):
        yield from range(2)


def _tied(node: Node) -> list[Value]:
    """List the tied operands. `node.operands` is a new tuple each time, and a concat may have thousands."""
    operands = node.operands
    return [operands[i] for i in tied_operands(node)]


def _movable(graph: Graph) -> Iterator[Value]:
    """Yield values whose order is free: results of rank 2 and up, except constants and copies."""
    for node in graph.nodes:
        if not isinstance(node.op, (Constant, Relayout)):
            yield from (v for v in node.results if v.type.rank > 1)


def _may_change_order(node: Node) -> bool:
    """Return True if a kernel's result may have another order than its operands.

    It may if no cuDNN graph reads the result, and readers might have to copy it.
    """
    return isinstance(node.op, _KERNELS) and all(
        isinstance(user.op, (Return, *_FREE_VIEWS, *_READS_ROWS)) for user in node.results[0].users
    )


class _Regions:
    """Union-find over the movable values, and the order of each region."""

    def __init__(self, graph: Graph, returned: Sequence[Order]):
        self.returned = returned
        self.parent: dict[Value, Value] = {v: v for v in _movable(graph)}
        self.orders: dict[Value, Order] = {}
        for node in graph.nodes:
            if isinstance(node.op, CONVOLUTIONS):
                self.orders[node.result] = channels_last(node.result.type.rank)
            elif isinstance(node.op, _ROW_MAJOR):
                self.orders[node.results[0]] = ()
            elif isinstance(node.op, ATTENTION_OPS):
                self.orders.update({value: _order_for_transpose(value) for value in node.results})
        for node in graph.nodes:
            tied = _tied(node)
            if not tied or node.results[0] not in self.parent or _may_change_order(node):
                continue
            # a convolution's result first, so that a matmul's result that meets it is the one copied
            known = [v for v in tied if self.type_of(v) is not None]
            for value in (*node.results[1:], *sorted(known, key=lambda v: not self.order_of(v)), *tied):
                if value in self.parent:
                    self._join(value, node.results[0])

    def decide(self) -> None:
        """Give each undecided region its cheapest order, in graph order, so that readers know their sources."""
        members: dict[Value, list[Value]] = {}
        for value in self.parent:
            members.setdefault(self._find(value), []).append(value)
        for root, values in members.items():
            if root not in self.orders:
                self.orders[root] = self._cheapest(root, values)

    def order_of(self, value: Value) -> Order:
        """Return the order of the value's region; row-major while it is undecided."""
        return self.orders.get(self._find(value), ()) if value in self.parent else value.type.order

    def type_of(self, value: Value) -> TensorType | None:
        """Return the value's type in its region's order; None while that is undecided."""
        if value not in self.parent:
            return value.type
        order = self.orders.get(self._find(value))
        return None if order is None else value.type.with_order(normal_order(value.type, order))

    def _cheapest(self, root: Value, values: list[Value]) -> Order:
        wanted = Counter[Order]()
        for value in values:
            node = value.node
            assert node is not None
            source = self.type_of(node.operands[0]) if node.operands else None
            if isinstance(node.op, _FREE_VIEWS) and source is not None:
                self._want(wanted, value, result_order(node, source))
            elif isinstance(node.op, _KERNELS) and source is not None:
                self._want(wanted, value, source.order)
            elif isinstance(node.op, _LOWERED_AS_ONE):
                for given in _tied(node):
                    if given not in self.parent:
                        self._want(wanted, value, given.type.order)
            for user, index in value.uses:
                if isinstance(user.op, Return):
                    self._want(wanted, value, self.returned[index])
                    continue
                result = self.type_of(user.result) if isinstance(user.op, _FREE_VIEWS) else None
                if result is not None:
                    self._want(wanted, value, operand_order(user, result))
                if isinstance(user.op, CONVOLUTIONS):
                    self._want(wanted, value, channels_last(value.type.rank))
        candidates = [(), *(order for order, _ in wanted.most_common(_CANDIDATES))]
        if len(candidates) == 1:
            return ()
        costs: dict[Order, tuple[int, ...]] = {}
        for order in candidates:
            self.orders[root] = order
            costs[order] = self._cost(root, values)
        return min(costs, key=lambda order: costs[order])  # the first, row-major, of equals

    @staticmethod
    def _want(wanted: Counter[Order], value: Value, order: Order | None) -> None:
        if order is not None and normal_order(value.type, order):
            wanted[order] += value.type.nbytes

    def _cost(self, root: Value, values: list[Value]) -> tuple[int, ...]:
        """Count bytes copied with the region's present order, then bytes accessed out of order, then early copies.

        Early copies come last because a later copy may write the order that its readers want.
        """
        copied = later = scattered = 0
        for value in values:
            type, node = self.type_of(value), value.node
            assert type is not None and node is not None
            copied += type.nbytes * self._copies(node, value, type)
            scattered += type.nbytes * self._reorders(node, type)
            for user, index in value.uses:
                if isinstance(user.op, Return):
                    copied += type.nbytes * (not same_storage(type.shape, type.order, self.returned[index]))
                elif isinstance(user.op, ATTENTION_OPS) and index < (
                    5 if isinstance(user.op, AttentionBackward) else 3
                ):
                    copied += type.nbytes * (type.order[-1:] not in ((), (type.rank - 1,)))
                elif isinstance(user.op, _READS_ROWS):
                    copied += type.nbytes * (not _as_rows(user, index, type))
                elif isinstance(user.op, CONVOLUTIONS):
                    scattered += type.nbytes * (not same_storage(type.shape, type.order, channels_last(type.rank)))
                elif isinstance(user.op, _FREE_VIEWS) and self.type_of(user.result) is None:
                    later += type.nbytes * (result_order(user, type) is None)
                elif user.results[0] in self.parent and self._find(user.results[0]) is not root:
                    copied += type.nbytes * self._needs_copy(user, index, type)
        return copied + later, scattered, copied

    def _copies(self, node: Node, value: Value, type: TensorType) -> bool:
        """Return True if the node that computes a value of the region has to copy for this order."""
        if isinstance(node.op, (*_FREE_VIEWS, Slice, Split)):
            source = self.type_of(node.operands[0])
            return source is not None and would_view(node, source, type, value.index) is None
        if not isinstance(node.op, _LOWERED_AS_ONE):
            return False
        return any(
            v not in self.parent and v.literal is None and not same_storage(type.shape, v.type.order, type.order)
            for v in _tied(node)
        )

    def _reorders(self, node: Node, type: TensorType) -> bool:
        """Return True if a kernel reads one order and writes another; a pad of channels reorders at no cost."""
        if not isinstance(node.op, _KERNELS) or (isinstance(node.op, Pad) and _adds_channels(node.op)):
            return False
        sources = [self.type_of(v) for v in _tied(node)]
        return any(s is not None and not same_storage(type.shape, s.order, type.order) for s in sources)

    def _needs_copy(self, user: Node, index: int, type: TensorType) -> bool:
        """Return True if a user in another region, of known order, has to copy a value of this order."""
        result = self.type_of(user.results[0])
        if result is None:
            return False
        if isinstance(user.op, _FREE_VIEWS):
            return would_view(user, type, result) is None
        lowered = isinstance(user.op, _LOWERED_AS_ONE) and index in tied_operands(user)
        return lowered and not same_storage(type.shape, type.order, result.order)

    def _find(self, value: Value) -> Value:
        root = value
        while self.parent[root] is not root:
            root = self.parent[root]
        while self.parent[value] is not root:
            self.parent[value], value = root, self.parent[value]
        return root

    def _join(self, a: Value, b: Value) -> None:
        """Merge two regions, unless their orders are decided and differ."""
        a, b = self._find(a), self._find(b)
        if a is b or (a in self.orders and b in self.orders and self.orders[a] != self.orders[b]):
            return
        if a in self.orders:
            self.orders[b] = self.orders.pop(a)
        self.parent[a] = b


def _adds_channels(pad: Pad) -> bool:
    return len(pad.pads) > 2 and any(pad.pads[1 :: len(pad.pads) // 2])


def _order_for_transpose(value: Value) -> Order:
    """Return the order in which the transpose after an attention, which puts heads next to features, is a view.

    Its gradient reads the result in any order.
    """
    users = [user for user in value.users if not isinstance(user.op, AttentionBackward)]
    if len(users) == 1 and isinstance(users[0].op, Concat):
        users = users[0].result.users
    if len(users) == 1 and isinstance(users[0].op, Transpose) and users[0].op.perm[-1] == len(users[0].op.perm) - 1:
        return normal_order(value.type, users[0].op.perm)
    return ()


def _as_rows(user: Node, index: int, type: TensorType) -> bool:
    """Return True if a matmul, row norm or softmax reads this operand row by row; a matmul may be transposed."""
    if index and not isinstance(user.op, (MatMul, LayerNormBackward)):
        return True
    if isinstance(user.op, MatMul) and type.rank >= 2:
        rank = type.rank
        if same_storage(type.shape, type.order, (*range(rank - 2), rank - 1, rank - 2)):
            return True
    return not type.order


def _order_filters(graph: Graph, node: Node, copies: dict[tuple[Value, Order], Value]) -> None:
    """Store constant filters channels last, like the images they meet. (A wgrad's second operand is an image.)"""
    filters = node.operands[1]
    order = normal_order(filters.type, channels_last(filters.type.rank))
    if filters.literal is None or filters.type.order == order:
        return
    # all convolutions share one copy, because a look through the uses for each would be quadratic
    shared = (filters, order) in copies
    if not shared and all(isinstance(user.op, CONVOLUTIONS) and index == 1 for user, index in filters.uses):
        graph.set_type(filters, filters.type.with_order(order))
    else:
        graph.set_input(node, 1, _copy(graph, filters, order, node, copies))


def _copy(graph: Graph, value: Value, order: Order, before: Node, copies: dict[tuple[Value, Order], Value]) -> Value:
    """Return the value in another order: a constant is stored so, other values are copied, once per order."""
    if (value, order) not in copies:
        literal = value.literal
        op = Relayout(order) if literal is None else Constant(literal)
        operands = [value] if literal is None else []
        types = [value.type.with_order(order)]
        node = graph.insert(op, operands, before=before, names=(value.name,), types=types)
        copies[value, order] = node.result
    return copies[value, order]
