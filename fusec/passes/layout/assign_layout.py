"""Choose the memory order of every value, so that fast cuDNN engines are reached with the fewest copies.

Ops that keep positions (pointwise, pooling, concat, norms over channels…) tie values to a region with one order. A
region is channels last if a convolution writes into it, and row-major if a matmul or row norm does. Else it takes the
order that copies the fewest bytes; reshapes and transposes that are views of memory are free.

Inputs and outputs of the graph have the orders that the caller chose (`io_layout`), except filters that stay on the
device between calls. A copy (`relayout`) is made only where tensors of different orders meet in one cuDNN graph. A
convolution reads any order, because cuDNN's engines take images in NCHW with results in NHWC.
"""

from __future__ import annotations

from fusec.ir import Constant, Graph, Node, TensorType, Value, channels_last
from fusec.ops import (
    CONVOLUTIONS,
    IMAGE_CONVOLUTIONS,
    Cast,
    MatMul,
    Pad,
    Pointwise,
    Relayout,
)
from fusec.ops.matmul import SUMMED_IN
from fusec.passes.base import Options, Pass
from fusec.passes.layout.io_layout import Order, first_user, normal_order, returned, set_input_orders
from fusec.passes.layout.layout_regions import LayoutRegions, movable_values
from fusec.passes.layout.op_layouts import KERNELS, LOWERED_AS_ONE, reads_result_order, tied_operands
from fusec.schedule.aliasing import same_storage

COLUMN_BYTES = 16  # of the pieces that engines and cuBLASLt copy, so columns (and rows) are whole pieces


class AssignLayout(Pass):
    """Choose memory orders."""

    name = "assign_layout"

    def run(self, graph: Graph, options: Options) -> None:
        shapes = _filter_shapes(graph)
        filters = {v.name: v for v in graph.inputs if v.name in dict(options.state) and v.type.shape in shapes}
        for value in filters.values():  # filters, and their optimiser state
            graph.set_type(value, value.type.with_order(normal_order(value.type, channels_last(value.type.rank))))
        set_input_orders(graph, options)
        wanted_of = returned(graph, options)
        regions = LayoutRegions(graph, wanted_of)
        regions.decide()
        if _copy_inputs_first(graph, regions):
            regions = LayoutRegions(graph, wanted_of)
            regions.decide()
        for value in movable_values(graph):
            graph.set_type(value, regions.type_of(value) or value.type)
        copies: dict[tuple[Value, Order], Value] = {}
        for node in list(graph.nodes):
            if isinstance(node.op, CONVOLUTIONS):
                _order_filters(graph, node, copies)
            elif isinstance(node.op, MatMul) and node.operands[0].type.dtype in SUMMED_IN:
                _order_columns(graph, node, copies)
            if not isinstance(node.op, LOWERED_AS_ONE):
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


def _copy_inputs_first(graph: Graph, regions: LayoutRegions) -> bool:
    """Make kernels read the copy of an input that a cuDNN graph needs; return True if there is such an input.

    Those kernels then write the order that a convolution after them wants.
    """
    found = False
    for value in graph.inputs:
        orders = {
            result.order
            for user, index in value.uses
            if reads_result_order(user, index)
            if (result := regions.type_of(user.results[0])) is not None and result.order
        }
        kernels = [(user, index) for user, index in value.uses if isinstance(user.op, KERNELS) and index == 0]
        if len(orders) != 1 or not kernels:
            continue
        (order,) = orders
        if same_storage(value.type.shape, value.type.order, order):
            continue
        copy = _copy(graph, value, order, first_user(graph, value), {})
        for user, index in value.uses:
            if user is not copy.node and ((user, index) in kernels or reads_result_order(user, index)):
                graph.set_input(user, index, copy)
        found = True
    return found


def _filter_shapes(graph: Graph) -> set[tuple[int, ...]]:
    """Collect the shapes of filters, and of tensors that are cast or padded to filters.

    Optimiser state of a parameter has the parameter's shape.
    """
    shapes: set[tuple[int, ...]] = set()
    for node in graph.nodes:
        if isinstance(node.op, IMAGE_CONVOLUTIONS) and node.result.type.rank >= 4:
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


def _order_filters(graph: Graph, node: Node, copies: dict[tuple[Value, Order], Value]) -> None:
    """Store constant filters channels last, like the images they meet. A wgrad's second operand is an image."""
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


def _order_columns(graph: Graph, node: Node, copies: dict[tuple[Value, Order], Value]) -> None:
    """Store the columns of a constant matrix of 8-bit numbers one after another, because tensor cores read them so.

    By rows, cuDNN has no engine for fp8. For int8 it takes 1.6 times as long (H200), and cuBLASLt 6 times.
    """
    matrix = node.operands[1]
    order = normal_order(matrix.type, (1, 0)) if matrix.type.rank == 2 else ()
    aligned = not any(size % COLUMN_BYTES for size in matrix.type.shape)
    if matrix.literal is not None and matrix.type.order != order and aligned:
        graph.set_input(node, 1, _copy(graph, matrix, order, node, copies))


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
