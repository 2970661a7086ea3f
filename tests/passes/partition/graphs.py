"""Graphs for the tests: random ones, and a ResNet-50 as it is after BatchNorm was folded."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Conv, MatMul, MaxPool, Reduce, Reshape, Softmax, pw

SHAPE = (2, 4, 4, 4)
CONV = Conv((1, 1), (1, 1, 1, 1), (1, 1))


@st.composite
def random_graphs(draw: st.DrawFn, most: int = 30) -> Graph:
    """A DAG of convolutions, pointwise ops, gates, reductions and ops that never fuse, with fan-out,
    and with inner values among the outputs."""
    graph = Graph("random")
    values: list[Value] = [graph.add_input(f"x{i}", TensorType(SHAPE, DType.F32)) for i in range(2)]
    weight = graph.constant(np.full((4, 4, 3, 3), 0.1, np.float32), "w")
    bias = graph.constant(np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1), "b")
    for _ in range(draw(st.integers(1, most))):
        # mostly recent operands: long chains, with a skip now and then
        x, y = (values[-1 - draw(st.integers(0, min(len(values), 6) - 1))] for _ in range(2))
        if draw(st.integers(0, 9)) == 0:
            y = values[draw(st.integers(0, len(values) - 1))]
        match draw(st.sampled_from(["conv", "bias", "relu", "leaky", "tanh", "add", "mul", "gate", "softmax", "flat"])):
            case "conv":
                new = graph.add(CONV, x, weight)
            case "bias":
                new = graph.add(pw("add"), x, bias)
            case "add" | "mul" as name:
                new = graph.add(pw(name), x, y)
            case "gate":
                new = graph.add(pw("mul"), x, graph.add(Reduce("mean", (2, 3)), y))
            case "leaky":
                new = graph.add(pw("leaky_relu", alpha=draw(st.sampled_from([0.1, 0.2]))), x)
            case "softmax":
                new = graph.add(Softmax(1), x)
            case "flat":
                flat = graph.add(pw("sigmoid"), graph.add(Reshape((2, 64)), x))
                new = graph.add(Reshape(SHAPE), flat)
            case name:
                new = graph.add(pw(name), x)
        values.append(new)
    made = values[2:]
    outputs = [v for v in made if not v.uses or draw(st.integers(0, 7)) == 0]
    graph.set_outputs(outputs, [f"out{i}" for i in range(len(outputs))])
    return graph


def resnet50(batch: int = 1, dtype: DType = DType.F32) -> Graph:
    """53 convolutions with bias, 16 residual sums, max pooling, global average pooling, gemm, softmax."""
    graph = Graph("resnet50")
    order = (0, 2, 3, 1)

    def conv(x: Value, filters: int, window: int, stride: int = 1) -> Value:
        weight = graph.constant(np.zeros((filters, x.type.shape[1], window, window), dtype.numpy))
        bias = graph.constant(np.zeros((1, filters, 1, 1), dtype.numpy))
        pads = (window // 2,) * 4
        return graph.add(pw("add"), graph.add(Conv((stride, stride), pads, (1, 1)), x, weight), bias)

    def relu(x: Value) -> Value:
        return graph.add(pw("relu"), x)

    x = relu(conv(graph.add_input("x", TensorType((batch, 3, 224, 224), dtype, order)), 64, 7, 2))
    x = graph.add(MaxPool((3, 3), (2, 2), (1, 1, 1, 1), (1, 1)), x)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            width, stride = 64 << stage, 2 if stage and not block else 1
            y = conv(relu(conv(relu(conv(x, width, 1)), width, 3, stride)), 4 * width, 1)
            x = relu(graph.add(pw("add"), y, x if block else conv(x, 4 * width, 1, stride)))
    x = graph.add(Reshape((batch, 2048)), graph.add(Reduce("mean", (2, 3)), x))
    weight = graph.constant(np.zeros((2048, 1000), dtype.numpy))
    x = graph.add(pw("add"), graph.add(MatMul(), x, weight), graph.constant(np.zeros(1000, dtype.numpy)))
    graph.set_outputs([graph.add(Softmax(1), x)], ["y"])
    return graph
