"""Small models to quantise: what exporters write, with seeded weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper


def model(
    nodes: list[NodeProto],
    inputs: dict[str, list[int | str]],
    outputs: dict[str, list[int | str]],
    weights: dict[str, Any],
    opset: int = 17,
) -> ModelProto:
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def normal(seed: int, first: int, *rest: int) -> np.ndarray:
    """Normal numbers, scaled so that a layer keeps the scale of its input."""
    fan = int(np.prod(rest)) if len(rest) > 1 else first
    return (np.random.default_rng(seed).standard_normal((first, *rest)) / np.sqrt(fan)).astype(np.float32)


def residual_net(batch: int | str = "N", channels: int = 16) -> ModelProto:
    """A narrow convolution, a residual block with batch norms, pooling, and a linear layer."""
    c = channels
    ones = np.ones(c, np.float32)
    rng = np.random.default_rng(5)
    weights = {
        "w0": normal(0, c, 3, 3, 3),
        "w1": normal(1, c, c, 3, 3),
        "w2": normal(2, c, c, 3, 3),
        "b0": 0.1 * normal(3, c),
        "g": (1 + 0.3 * rng.random(c)).astype(np.float32),
        "beta": (0.2 * rng.standard_normal(c)).astype(np.float32),
        "mean": (0.2 * rng.standard_normal(c)).astype(np.float32),
        "var": (ones + rng.random(c)).astype(np.float32),
        "w3": normal(4, c, 10),
        "b3": normal(6, 10),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b0"], ["c0"], "stem", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c0"], ["r0"], "relu0"),
        helper.make_node("Conv", ["r0", "w1"], ["c1"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c1", "g", "beta", "mean", "var"], ["n1"], "norm1"),
        helper.make_node("Relu", ["n1"], ["r1"], "relu1"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], "conv2", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c2", "r0"], ["s"], "sum"),
        helper.make_node("Relu", ["s"], ["r2"], "relu2"),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["y"], "linear"),
    ]
    return model(nodes, {"x": [batch, 3, 8, 8]}, {"y": [batch, 10]}, weights)


def linear_net(rows: int | str = "N", depth: int = 3, width: int = 48, opset: int = 17) -> ModelProto:
    """Products by a weight with biases and activations, as linear layers are exported."""
    nodes: list[NodeProto] = []
    weights: dict[str, Any] = {}
    value = "x"
    for i in range(depth):
        weights |= {f"w{i}": normal(i, width, width), f"b{i}": 0.1 * normal(90 + i, width)}
        nodes += [
            helper.make_node("MatMul", [value, f"w{i}"], [f"m{i}"], f"product{i}"),
            helper.make_node("Add", [f"m{i}", f"b{i}"], [f"a{i}"], f"bias{i}"),
            helper.make_node("Tanh", [f"a{i}"], [f"t{i}"], f"tanh{i}"),
        ]
        value = f"t{i}"
    return model(nodes, {"x": [rows, width]}, {value: [rows, width]}, weights, opset)


def images(samples: int = 16, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((samples, 3, 8, 8)).astype(np.float32)


def rows(samples: int = 64, width: int = 48, seed: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((samples, width)).astype(np.float32)
