"""Divide the values of a graph into regions with one memory order each, and choose the cheapest order.

Ops that keep positions tie their operands and results to one region, so that none of them has to copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fusec.ir import Constant, Graph, Node, Return, TensorType, Value, channels_last
from fusec.ops import (
    ATTENTION_OPS,
    CONVOLUTIONS,
    AttentionBackward,
    Cast,
    Concat,
    Pad,
    Pointwise,
    Relayout,
    Slice,
    Split,
    Transpose,
)
from fusec.passes.layout.io_layout import Order, normal_order
from fusec.passes.layout.op_layouts import (
    FREE_VIEWS,
    KERNELS,
    LOWERED_AS_ONE,
    READS_ROWS,
    ROW_MAJOR,
    adds_channels,
    may_change_order,
    reads_as_rows,
    reads_result_order,
    tied_values,
)
from fusec.schedule.aliasing import operand_order, result_order, same_storage, would_view

_CANDIDATES = 4  # orders compared per region, so that the pass stays linear


def movable_values(graph: Graph) -> Iterator[Value]:
    """Yield values whose order is free: results of rank 2 and up, except constants and copies."""
    for node in graph.nodes:
        if not isinstance(node.op, (Constant, Relayout)):
            yield from (v for v in node.results if v.type.rank > 1)


class LayoutRegions:
    """Union-find over the movable values, and the order of each region.

    returned: the orders of the outputs of the graph.
    """

    def __init__(self, graph: Graph, returned: Sequence[Order]):
        self.returned = returned
        self.parent: dict[Value, Value] = {v: v for v in movable_values(graph)}
        self.orders: dict[Value, Order] = {}
        for node in graph.nodes:
            if isinstance(node.op, CONVOLUTIONS):
                self.orders[node.result] = channels_last(node.result.type.rank)
            elif isinstance(node.op, ROW_MAJOR):
                self.orders[node.results[0]] = ()
            elif isinstance(node.op, ATTENTION_OPS):
                self.orders.update({value: _order_for_transpose(value) for value in node.results})
        for node in graph.nodes:
            tied = tied_values(node)
            if not tied or node.results[0] not in self.parent or may_change_order(node):
                continue
            # a convolution's result first, so that a matmul's result in the same region is the one copied
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
        """Return the cheapest memory order of a region: row-major, or one that its neighbours want most."""
        wanted = Counter[Order]()
        for value in values:
            node = value.node
            assert node is not None
            source = self.type_of(node.operands[0]) if node.operands else None
            if isinstance(node.op, FREE_VIEWS) and source is not None:
                self._want(wanted, value, result_order(node, source))
            elif isinstance(node.op, KERNELS) and source is not None:
                self._want(wanted, value, source.order)
            elif isinstance(node.op, LOWERED_AS_ONE):
                for given in tied_values(node):
                    if given not in self.parent:
                        self._want(wanted, value, given.type.order)
            for user, index in value.uses:
                if isinstance(user.op, Return):
                    self._want(wanted, value, self.returned[index])
                    continue
                result = self.type_of(user.result) if isinstance(user.op, FREE_VIEWS) else None
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
                elif isinstance(user.op, READS_ROWS):
                    copied += type.nbytes * (not reads_as_rows(user, index, type))
                elif isinstance(user.op, CONVOLUTIONS):
                    scattered += type.nbytes * (not same_storage(type.shape, type.order, channels_last(type.rank)))
                elif isinstance(user.op, FREE_VIEWS) and self.type_of(user.result) is None:
                    later += type.nbytes * (result_order(user, type) is None)
                elif user.results[0] in self.parent and self._find(user.results[0]) is not root:
                    copied += type.nbytes * self._needs_copy(user, index, type)
        return copied + later, scattered, copied

    def _copies(self, node: Node, value: Value, type: TensorType) -> bool:
        """Tell if the node that computes a value of the region has to copy for this order."""
        if isinstance(node.op, (*FREE_VIEWS, Slice, Split)):
            source = self.type_of(node.operands[0])
            return source is not None and would_view(node, source, type, value.index) is None
        if not isinstance(node.op, LOWERED_AS_ONE):
            return False
        return any(
            v not in self.parent and v.literal is None and not same_storage(type.shape, v.type.order, type.order)
            for v in tied_values(node)
        )

    def _reorders(self, node: Node, type: TensorType) -> bool:
        """Tell if a kernel reads one order and writes another; a pad of channels reorders at no cost."""
        if not isinstance(node.op, KERNELS) or (isinstance(node.op, Pad) and adds_channels(node.op)):
            return False
        sources = [self.type_of(v) for v in tied_values(node)]
        return any(s is not None and not same_storage(type.shape, s.order, type.order) for s in sources)

    def _needs_copy(self, user: Node, index: int, type: TensorType) -> bool:
        """Tell if a user in another region, of known order, has to copy a value of this order."""
        result = self.type_of(user.results[0])
        if result is None:
            return False
        if isinstance(user.op, FREE_VIEWS):
            return would_view(user, type, result) is None
        return reads_result_order(user, index) and not same_storage(type.shape, type.order, result.order)

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


def _order_for_transpose(value: Value) -> Order:
    """Return the order in which the transpose after an attention, which puts heads next to features, is a view.

    Its gradient reads the result in any order. Before the transpose, numbers may be scaled and rounded, and a pad may
    add rows.
    """
    users = [user for user in value.users if not isinstance(user.op, AttentionBackward)]
    while len(users) == 1 and isinstance(users[0].op, (Pointwise, Cast)):
        others = [v for v in users[0].operands if v.literal is None]
        if len(others) != 1 or users[0].result.type.shape != value.type.shape:
            break
        users = users[0].result.users
    if len(users) == 1 and isinstance(users[0].op, Pad):
        users = users[0].result.users
    if len(users) == 1 and isinstance(users[0].op, Concat):
        users = users[0].result.users
    if len(users) == 1 and isinstance(users[0].op, Transpose) and users[0].op.perm[-1] == len(users[0].op.perm) - 1:
        return normal_order(value.type, users[0].op.perm)
    return ()
