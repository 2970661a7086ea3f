"""gelu behind a matrix product without erf, which takes an engine as long as half the product.

Phi(x) = (1 + tanh(x p(x²))) / 2 with a polynomial p, in 16 bits: off by a fifth of a unit in the last place.
"""

from __future__ import annotations

import numpy as np

from fusec.frame import trace
from fusec.ir import DType, Graph, Node, Value
from fusec.ops import Cast, MatMul, pw

# Of twice p, fitted to the logarithm of Phi(x) / Phi(-x) for |x| <= 6.5; beyond it p keeps growing, and tanh is 1.
COEFFICIENTS = (
    1.5954993302055027,
    0.07306069403043067,
    -0.00023749031759432522,
    -7.810279755126917e-05,
    4.972311457795884e-06,
    -1.3796050646202228e-07,
    1.492713177612484e-09,
)
LIMIT = 20.0  # tanh is 1 from 9 on; an engine that makes it of exponentials must not overflow


def gelu_by_tanh(body: Graph) -> Graph | None:
    """gelu(x) -> x/2 + x/2 * tanh(x * p(x * x)) behind a product: engines have tanh for nothing, and not erf."""
    graph = body.clone()
    found = [node for node in graph.nodes if node.op.name == "gelu" and _is_wanted(node)]
    if not found or not any(isinstance(node.op, MatMul) for node in graph.nodes):
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
    types = [node.result.type.with_dtype(DType.F32)]

    def number(value: float) -> Value:
        return graph.constant(np.float32(value), before=node)

    def op(name: str, *operands: Value) -> Value:
        return graph.insert(pw(name), operands, before=node, types=types, origin=node.origin).result

    x = graph.insert(Cast(DType.F32), node.operands, before=node, types=types, origin=node.origin).result
    square = op("mul", x, x)
    *rest, highest = (0.5 * coefficient for coefficient in COEFFICIENTS)
    p = number(highest)
    for coefficient in reversed(rest):
        p = op("add", op("mul", square, p), number(coefficient))
    half = op("mul", x, number(0.5))
    z = op("max", op("min", op("mul", p, x), number(LIMIT)), number(-LIMIT))
    y = op("add", half, op("mul", half, op("tanh", z)))
    back = graph.insert(Cast(node.result.type.dtype), (y,), before=node, types=[node.result.type], origin=node.origin)
    graph.replace(node.result, back.result)
