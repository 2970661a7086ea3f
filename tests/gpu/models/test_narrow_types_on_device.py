"""Test types of 8 bits and fewer on a GPU: constants, inputs, outputs and all steps, bit by bit as in simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from frontends.onnx.contrib.test_models import decoder_layer
from frontends.onnx.models import run
from gpu.models.narrow_graphs import DTYPES, GRAPHS, assert_equal, moves
from onnx import TensorProto, helper

import fusec
from fusec.ir import DType
from fusec.lowering.packing import to_codes
from fusec.reference import evaluate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tune", ["none", "quick"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.value)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_of_narrow_types(name: str, dtype: DType, tune: str) -> None:
    graph, feeds = GRAPHS[name](dtype)
    want = evaluate(graph, feeds)
    exe = fusec.compile(graph, tune=tune)
    assert exe.device != "simulated"
    for _ in range(4):  # step by step, recorded, and replayed
        assert_equal(dict(zip(graph.output_names, exe.run(None, feeds), strict=True)), want)
    assert exe.verify().ok


@pytest.mark.parametrize("dtype", [DType.F8E4M3, DType.F8E5M2, DType.I4])
def test_arrays_on_the_device_are_bytes(dtype: DType) -> None:
    import cupy

    graph, feeds = moves(dtype)
    want = evaluate(graph, feeds)
    exe = fusec.compile(graph, tune="none")
    codes = to_codes(feeds["q"].reshape(-1), dtype)
    given = {"q": cupy.asarray(codes if dtype.bits < 8 else codes.reshape(4, 37)), "x": cupy.asarray(feeds["x"])}
    for _ in range(4):
        results = dict(zip(graph.output_names, exe.run(None, given), strict=True))
        for output in ("t", "v", "first"):
            got, right = results[output].get().reshape(-1), to_codes(want[output].reshape(-1), dtype)
            if dtype.bits == 8:  # NaN has several codes
                got, right = (codes.view(dtype.numpy).astype(np.float32) for codes in (got, right))
            np.testing.assert_array_equal(got, right)


def test_a_file_with_narrow_weights(tmp_path: Path) -> None:
    graph, feeds = GRAPHS["embedding"](DType.I4)
    path = tmp_path / "embedding.fusec"
    fusec.compile(graph, tune="none").save(path)
    got = fusec.load(path).run(None, feeds)
    assert_equal(dict(zip(graph.output_names, got, strict=True)), evaluate(graph, feeds))


@pytest.mark.parametrize("to", [TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2, TensorProto.INT4, TensorProto.UINT4])
def test_quantise_and_dequantise(to: int) -> None:
    x = np.random.default_rng(3).standard_normal((16, 40)).astype(np.float32) * 3
    scale = onnx.numpy_helper.from_array(np.array(0.25, np.float32), "s")
    zero = helper.make_tensor("z", to, [], [0])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    info = [helper.make_tensor_value_info(n, t, [16, 40]) for n, t in (("x", 1), ("q", to), ("y", 1))]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:], [scale, zero])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    here, there = fusec.compile(proto), fusec.compile(proto, simulate=True)
    for _ in range(3):
        for got, want in zip(here.run(None, {"x": x}), there.run(None, {"x": x}), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("length", [1, 5])
def test_a_decoder_layer_of_onnxruntime(length: int) -> None:
    """Weights of 4 bits, grouped attention with a cache, norms with a residual."""
    proto, feeds = decoder_layer(np.random.default_rng(length), length, 0 if length > 1 else 6)
    exe = fusec.compile(proto, tune="none")
    for _ in range(3):
        for ours, theirs in zip(exe.run(None, feeds), run(proto, feeds), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-3)
