"""Test the cost model: bytes, operations, and the measured penalties."""

from __future__ import annotations

import numpy as np
import pytest
from passes.partition.judges import FAST, GENERIC, RUNTIME

from fusec.ir import DType, Graph, Node, TensorType
from fusec.ops import Cast, Conv, ConvTranspose, MatMul, pw
from fusec.passes.partition.cost_model import DEPTHWISE_FUSED, RUNTIME_COMPILED, flops, is_depthwise, penalty, step_us
from fusec.targets.target import load

TARGET = load("h200")


def conv_relu(groups: int = 1) -> tuple[Graph, list[Node]]:
    graph = Graph()
    x = graph.add_input("x", TensorType((2, 8, 16, 16), DType.F16))
    w = graph.constant(np.ones((8, 8 // groups, 3, 3), np.float16))
    conv = graph.add(Conv((1, 1), (1, 1, 1, 1), (1, 1), groups), x, w)
    graph.set_outputs([graph.add(pw("relu"), conv)])
    return graph, [n for n in graph.nodes if n.op.name != "constant"]


def test_bytes_cross_the_border_of_the_step_only() -> None:
    _, nodes = conv_relu()
    tensor, weight = 2 * 8 * 16 * 16 * 2, 8 * 8 * 9 * 2
    fused = (step_us(nodes, TARGET) - TARGET.launch_us) * TARGET.memory_bandwidth / 1e6
    assert fused == pytest.approx(2 * tensor + weight)
    split = sum(step_us([n], TARGET) for n in nodes) - 2 * TARGET.launch_us
    assert split * TARGET.memory_bandwidth / 1e6 == pytest.approx(4 * tensor + weight)


def test_the_peak_is_that_of_the_operands_of_the_product() -> None:
    times = {}
    for dtype in DType.F32, DType.F16, DType.I8:
        graph = Graph()
        a = graph.add_input("a", TensorType((4096, 4096), dtype))
        product = graph.insert(MatMul(), [a, a])
        times[dtype] = step_us([product], TARGET) - TARGET.launch_us
    assert times[DType.F32] == pytest.approx(2 * 4096**3 / TARGET.flops["fp32"] * 1e6)
    assert times[DType.F16] == pytest.approx(2 * 4096**3 / TARGET.flops["fp16"] * 1e6)
    assert times[DType.I8] == pytest.approx(times[DType.F16] / 2)


def test_operations_of_products() -> None:
    _, (conv, relu) = conv_relu(groups=2)
    assert flops(conv) == 2 * (2 * 8 * 16 * 16) * (4 * 9)
    assert flops(relu) == 0
    graph = Graph()
    a = graph.add_input("a", TensorType((5, 3, 4), DType.F32))
    product = graph.insert(MatMul(), [a, graph.add_input("b", TensorType((4, 7), DType.F32))])
    assert flops(product) == 2 * 5 * 3 * 4 * 7
    x = graph.add_input("x", TensorType((1, 6, 5, 5), DType.F32))
    w = graph.add_input("w", TensorType((6, 4, 3, 3), DType.F32))
    up = graph.insert(ConvTranspose((2, 2), (0, 0, 0, 0), (1, 1), (0, 0)), [x, w])
    assert flops(up) == 2 * (6 * 5 * 5) * 4 * 9


def test_penalties_apply_to_convolutions_with_something_fused() -> None:
    _, nodes = conv_relu()
    assert penalty(nodes) == penalty(nodes, FAST) == 1.0
    assert penalty(nodes, RUNTIME) == penalty(nodes, GENERIC) == RUNTIME_COMPILED
    assert penalty(nodes[:1], RUNTIME) == 1.0
    _, nodes = conv_relu(groups=8)
    assert is_depthwise(nodes[0])
    assert penalty(nodes, FAST) == DEPTHWISE_FUSED > 13
    assert penalty(nodes[:1], FAST) == 1.0
    _, nodes = conv_relu(groups=4)
    assert not is_depthwise(nodes[0])


def test_integer_convolutions_lose_nothing_by_an_epilogue() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType((2, 8, 16, 16), DType.I8))
    conv = graph.add(Conv((1, 1), (1, 1, 1, 1), (1, 1)), x, graph.constant(np.ones((8, 8, 3, 3), np.int8)))
    wide = graph.add(Cast(DType.F32), conv)
    graph.set_outputs([wide])
    nodes = [node for node in graph.nodes if node.op.name != "constant"]
    assert penalty(nodes, RUNTIME) == 1.0
