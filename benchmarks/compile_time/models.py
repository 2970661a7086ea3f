"""Make the models whose compile time and memory are measured: random graphs, and ONNX files with many weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from fusec.ir import DType, Graph, TensorType
from fusec.ops import MatMul, pw

SIDE = 4096  # of a square weight
SHAPES = ((8, 64, 32), (8, 1, 32), (64, 1), (8, 64, 1), (32,), (4, 64, 32), (4, 1, 32))
UNARY = ("relu", "tanh", "sigmoid", "neg", "abs", "exp", "sqrt", "erf", "gelu", "swish", "sin", "cos", "softplus")
BINARY = ("add", "mul", "sub", "max", "min", "div")
RECENT = 60  # most operands are among the last values, of this number


def pointwise(nodes: int) -> Graph:
    """Make a random graph of unary and binary ops over mixed shapes, whose values are used several times."""
    rng, graph = random.Random(0), Graph("pointwise")
    values = [graph.add_input(f"x{i}", TensorType(shape, DType.F32)) for i, shape in enumerate(SHAPES)]
    while len(graph) < nodes:
        near = values[-RECENT:] if rng.random() < 0.9 else values
        first, second = rng.choice(near), rng.choice(near)
        if rng.random() < 0.45:
            values.append(graph.add(pw(rng.choice(UNARY)), first))
        elif _broadcasts(first.type.shape, second.type.shape):
            values.append(graph.add(pw(rng.choice(BINARY)), first, second))
    graph.set_outputs([value for value in values if value.node is not None and not value.uses])
    return graph


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))


def weights(products: int) -> Graph:
    """Make a sequence of products with square fp32 weights of 67 MB each."""
    rng, graph = np.random.default_rng(0), Graph("weights")
    value = graph.add_input("x", TensorType((8, SIDE), DType.F32))
    for number in range(products):
        weight = rng.standard_normal((SIDE, SIDE), dtype=np.float32)
        value = graph.add(MatMul(), value, graph.constant(weight, f"w{number}"))
    graph.set_outputs([value])
    return graph


class _OnnxGraph:
    """Collects nodes and initializers of an ONNX model."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []

    def constant(self, array: np.ndarray, name: str) -> str:
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        """Draw a weight that keeps the scale of activations."""
        drawn = self.rng.standard_normal(shape, dtype=np.float32) / np.float32(max(shape)) ** np.float32(0.5)
        return self.constant(drawn, name)

    def add(self, op: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def model(self, shape: tuple[int, ...], output: str) -> ModelProto:
        """Return the model with an input x and an output of the same shape."""
        inputs, outputs = (helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("x", output))
        graph = helper.make_graph(self.nodes, "net", [inputs], [outputs], self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def products(count: int) -> ModelProto:
    """Make the model of `weights` as ONNX."""
    made, value = _OnnxGraph(), "x"
    for i in range(count):
        value = made.add("MatMul", [value, made.weight(f"w{i}", SIDE, SIDE)], f"v{i}")
    return made.model((8, SIDE), value)


def quantised_products(count: int) -> ModelProto:
    """Make the same with weights and activations of 8 bits, in QDQ form."""
    made, value = _OnnxGraph(), "x"
    scale = made.constant(np.float32(2.0**-5), "scale")
    zero = made.constant(np.int8(0), "zero")
    for i in range(count):
        codes = made.constant(made.rng.integers(-127, 128, (SIDE, SIDE), dtype=np.int8), f"w{i}")
        weight = made.add("DequantizeLinear", [codes, made.constant(np.float32(2.0**-12), f"s{i}"), zero], f"d{i}")
        rounded = made.add("QuantizeLinear", [value, scale, zero], f"q{i}")
        value = made.add("MatMul", [made.add("DequantizeLinear", [rounded, scale, zero], f"a{i}"), weight], f"v{i}")
    return made.model((8, SIDE), value)


def encoder(layers: int, hidden: int = 768, heads: int = 12, length: int = 128) -> ModelProto:
    """Make a transformer encoder as BERT's, without embeddings: 7.1 million weights a layer."""
    made, value = _OnnxGraph(), "x"
    split = made.constant(np.array([0, 0, heads, hidden // heads]), "split")
    join = made.constant(np.array([0, 0, hidden]), "join")
    scale = made.constant(np.float32((hidden // heads) ** -0.5), "scale")

    def linear(x: str, name: str, rows: int, columns: int) -> str:
        product = made.add("MatMul", [x, made.weight(f"{name}.w", rows, columns)], f"{name}.product")
        return made.add("Add", [product, made.weight(f"{name}.b", columns)], name)

    def norm(x: str, name: str) -> str:
        factors = [made.weight(f"{name}.s", hidden), made.weight(f"{name}.b", hidden)]
        return made.add("LayerNormalization", [x, *factors], name)

    for i in range(layers):
        parts: list[str] = []
        for letter, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            rows = made.add("Reshape", [linear(value, f"{i}.{letter}", hidden, hidden), split], f"{i}.{letter}.heads")
            parts.append(made.add("Transpose", [rows], f"{i}.{letter}.t", perm=order))
        scores = made.add("Mul", [made.add("MatMul", parts[:2], f"{i}.qk"), scale], f"{i}.scores")
        mixed = made.add("MatMul", [made.add("Softmax", [scores], f"{i}.p", axis=-1), parts[2]], f"{i}.mixed")
        rows = made.add("Transpose", [mixed], f"{i}.rows", perm=[0, 2, 1, 3])
        attended = linear(made.add("Reshape", [rows, join], f"{i}.joined"), f"{i}.out", hidden, hidden)
        value = norm(made.add("Add", [value, attended], f"{i}.r1"), f"{i}.n1")
        inner = made.add("Gelu", [linear(value, f"{i}.f1", hidden, 4 * hidden)], f"{i}.gelu")
        value = norm(made.add("Add", [value, linear(inner, f"{i}.f2", 4 * hidden, hidden)], f"{i}.r2"), f"{i}.n2")
    return made.model((1, length, hidden), value)


def light(name: str) -> ModelProto:
    """Return a model that the onnx package ships, with random weights."""
    from examples import models

    return models.randomised(onnx.load(models.light(name)), seed=1)


FILES: dict[str, Callable[[], ModelProto]] = {
    "1 GB": lambda: products(16),
    "1 GB, 8 bits": lambda: quantised_products(64),
    "resnet50": lambda: light("resnet50"),
    "vgg19": lambda: light("vgg19"),
    "encoder": lambda: encoder(12),
}


def write(name: str, path: Path) -> None:
    """Write a model of FILES."""
    path.write_bytes(FILES[name]().SerializeToString())
