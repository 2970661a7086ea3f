"""Spell gelu and swish after a matmul as x/2 + x/2 tanh(z), because engines have tanh in hardware.

erf takes half as long as the whole product, and a sigmoid is an exponential and a division. Phi(x) is
(1 + tanh(x p(x²))) / 2 with a polynomial p. In 16 bits it is off by a fifth of a unit in the last place. A rounding to
8-bit integers after it may round a number next to a tie to its other side.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fusec.ir import HALVES, DType, Graph, Node, Value
from fusec.lowering.dim_folding import trace
from fusec.ops import Cast, MatMul, pw
from fusec.passes.rewriting.rewriter import NoMatch, on_copy
from fusec.passes.rewriting.value_facts import is_rounded_to_integers

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


Argument = Callable[[Node, Value, Value, Op, Number], Value]  # (gelu or swish, x, x/2, …) -> operand of tanh


@on_copy
def gelu_by_tanh(graph: Graph) -> None:
    """gelu(x) -> x/2 + x/2 * tanh(x * p(x * x)) after a matmul, in 16 bits or before a rounding to 8 bits."""

    def argument(node: Node, x: Value, half: Value, op: Op, number: Number) -> Value:
        square = op("mul", x, x)
        *rest, highest = (0.5 * coefficient for coefficient in COEFFICIENTS)
        p = number(highest)
        for coefficient in reversed(rest):
            p = op("add", op("mul", square, p), number(coefficient))
        return op("mul", p, x)

    _by_tanh(graph, "gelu", argument)


@on_copy
def swish_by_tanh(graph: Graph) -> None:
    """swish(x) = x * sigmoid(b x) -> x/2 + x/2 * tanh(x b/2) after a matmul, in 16 bits or before such a rounding."""

    def argument(node: Node, x: Value, half: Value, op: Op, number: Number) -> Value:
        beta = float(node.op.attributes["beta"])
        return half if beta == 1.0 else op("mul", half, number(beta))

    _by_tanh(graph, "swish", argument)


def _by_tanh(graph: Graph, name: str, argument: Argument) -> None:
    """Rewrite every op of that name.

    argument: builds the operand of tanh, before it is limited.
    """
    found = [node for node in graph.nodes if node.op.name == name and _is_wanted(node)]
    if not found or not any(isinstance(node.op, MatMul) for node in graph.nodes):
        raise NoMatch(f"no {name} after a matmul, in 16 bits or before a rounding to 8 bits")
    for node in found:
        _spell(graph, node, argument)


def _is_wanted(node: Node) -> bool:
    """Return True for an op in 16 bits, or rounded to 8, on a value computed in the step.

    On a value read from memory it would be a prologue, or a kernel's.
    """
    (x,) = node.operands
    root = trace(x).root
    is_rounded = x.type.dtype in HALVES or is_rounded_to_integers(node.result)
    return is_rounded and root.node is not None and root.literal is None


def _spell(graph: Graph, node: Node, argument: Argument) -> None:
    types = [node.result.type.with_dtype(DType.F32)]

    def number(value: float) -> Value:
        return graph.constant(np.float32(value), before=node)

    def op(name: str, *operands: Value) -> Value:
        return graph.insert(pw(name), operands, before=node, types=types, origin=node.origin).result

    (x,) = node.operands
    narrow = x.type.dtype in HALVES
    if narrow:
        x = graph.insert(Cast(DType.F32), [x], before=node, types=types, origin=node.origin).result
    half = op("mul", x, number(0.5))
    z = argument(node, x, half, op, number)
    z = op("max", op("min", z, number(LIMIT)), number(-LIMIT))
    y = op("add", half, op("mul", half, op("tanh", z)))
    if narrow:
        back = Cast(node.result.type.dtype)
        y = graph.insert(back, (y,), before=node, types=[node.result.type], origin=node.origin).result
    graph.replace(node.result, y)
