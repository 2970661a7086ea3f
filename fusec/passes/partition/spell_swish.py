"""swish behind a matrix product through tanh: engines have that in hardware, where a sigmoid is two operations."""

from __future__ import annotations

import numpy as np

from fusec.frame import trace
from fusec.ir import DType, Graph, Node, Value
from fusec.ops import Cast, MatMul, pw

LIMIT = 20.0  # tanh is 1 from 9 on; an engine that makes it of exponentials must not overflow


def swish_by_tanh(body: Graph) -> Graph | None:
    """swish(x) = x * sigmoid(b x) -> x/2 + x/2 * tanh(x b/2) behind a product, in 16 bits."""
    graph = body.clone()
    found = [node for node in graph.nodes if node.op.name == "swish" and _is_wanted(node)]
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
    half = op("mul", x, number(0.5))
    beta = float(node.op.attributes["beta"])
    z = half if beta == 1.0 else op("mul", half, number(beta))
    z = op("max", op("min", z, number(LIMIT)), number(-LIMIT))
    y = op("add", half, op("mul", half, op("tanh", z)))
    back = graph.insert(Cast(node.result.type.dtype), (y,), before=node, types=[node.result.type], origin=node.origin)
    graph.replace(node.result, back.result)
