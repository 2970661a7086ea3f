"""Test that the benchmarks' dynamic quantisation gives the nodes that onnxruntime's gives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import relative_l2
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import QuantType
from quantized.models import Layers, dynamic_products

from benchmarks.common.dynamic_quantization import quantized_dynamically


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_products_with_constant_weights_are_quantised(tmp_path: Path, rng: np.random.Generator) -> None:
    layers = dynamic_products(tmp_path, QuantType.QInt8, per_channel=False)
    source = onnx.load(tmp_path / "float.onnx")
    made = onnx.load_from_string(quantized_dynamically(source.SerializeToString()))
    counts = [Counter(node.op_type for node in model.graph.node) for model in (made, layers.model)]
    assert counts[0] == counts[1]
    (got,), (want,) = (ReferenceEvaluator(model).run(None, layers.feeds) for model in (made, source))
    assert relative_l2(got, want) < 0.02


def test_an_activation_is_quantised_once_and_a_product_of_two_is_not(rng: np.random.Generator) -> None:
    g = Layers()
    first, second = (g.op("MatMul", "x", g.constant(rng.standard_normal((8, 8)).astype(np.float32))) for _ in "ab")
    g.op("MatMul", first, second, name="y")
    made = onnx.load_from_string(quantized_dynamically(g.model({"x": (8, 8)}, "y").SerializeToString()))
    counts = Counter(node.op_type for node in made.graph.node)
    assert (counts["DynamicQuantizeLinear"], counts["MatMulInteger"], counts["MatMul"]) == (1, 2, 1)
    assert not any(each.data_type == onnx.TensorProto.FLOAT and each.dims for each in made.graph.initializer)
