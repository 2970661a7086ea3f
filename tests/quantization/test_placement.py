"""Test which nodes are quantised, and the reason for each that is not; batch norms are folded first."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from helpers import relative_l2
from onnx import ModelProto, helper, numpy_helper, version_converter
from quantization.models import images, linear_net, model, normal, residual_net, rows

import fusec
from fusec import frontends
from fusec.errors import FusecError, ModelError
from fusec.ir import DType
from fusec.ops import MatMul
from fusec.quantization.fold_batchnorm import fold_batchnorm
from fusec.quantization.placement import Placement
from fusec.runtime import Executable


def placed(proto: ModelProto, grouped: bool = True) -> tuple[list[str], dict[str, str]]:
    placement = Placement(frontends.Source(proto).standalone(13), activations=True, grouped=grouped, attention=False)
    return [layer.name for layer in placement.layers], {node.name: node.reason for node in placement.floats}


def convolution(inputs: int, outputs: int, groups: int = 1) -> ModelProto:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "conv", group=groups)]
    weights = {"w": normal(0, outputs, inputs // groups, 1, 1)}
    return model(nodes, {"x": [1, inputs, 4, 4]}, {"y": [1, outputs, 4, 4]}, weights)


@pytest.mark.parametrize(
    ("proto", "grouped", "reason"),
    [
        (convolution(16, 16), True, ""),
        (convolution(8, 32), True, "8 input channels: Tensor Cores need 16"),
        (convolution(32, 8), True, "8 output channels: Tensor Cores need 16"),
        (convolution(32, 32, 32), True, ""),
        (convolution(32, 32, 32), False, "1 channels a group: no fp8 kernel is that narrow"),
    ],
)
def test_convolutions(proto: ModelProto, grouped: bool, reason: str) -> None:
    layers, floats = placed(proto, grouped)
    assert (layers, floats) == ((["conv"], {}) if not reason else ([], {"conv": reason}))


def test_products() -> None:
    weights = {"w": normal(0, 16, 16), "v": normal(1, 16, 1), "d": np.eye(16), "u": np.ones(16, np.float32)}
    nodes = [
        helper.make_node("MatMul", ["w", "x"], ["a"], "left"),
        helper.make_node("MatMul", ["x", "v"], ["b"], "column"),
        helper.make_node("MatMul", ["x", "u"], ["c"], "vector"),
        helper.make_node("MatMul", ["x", "x"], ["e"], "square"),
        helper.make_node("Cast", ["x"], ["z"], "cast", to=11),
        helper.make_node("MatMul", ["z", "d"], ["f"], "wide"),
        helper.make_node("Softmax", ["a"], ["s"], "softmax"),
        helper.make_node("LayerNormalization", ["a", "u"], ["n"], "norm"),
    ]
    proto = model(nodes, {"x": [16, 16]}, {name: [] for name in "abcesnf"}, weights)
    for value in proto.graph.output:
        value.type.Clear()
    layers, floats = placed(proto)
    assert layers == ["left"]
    assert floats == {
        "column": "a matrix-vector product: bound by memory, not by arithmetic",
        "vector": "a matrix-vector product: bound by memory, not by arithmetic",
        "square": "a product of two computed values, as in attention",
        "wide": "its weights are float64",
        "softmax": "a softmax: its exponentials need float",
        "norm": "a norm: its sums need float",
    }


def test_a_weight_on_the_left_has_a_scale_per_row() -> None:
    weight = normal(0, 24, 16) * np.arange(1, 25, dtype=np.float32)[:, None]
    proto = model([helper.make_node("MatMul", ["w", "x"], ["y"], "p")], {"x": [16, 8]}, {"y": [24, 8]}, {"w": weight})
    x = rows(16, 8)
    quantised = fusec.quantize(proto, [x], calibration="max").model
    scale = next(t for t in quantised.graph.initializer if t.name == "w_scale")
    assert list(scale.dims) == [24]
    (got,) = fusec.compile(quantised.SerializeToString(), target="cpu").run(None, {"x": x})
    assert relative_l2(got, weight @ x) < 0.02


def test_products_of_one_tensor_share_the_scale_of_their_weights_in_fp8() -> None:
    weights = {
        name: normal(seed, 16, 16) * size for seed, (name, size) in enumerate((("q", 1.0), ("k", 4.0), ("o", 9.0)))
    }
    nodes = [
        helper.make_node("MatMul", ["x", "q"], ["a"], "query"),
        helper.make_node("MatMul", ["x", "k"], ["b"], "key"),
        helper.make_node("Add", ["a", "b"], ["c"], "sum"),
        helper.make_node("MatMul", ["c", "o"], ["y"], "out"),
    ]
    proto = model(nodes, {"x": [32, 16]}, {"y": [32, 16]}, weights)
    quantised = fusec.quantize(proto, rows(32, 16), format="fp8").model
    scales = {t.name: numpy_helper.to_array(t) for t in quantised.graph.initializer if t.name.endswith("_scale")}
    largest = {name: np.abs(array).max() for name, array in weights.items()}
    assert scales["q_scale"].shape == scales["o_scale"].shape == ()
    assert scales["q_scale"] == scales["k_scale"] == np.float32(largest["k"] / 448)
    assert scales["o_scale"] == np.float32(largest["o"] / 448)
    executable = fusec.compile(quantised.SerializeToString(), target="h200", simulate=True)
    assert isinstance(executable, Executable)
    products = [node for node in executable.compiled.graph.nodes if isinstance(node.op, MatMul)]
    assert [v.type.dtype for node in products for v in node.operands] == [DType.F8E4M3] * 6
    integers = fusec.quantize(proto, rows(32, 16), format="int8").model
    assert next(list(t.dims) for t in integers.graph.initializer if t.name == "q_scale") == [16]


def test_one_row_in_the_calibration_data_is_a_matrix_vector_product() -> None:
    with pytest.raises(
        FusecError, match=r"has no layer to quantise .product0: a matrix-vector product with this batch"
    ):
        fusec.quantize(linear_net(rows=1), rows(1))
    assert len(fusec.quantize(linear_net(), [rows(2)]).report.layers) == 3


def block(shortcut: str, reads: int = 1) -> ModelProto:
    """A convolution plus a shortcut. `reads`: readers of the convolution's result."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "w1"], ["a0"], "conv1"),
        helper.make_node("Mul", ["a0", "k"], ["a"], "factor"),
        helper.make_node("Conv", ["r", "w2"], ["b0"], "conv2"),
        helper.make_node("Relu", ["b0"], ["b1"], "relu2"),
        helper.make_node("Conv", ["b1", "w3"], ["b"], "conv3"),
        helper.make_node("Add", [shortcut, "b"], ["s"], "sum"),
    ]
    nodes += [helper.make_node("Relu", ["b"], [f"more{i}"], f"more{i}") for i in range(reads - 1)]
    weights = {f"w{i}": normal(i, 16, 16, 1, 1) for i in (1, 2, 3)} | {"k": np.float32(0.5)}
    shape: list[int | str] = [1, 16, 4, 4]
    outputs = {"s": shape} | {f"more{i}": shape for i in range(reads - 1)}
    return model(nodes, {"x": [1, 16, 4, 4]}, outputs, weights)


@pytest.mark.parametrize("shortcut", ["r", "a", "b1"])
def test_the_shortcut_of_a_sum_is_quantised(shortcut: str) -> None:
    """Of two convolutions, the one on the longer branch adds, so the other is the shortcut."""
    placement = Placement(
        frontends.Source(block(shortcut)).standalone(13), activations=True, grouped=True, attention=False
    )
    (layer,) = (layer for layer in placement.layers if layer.name == "sum")
    assert (layer.tensors, layer.follows) == ((shortcut,), "conv3")


def test_a_sum_without_a_convolution_to_compute_it() -> None:
    reason = "an addition without a convolution that could compute it"
    assert placed(block("r", reads=2))[1]["sum"] == reason


def test_batch_norms_are_folded_before_calibration() -> None:
    proto = frontends.Source(residual_net()).standalone(13)
    assert fold_batchnorm(proto) == 1
    assert "BatchNormalization" not in [node.op_type for node in proto.graph.node]
    outputs: list[Any] = []
    for each in (residual_net(), proto):
        session = onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"])
        outputs += session.run(None, {"x": images()})
    assert relative_l2(outputs[1], outputs[0]) < 1e-6


@pytest.mark.parametrize("why", ["another reader", "an output", "statistics from the batch", "computed statistics"])
def test_batch_norms_that_cannot_be_folded_stay(why: str) -> None:
    proto = residual_net()
    nodes = {node.name: node for node in proto.graph.node}
    if why == "another reader":
        proto.graph.node.append(helper.make_node("Relu", ["c1"], ["more"], "more"))
        proto.graph.output.append(helper.make_tensor_value_info("more", 1, ["N", 16, 8, 8]))
    elif why == "an output":
        proto.graph.output.append(helper.make_tensor_value_info("c1", 1, ["N", 16, 8, 8]))
    elif why == "statistics from the batch":
        nodes["norm1"].attribute.append(helper.make_attribute("training_mode", 1))
    else:
        proto.graph.input.append(helper.make_tensor_value_info("m", 1, [16]))
        nodes["norm1"].input[3] = "m"
    assert fold_batchnorm(frontends.Source(proto).standalone(13)) == 0


def test_a_model_that_cannot_be_converted_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: ModelProto, version: int) -> ModelProto:
        raise version_converter.ConvertError("no adapter")

    monkeypatch.setattr(version_converter, "convert_version", refuse)
    with pytest.raises(ModelError, match="<ModelProto>: onnx cannot convert it to opset 21: no adapter"):
        fusec.quantize(linear_net(), format="weights-int4")
