"""Test whole models of onnxruntime's ops: compiled, in simulation, and compared with onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model, run
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

import fusec

node = helper.make_node


def _own(op: str, inputs: list[str], outputs: list[str], **given: Any) -> onnx.NodeProto:
    return node(op, inputs, outputs, domain="com.microsoft", **given)


def _packed(rng: np.random.Generator, n: int, k: int, block: int) -> dict[str, np.ndarray]:
    """Weights of 4 bits [n, k] with scales, drawn."""
    codes = rng.integers(0, 256, (n, k // block, block // 2)).astype(np.uint8)
    return {"b": codes, "s": rng.uniform(0.005, 0.02, n * (k // block)).astype(np.float32)}


def decoder_layer(rng: np.random.Generator, length: int, past: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A layer as onnxruntime's model builder writes it: norms, weights of 4 bits, grouped attention with a cache."""
    width, heads, groups, d = 64, 4, 2, 16
    held: dict[str, np.ndarray] = {"norm": rng.uniform(0.5, 1.5, width).astype(np.float32)}
    for name, (n, k) in {"qkv": (heads * d + 2 * groups * d, width), "o": (width, width), "up": (128, width)}.items():
        held |= {f"{name}.{part}": a for part, a in _packed(rng, n, k, 32).items()}
    angle = rng.uniform(-3, 3, (32, d // 2))
    held |= {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
    held["total"] = np.array(past + length, np.int32)

    def product(x: str, name: str, y: str, n: int, k: int) -> onnx.NodeProto:
        return _own("MatMulNBits", [x, f"{name}.b", f"{name}.s"], [y], K=k, N=n, block_size=32, bits=4)

    attention = ["qkv", "", "", "past_k", "past_v", "lengths", "total", "cos", "sin"]
    nodes = [
        node("SimplifiedLayerNormalization", ["x", "norm"], ["x1"], epsilon=1e-5),
        product("x1", "qkv", "qkv", heads * d + 2 * groups * d, width),
        _own("GroupQueryAttention", attention, ["a", "k", "v"], num_heads=heads, kv_num_heads=groups, do_rotary=1),
        product("a", "o", "a1", width, width),
        _own("SkipSimplifiedLayerNormalization", ["x", "a1", "norm"], ["h", "", "", "r"], epsilon=1e-5),
        product("h", "up", "u", 128, width),
        _own("QuickGelu", ["u"], ["y"]),
    ]
    shapes = {"x": (2, length, width), "past_k": (2, groups, past, d), "past_v": (2, groups, past, d)}
    feeds: dict[str, np.ndarray] = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    feeds["lengths"] = np.full(2, past + length - 1, np.int32)
    inputs = [info(n, a.shape, helper.np_dtype_to_tensor_dtype(a.dtype)) for n, a in feeds.items()]
    proto = model(nodes, inputs, ["y", "r", "k", "v"], held)
    proto.opset_import.add(domain="com.microsoft", version=1)
    return proto, feeds


@pytest.mark.cudnn
@pytest.mark.parametrize("length", [1, 5])
def test_a_decoder_layer(length: int) -> None:
    proto, feeds = decoder_layer(np.random.default_rng(length), length, 0 if length > 1 else 6)
    exe = fusec.compile(proto, target="h200", simulate=True)
    for ours, theirs in zip(exe.run(None, feeds), run(proto, feeds), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


class _Images(CalibrationDataReader):
    def __init__(self, images: list[np.ndarray]):
        self._images = iter(images)

    def get_next(self) -> dict[str, np.ndarray]:
        """Return the next input. The base class declares a dict, and ends at None, too."""
        image = next(self._images, None)
        done: Any = None
        return done if image is None else {"x": image}


@pytest.mark.cudnn
@pytest.mark.parametrize("form", [QuantFormat.QOperator, QuantFormat.QDQ])
def test_a_network_that_onnxruntime_quantised(form: QuantFormat, tmp_path: Path) -> None:
    """Its QOperator form has QLinearAdd, QLinearConcat, QLinearGlobalAveragePool, QGemm and more."""
    rng = np.random.default_rng(5)
    held = {f"w{i}": (rng.standard_normal((8, c, 3, 3)) / 8).astype(np.float32) for i, c in enumerate((4, 8))}
    held |= {"m": rng.standard_normal((10, 16)).astype(np.float32), "b": rng.standard_normal(10).astype(np.float32)}
    nodes = [
        node("Conv", ["x", "w0"], ["a"], pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["a1"]),
        node("Conv", ["a1", "w1"], ["c"], pads=[1, 1, 1, 1]),
        node("Add", ["c", "a1"], ["d"]),
        node("LeakyRelu", ["d"], ["d1"], alpha=0.1),
        node("Sigmoid", ["c"], ["g"]),
        node("Mul", ["d1", "g"], ["e"]),
        node("Concat", ["e", "a1"], ["f"], axis=1),
        node("GlobalAveragePool", ["f"], ["p"]),
        node("Flatten", ["p"], ["p1"]),
        node("Gemm", ["p1", "m", "b"], ["y"], transB=1),
    ]
    proto = model(nodes, [info("x", (2, 4, 9, 9))], [info("y", (2, 10), TensorProto.FLOAT)], held, opset=17)
    images = [rng.standard_normal((2, 4, 9, 9)).astype(np.float32) for _ in range(4)]
    source, target = tmp_path / "float.onnx", tmp_path / "quantised.onnx"
    onnx.save(proto, source)
    types: dict[str, Any] = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(source, target, _Images(images), quant_format=form, **types)
    quantised = onnx.load(target)
    if form is QuantFormat.QOperator:
        assert {"QLinearAdd", "QLinearConcat", "QLinearGlobalAveragePool", "QGemm"} <= {
            n.op_type for n in quantised.graph.node
        }
    (want,) = run(quantised, {"x": images[0]})
    (got,) = fusec.compile(quantised, target="h200", simulate=True).run(None, {"x": images[0]})
    step = max(
        float(onnx.numpy_helper.to_array(t).max()) for t in quantised.graph.initializer if t.name.startswith("y_scale")
    )
    assert np.abs(got - want).max() <= 3 * step  # one step at each of a few roundings
    assert np.abs(got - run(proto, {"x": images[0]})[0]).max() <= 12 * step
