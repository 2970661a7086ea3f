"""Bodies of loops in each precision, the same computed with NumPy, and bodies that inference refuses."""

from __future__ import annotations

import numpy as np
from ops.onnx_oracle import Array

from fusec.ir import Body, DType, Graph, TensorType, Value
from fusec.ops import Concat, MatMul, Op, Reduce, Reshape, Scan, pw
from fusec.text import parse


def average(dtype: DType) -> Op:
    """A moving average of rows: one state, and a row that is given before each step and one after it."""
    graph = Graph("body")
    h, x, share = (
        graph.add_input(name, TensorType(shape, dtype)) for name, shape in (("h", (3,)), ("x", (3,)), ("s", ()))
    )
    after = graph.add(pw("add"), h, graph.add(pw("mul"), share, graph.add(pw("sub"), x, h)))
    graph.set_outputs([after, graph.add(pw("mul"), x, after)], ["after", "y"])
    return Scan(Body(graph), 5, 1, 1)


def moving_average(h: Array, x: Array, share: Array) -> list[Array]:
    rows: list[Array] = []
    for row in x:
        h = (h + share * (row - h)).astype(h.dtype)
        rows.append((row * h).astype(h.dtype))
    return [h, np.stack(rows)]


def layer(dtype: DType) -> Op:
    """A state that is multiplied by weights, and a state of integers that counts the steps."""
    graph = Graph("body")
    h = graph.add_input("h", TensorType((2, 3), dtype))
    count = graph.add_input("count", TensorType((), DType.I64))
    w = graph.add_input("w", TensorType((3, 3), dtype))
    after = graph.add(pw("tanh"), graph.add(MatMul(), h, w))
    more = graph.add(pw("add"), count, graph.constant(np.array(2)))
    graph.set_outputs([after, more, graph.add(Reduce("sum", (1,), False), after)], ["after", "more", "y"])
    return Scan(Body(graph), 4, 2)


def weighted(h: Array, count: Array, w: Array) -> list[Array]:
    rows: list[Array] = []
    for _ in range(4):
        h = np.tanh(h @ w)
        rows.append(h.sum(1))
    return [h, np.asarray(count + 8), np.stack(rows)]


def paths(dtype: DType) -> Op:
    """Probabilities of paths whose rows exchange nothing: logarithms of sums of exponentials."""
    graph = Graph("body")
    a, x = (graph.add_input(name, TensorType((2, 4), dtype)) for name in "ax")
    both = graph.add(Concat(0), *(graph.add(Reshape((1, 2, 4)), v) for v in (a, graph.add(pw("neg"), a))))
    total = graph.add(pw("add"), graph.add(Reduce("log_sum_exp", (0,), False), both), x)
    graph.set_outputs([total], ["total"])
    return Scan(Body(graph), 3, 1, 1)


def summed_paths(a: Array, x: Array) -> list[Array]:
    for row in x:
        a = np.logaddexp(a, -a) + row
    return [a]


def accumulated(dtype: DType) -> Op:
    """Values before each step as rows, in memory of their own."""
    graph = Graph("body")
    h, x = (graph.add_input(name, TensorType((2,), dtype)) for name in "hx")
    graph.set_outputs([graph.add(pw("max"), h, x), h, x], ["after", "before", "same"])
    return Scan(Body(graph), 6, 1, 1)


def running_maximum(h: Array, x: Array) -> list[Array]:
    after = np.maximum.accumulate(np.concatenate([h[None], x]))
    return [after[-1], after[:-1], x]


def body(text: str) -> Body:
    """`(%x: f32[]) { return %x }` -> a body."""
    return Body(parse(f'graph "body" {text}'))


def same(type: str) -> Body:
    """A body that returns its only state."""
    return body(f"(%x: {type}) {{ return %x }}")


def large_constant() -> Body:
    graph = Graph("body")
    x: Value = graph.add_input("x", TensorType((17,), DType.F32))
    graph.set_outputs([graph.add(pw("add"), x, graph.constant(np.arange(17, dtype=np.float32), "c"))], ["y"])
    return Body(graph)
