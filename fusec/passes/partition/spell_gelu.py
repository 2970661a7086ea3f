"""gelu behind a product without erf, whose many operations an engine does not hide behind the product.

Phi(x) = sigmoid(x p(x²)) with a polynomial p, for results of 16 bits: off by a third of a unit in their last place.
"""

from __future__ import annotations

import numpy as np

from fusec.frame import trace
from fusec.ir import DType, Graph, Node, Value
from fusec.ops import Cast, Conv, MatMul, pw

# Minimax in x p(x²) - logit(Phi(x)) for |x| <= 6: 1.5e-4, the relative error where Phi is small; elsewhere it is less.
COEFFICIENTS = (
    1.5953316699407762,
    0.07327690563501822,
    -0.0003075972424320351,
    -6.970219756347057e-05,
    4.645702990239107e-06,
    -1.4620062665101107e-07,
    2.353191930600292e-09,
    -1.5462634458163935e-11,
)
SQUARE = 36.0  # beyond it p stays what it is: the result is x, or nothing that 16 bits tell from 0


def gelu_by_sigmoid(body: Graph) -> Graph | None:
    """gelu(x) -> x * sigmoid(x * p(min(x * x, 36))) behind a product: erf takes as long as the product."""
    graph = body.clone()
    found = [node for node in graph.nodes if node.op.name == "gelu" and _is_wanted(node)]
    if not found or not any(isinstance(node.op, (Conv, MatMul)) for node in graph.nodes):
        return None
    for node in found:
        _spell(graph, node)
    graph.prune()
    return graph


def _is_wanted(node: Node) -> bool:
    """In 16 bits, of something computed in the step: what is read from memory is a prologue, or a kernel's."""
    (x,) = node.operands
    root = trace(x).root
    return x.type.dtype in (DType.F16, DType.BF16) and root.node is not None and root.literal is None


def _spell(graph: Graph, node: Node) -> None:
    def number(value: float) -> Value:
        return graph.constant(np.float32(value), before=node)

    def op(name: str, *operands: Value) -> Value:
        types = [node.result.type.with_dtype(DType.F32)]
        return graph.insert(pw(name), operands, before=node, types=types, origin=node.origin).result

    types = [node.result.type.with_dtype(DType.F32)]
    x = graph.insert(Cast(DType.F32), node.operands, before=node, types=types, origin=node.origin).result
    square = op("min", op("mul", x, x), number(SQUARE))
    *rest, highest = COEFFICIENTS
    p = number(highest)
    for coefficient in reversed(rest):
        p = op("add", op("mul", square, p), number(coefficient))
    y = op("mul", x, op("sigmoid", op("mul", p, x)))
    back = graph.insert(Cast(node.result.type.dtype), (y,), before=node, types=[node.result.type], origin=node.origin)
    graph.replace(node.result, back.result)
