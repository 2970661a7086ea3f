"""Quantised ONNX models for tests: random layers in QDQ form, and a small CNN quantised by onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static

Array = np.ndarray[Any, Any]


@dataclass
class Layers:
    """An ONNX model under construction."""

    nodes: list[Any] = field(default_factory=list[Any])
    initializers: list[Any] = field(default_factory=list[Any])

    def constant(self, array: Array) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        result = name or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [result], name=f"n{len(self.nodes)}", **attributes))
        return result

    def rounded(self, x: str, scale: Array, zero: Array, name: str = "") -> str:
        """Quantise and dequantise a value."""
        s, z = self.constant(scale), self.constant(zero)
        return self.op("DequantizeLinear", self.op("QuantizeLinear", x, s, z), s, z, name=name)

    def weights(self, q: Array, scale: Array, zero: Array, axis: int = 0) -> str:
        operands = (self.constant(array) for array in (q, scale, zero))
        return self.op("DequantizeLinear", *operands, axis=axis)

    def model(self, shapes: dict[str, tuple[int, ...]], result: str) -> onnx.ModelProto:
        inputs = [helper.make_tensor_value_info(k, TensorProto.FLOAT, v) for k, v in shapes.items()]
        output = helper.make_tensor_value_info(result, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "quantised", inputs, [output], self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@dataclass(frozen=True)
class Layer:
    """A random layer. step: the scale of the result, so that one step of its integers is that."""

    model: onnx.ModelProto
    feeds: dict[str, Array]
    step: float


def _activation(rng: np.random.Generator) -> tuple[Array, Array]:
    """Draw a scale, and a zero point of a signed or unsigned byte, 0 (or 128) in half the cases."""
    dtype = rng.choice(np.array([np.int8, np.uint8], dtype=object))
    info = np.iinfo(dtype)
    middle = 0 if dtype is np.int8 else 128
    zero = middle if rng.random() < 0.5 else rng.integers(info.min, info.max, endpoint=True)
    return np.asarray(rng.uniform(0.01, 0.04), np.float32), np.asarray(zero, dtype)


def _weights(rng: np.random.Generator, shape: tuple[int, ...], channels: int) -> tuple[Array, Array, Array]:
    """Draw integers of 7 bits, because onnxruntime's sums of 8 saturate on some processors, and their scales."""
    several = rng.random() < 0.6
    scale = rng.uniform(0.001, 0.02, channels if several else ()).astype(np.float32)
    return rng.integers(-64, 64, shape).astype(np.int8), scale, np.zeros(scale.shape, np.int8)


def random_convolution(rng: np.random.Generator) -> Layer:
    """Draw a quantised convolution with a bias, sometimes a quantised residual and a relu, rounded at the end."""
    g, (n, c, size) = Layers(), (int(rng.integers(1, 3)), int(rng.choice([3, 4, 16, 20])), int(rng.integers(5, 12)))
    groups = int(rng.choice([1, 1, 1, c, 2 if c % 2 == 0 else 1]))
    k = groups * int(rng.integers(1, 5))
    side, stride = int(rng.choice([1, 3])), int(rng.choice([1, 2]))
    pad = int(rng.integers(0, side // 2 + 1))
    image = g.rounded("x", *_activation(rng))
    weight = g.weights(*_weights(rng, (k, c // groups, side, side), k))
    bias = g.constant(rng.standard_normal(k).astype(np.float32))
    window: dict[str, Any] = {"kernel_shape": [side] * 2, "strides": [stride] * 2, "pads": [pad] * 4, "group": groups}
    y = g.op("Conv", image, weight, bias, **window)
    shapes, out = {"x": (n, c, size, size)}, (size + 2 * pad - side) // stride + 1
    if rng.random() < 0.4:
        shapes["z"] = (n, k, out, out)
        y = g.op("Add", y, g.rounded("z", *_activation(rng)))
    if rng.random() < 0.5:
        y = g.op("Relu", y)
    scale, zero = _activation(rng)
    y = g.rounded(y, scale, zero, name="y")
    return Layer(g.model(shapes, y), _feeds(rng, shapes), float(scale))


def random_product(rng: np.random.Generator) -> Layer:
    """Draw a quantised product by a weight (a Gemm or MatMul) or of two activations, rounded at the end."""
    g, (b, m, k, n) = Layers(), (int(v) for v in rng.integers(1, 24, 4))
    left = g.rounded("x", *_activation(rng))
    kind, shapes = rng.integers(3), {"x": (b, m, k)}
    if kind == 0:
        y = g.op("MatMul", left, g.weights(*_weights(rng, (k, n), n), axis=1))
    elif kind == 1:
        shapes = {"x": (m, k)}
        bias = g.constant(rng.standard_normal(n).astype(np.float32))
        y = g.op("Gemm", left, g.weights(*_weights(rng, (n, k), n)), bias, transB=1)
    else:
        shapes["z"] = (b, k, n)
        y = g.op("MatMul", left, g.rounded("z", *_activation(rng)))
    scale, zero = _activation(rng)
    y = g.rounded(y, scale, zero, name="y")
    return Layer(g.model(shapes, y), _feeds(rng, shapes), float(scale))


def _feeds(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def run_onnxruntime(model: onnx.ModelProto | str, feeds: dict[str, Array]) -> Array:
    """Run a model with onnxruntime's optimisations, which choose its integer kernels."""
    data = model if isinstance(model, str) else model.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return np.asarray(onnxruntime.InferenceSession(data, options).run(None, feeds)[0])


# a small CNN -------------------------------------------------------------------------------------------

IMAGE = (2, 16, 16, 16)


def small_cnn() -> onnx.ModelProto:
    """Make a CNN with a pool, a residual block, a strided convolution, a global mean and a Gemm."""
    g, rng = Layers(), np.random.default_rng(0)

    def conv(x: str, inputs: int, outputs: int, stride: int = 1) -> str:
        w = rng.standard_normal((outputs, inputs, 3, 3)) / np.sqrt(9 * inputs)
        b = rng.standard_normal(outputs) / 8
        operands = [g.constant(v.astype(np.float32)) for v in (w, b)]
        return g.op("Conv", x, *operands, kernel_shape=[3, 3], strides=[stride] * 2, pads=[1] * 4)

    first = g.op("MaxPool", g.op("Relu", conv("x", 16, 16)), kernel_shape=[2, 2], strides=[2, 2])
    inner = conv(g.op("Relu", conv(first, 16, 16)), 16, 16)
    last = g.op("Relu", conv(g.op("Relu", g.op("Add", inner, first)), 16, 32, stride=2))
    flat = g.op("Flatten", g.op("GlobalAveragePool", last))
    w, b = rng.standard_normal((16, 32)) / np.sqrt(32), rng.standard_normal(16)
    g.op("Gemm", flat, *(g.constant(v.astype(np.float32)) for v in (w, b)), transB=1, name="y")
    return g.model({"x": IMAGE}, "y")


class _Images(CalibrationDataReader):
    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self._images = iter([{"x": rng.standard_normal(IMAGE).astype(np.float32)} for _ in range(4)])

    def get_next(self) -> Any:
        return next(self._images, None)


def quantised_cnn(
    folder: Path, symmetric: bool, per_channel: bool, unsigned: bool = False, form: QuantFormat = QuantFormat.QDQ
) -> Path:
    """Quantise the small CNN by onnxruntime's `quantize_static`.

    Weights have 7 bits, because onnxruntime's sums of 8 saturate on some processors.
    """
    path = folder / "cnn.onnx"
    onnx.save(small_cnn(), path)
    quantize_static(
        path,
        folder / f"cnn.{form.name}.onnx",
        _Images(),
        quant_format=form,
        per_channel=per_channel,
        reduce_range=True,
        activation_type=QuantType.QUInt8 if unsigned else QuantType.QInt8,
        weight_type=QuantType.QInt8,
        extra_options={"ActivationSymmetric": symmetric, "WeightSymmetric": True},
    )
    return folder / f"cnn.{form.name}.onnx"


# quantised at run time ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class DynamicLayers:
    """A model that onnxruntime's `quantize_dynamic` made, and its feeds."""

    model: onnx.ModelProto
    feeds: dict[str, Array]


def dynamic_products(folder: Path, kind: QuantType, per_channel: bool) -> DynamicLayers:
    """Quantise two products with a relu between them, whose activations get scale and zero point at run time."""
    g, rng = Layers(), np.random.default_rng(2)

    def weight(*shape: int) -> str:
        return g.constant((rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32))

    inner = g.op("Relu", g.op("Add", g.op("MatMul", "x", weight(64, 128)), weight(128)))
    g.op("MatMul", inner, weight(128, 64), name="y")
    return _dynamic(folder, g.model({"x": (2, 32, 64)}, "y"), kind, per_channel)


def dynamic_convolution(folder: Path, kind: QuantType, per_channel: bool) -> DynamicLayers:
    """Quantise a convolution with pads, whose image gets scale and zero point at run time."""
    g, rng = Layers(), np.random.default_rng(3)
    w = g.constant((rng.standard_normal((32, 16, 3, 3)) / 12).astype(np.float32))
    g.op("Relu", g.op("Conv", "x", w, kernel_shape=[3, 3], pads=[1] * 4), name="y")
    return _dynamic(folder, g.model({"x": (2, 16, 8, 8)}, "y"), kind, per_channel)


def _dynamic(folder: Path, model: onnx.ModelProto, kind: QuantType, per_channel: bool) -> DynamicLayers:
    source, made = folder / "float.onnx", folder / "dynamic.onnx"
    onnx.save(model, source)
    quantize_dynamic(source, made, weight_type=kind, per_channel=per_channel)
    shape = tuple(d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim)
    return DynamicLayers(onnx.load(made), _feeds(np.random.default_rng(4), {"x": shape}))
