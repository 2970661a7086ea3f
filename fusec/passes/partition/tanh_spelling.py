"""Spell gelu and swish after a matmul as x/2 + x/2 tanh(z), because engines have tanh in hardware.

erf takes half as long as the whole product, and a sigmoid is an exponential and a division. Phi(x) is
(1 + tanh(x p(x²))) / 2 with a polynomial p. In 16 bits it is off by a fifth of a unit in the last place.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fusec.ir import HALVES, DType, Graph, Node, Value
from fusec.lowering.dim_folding import trace
from fusec.ops import Cast, MatMul, pw

# Coefficients of twice p, fitted to the logarithm of Phi(x) / Phi(-x) for |x| <= 6.5;
# beyond it p keeps growing, and tanh is 1.
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

Number = Callable[[float], Value]
Op = Callable[..., Value]


def gelu_by_tanh(body: Graph) -> Graph | None:
    """gelu(x) -> x/2 + x/2 * tanh(x * p(x * x)) after a matmul, in 16 bits."""

    def argument(node: Node, x: Value, half: Value, op: Op, number: Number) -> Value:
        square = op("mul", x, x)
        *rest, highest = (0.5 * coefficient for coefficient in COEFFICIENTS)
        p = number(highest)
        for coefficient in reversed(rest):
            p = op("add", op("mul", square, p), number(coefficient))
        return op("mul", p, x)

    return _by_tanh(body, "gelu", argument)


def swish_by_tanh(body: Graph) -> Graph | None:
    """swish(x) = x * sigmoid(b x) -> x/2 + x/2 * tanh(x b/2) after a matmul, in 16 bits."""

    def argument(node: Node, x: Value, half: Value, op: Op, number: Number) -> Value:
        beta = float(node.op.attributes["beta"])
        return half if beta == 1.0 else op("mul", half, number(beta))

    return _by_tanh(body, "swish", argument)


def _by_tanh(body: Graph, name: str, argument: Callable[[Node, Value, Value, Op, Number], Value]) -> Graph | None:
    """Rewrite every op of that name; None if there is none.

    argument: builds the operand of tanh, before it is limited
    """
    graph = body.clone()
    found = [node for node in graph.nodes if node.op.name == name and _is_wanted(node)]
    if not found or not any(isinstance(node.op, MatMul) for node in graph.nodes):
        return None
    for node in found:
        _spell(graph, node, argument)
    graph.prune()
    return graph


def _is_wanted(node: Node) -> bool:
    """Return True for an op in 16 bits on a value computed in the step.

    On a value read from memory it would be a prologue, or a kernel's.
    """
    (x,) = node.operands
    root = trace(x).root
    return x.type.dtype in HALVES and root.node is not None and root.literal is None


def _spell(graph: Graph, node: Node, argument: Callable[[Node, Value, Value, Op, Number], Value]) -> None:
    types = [node.result.type.with_dtype(DType.F32)]

    def number(value: float) -> Value:
        return graph.constant(np.float32(value), before=node)

    def op(name: str, *operands: Value) -> Value:
        return graph.insert(pw(name), operands, before=node, types=types, origin=node.origin).result

    x = graph.insert(Cast(DType.F32), node.operands, before=node, types=types, origin=node.origin).result
    half = op("mul", x, number(0.5))
    z = argument(node, x, half, op, number)
    z = op("max", op("min", z, number(LIMIT)), number(-LIMIT))
    y = op("add", half, op("mul", half, op("tanh", z)))
    back = graph.insert(Cast(node.result.type.dtype), (y,), before=node, types=[node.result.type], origin=node.origin)
    graph.replace(node.result, back.result)
