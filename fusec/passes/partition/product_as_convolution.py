"""Spell a product of rows and a constant matrix as a 1x1 convolution, for which cuDNN has precompiled engines."""

from __future__ import annotations

import math
from collections.abc import Callable

from fusec.ir import Array, Constant, Graph, Literal, Node, TensorType, Value, channels_last
from fusec.ops import Conv, MatMul, Reshape
from fusec.passes.rewriting.rewriter import NoMatch, on_copy
from fusec.passes.rewriting.row_major import row_major


@on_copy
def as_convolution(graph: Graph) -> None:
    """x[…, K] @ constant w[K, N] as a 1x1 convolution over [rows, K, 1, 1]: P37 with bias and relu.

    It needs no compile time. It is the only true-fp32 product, because every matmul engine rounds fp32 to tf32.
    """
    product = _linear_layer(graph)
    (x, w), columns = product.operands, product.result.type.shape[-1]
    prologue = _upstream(product)
    images = _Images(graph, x.type.shape[:-1])
    for node in _computing(graph):
        if node is product:
            operands = [images.of(x, x.type.shape[-1], node), _as_filters(graph, w, node)]
            made = graph.insert(Conv((1, 1), (0, 0, 0, 0), (1, 1)), operands, before=node, origin=node.origin)
        else:
            wide = x.type.shape[-1] if node in prologue else columns
            operands = [images.of(v, wide, node) for v in node.operands]
            type = TensorType((images.rows, wide, 1, 1), node.result.type.dtype, channels_last(4))
            made = graph.insert(node.op, operands, before=node, types=[type], origin=node.origin)
        images.made[node.result] = made.result
    for value in dict.fromkeys(graph.outputs):
        back = graph.insert(Reshape(value.type.shape), (images.made[value],), names=(value.name,)).result
        graph.replace(value, back)


def _linear_layer(graph: Graph) -> Node:
    """Find the only product of a graph whose other ops are pointwise over the rows of its operand or result."""
    products = [n for n in graph.nodes if isinstance(n.op, MatMul)]
    if len(products) != 1:
        raise NoMatch("not one product")
    x, w = products[0].operands
    space = products[0].result.type.shape
    is_matrix = w.literal is not None and w.type.size == math.prod(w.type.shape[-2:])
    if not x.type.dtype.is_float or not is_matrix or x.type.shape[:-1] != space[:-1]:
        raise NoMatch("no product of rows and a constant matrix", products[0].result)
    for node in _computing(graph):
        if any(v.type.order for v in (*node.results, *node.operands)):
            raise NoMatch("rows of such a tensor are not one dim of its memory", node.results[0])
        if "axis" in node.op.attributes or any(v.type.shape not in (space, x.type.shape) for v in node.results):
            raise NoMatch("not pointwise over the rows", node.results[0])
    return products[0]


def _computing(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if not isinstance(n.op, Constant)]


class _Images:
    """Values over rows, reshaped to images [rows, columns, 1, 1].

    lead: dims of the rows.
    """

    def __init__(self, graph: Graph, lead: tuple[int, ...]):
        self.graph = graph
        self.lead = lead
        self.rows = math.prod(lead)
        self.made: dict[Value, Value] = {}

    def of(self, value: Value, columns: int, before: Node) -> Value:
        """Return the image of a value.

        Raises NoMatch if the value broadcasts along part of the rows.
        """
        if value not in self.made:
            if value.scalar() is not None and value.type.rank <= 4:
                return value
            padded = (1,) * (len(self.lead) + 1 - value.type.rank) + value.type.shape
            if padded[:-1] not in (self.lead, (1,) * len(self.lead)) or padded[-1] not in (columns, 1):
                raise NoMatch("broadcasts along part of the rows", value)
            self.made[value] = _reshaped(self.graph, value, (math.prod(padded[:-1]), padded[-1], 1, 1), before)
        return self.made[value]


def _reshaped(graph: Graph, value: Value, shape: tuple[int, ...], before: Node) -> Value:
    type = TensorType(shape, value.type.dtype, channels_last(4))
    if value.literal is not None:
        return respelled_constant(graph, value, "view", type, lambda array: array.reshape(shape), before)
    return graph.insert(Reshape(shape), (value,), before=before, types=[type]).result


def _as_filters(graph: Graph, w: Value, before: Node) -> Value:
    """Reshape w[…, K, N] to filters [N, K, 1, 1]."""
    k, n = w.type.shape[-2:]

    def transposed(array: Array) -> Array:
        return array.reshape(k, n).T.reshape(n, k, 1, 1)

    type = TensorType((n, k, 1, 1), w.type.dtype, channels_last(4))
    return respelled_constant(graph, w, "filters", type, transposed, before)


def respelled_constant(
    graph: Graph, value: Value, kind: str, type: TensorType, compute: Callable[[Array], Array], before: Node
) -> Value:
    """Insert a constant that is computed from another one and has its label.

    kind: names the computation, because equal computations of equal constants share their memory.
    """
    literal = value.literal
    assert literal is not None

    def load() -> Array:
        return row_major(compute(literal.operand()), type.dtype.numpy)

    made = Literal(type, load, literal.label, (kind, type, literal.key), sources=[literal])
    return graph.insert(Constant(made), before=before, names=(value.name,), types=[type]).result


def _upstream(product: Node) -> set[Node]:
    """Collect the computing nodes that a product depends on."""
    found: set[Node] = set()
    stack = [product]
    while stack:
        for value in stack.pop().operands:
            if value.node is not None and value.literal is None and value.node not in found:
                found.add(value.node)
                stack.append(value.node)
    return found
