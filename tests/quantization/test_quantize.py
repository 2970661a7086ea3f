"""Test quantised models: standard ONNX that onnxruntime and fusec run to the same answer, close to the float model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers import relative_l2
from onnx import ModelProto, helper, numpy_helper
from quantization.models import images, linear_net, model, normal, residual_net, rows

import fusec
from fusec import driver, frontends
from fusec.errors import CheckError, FusecError
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.ir import DType
from fusec.quantization.choose_float import choose_float
from fusec.quantization.placement import Placement
from fusec.quantization.quantize_options import QuantizeOptions
from fusec.quantization.report import QuantizationReport

FORMATS = ("int8", "fp8", "weights-int8", "weights-int4")
# signal-to-noise in dB that a net of few layers keeps: 6 dB per bit, less what a few layers add up
KEEPS = {"int8": 30.0, "fp8": 22.0, "weights-int8": 35.0, "weights-int4": 14.0}


def in_onnxruntime(proto: ModelProto, feeds: dict[str, np.ndarray], as_written: bool = True) -> list[Any]:
    """Run in onnxruntime: the nodes as they are written, or with integer kernels."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if as_written:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(result) for result in session.run(None, feeds)]


def in_fusec(proto: ModelProto, feeds: dict[str, np.ndarray]) -> list[Any]:
    shapes = {name: array.shape for name, array in feeds.items()}
    return fusec.compile(proto.SerializeToString(), target="cpu", shapes=shapes).run(None, feeds)


def kinds(proto: ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("net", ["residual", "linear"])
def test_onnxruntime_and_fusec_compute_the_same(format: str, net: str) -> None:
    proto, x = (residual_net(), images()) if net == "residual" else (linear_net(), rows())
    quantised = fusec.quantize(proto, x, format=format, report=True)
    onnx.checker.check_model(quantised.model, full_check=True)
    (exact,) = in_onnxruntime(proto, {"x": x})
    (theirs,) = in_onnxruntime(quantised.model, {"x": x})
    (ours,) = in_fusec(quantised.model, {"x": x})
    # a value next to the border of two codes may round to either: one step of one element at a time
    assert relative_l2(ours, theirs) < (2e-3 if "weights" not in format else 1e-6)
    noise = -20 * np.log10(relative_l2(theirs, exact))
    assert noise > KEEPS[format]
    (told,) = quantised.report.outputs.values()
    assert told == pytest.approx(noise, abs=2.0)  # measured on the first 8 samples


@pytest.mark.gpu
@pytest.mark.parametrize("calibration", ["max", "entropy"])
def test_a_gpu_calibrates_as_the_host(calibration: str) -> None:
    """Sums are in another order there, so magnitudes differ by their rounding."""
    here, there = (
        fusec.quantize(residual_net(), images(), calibration=calibration, report=True, target=target).report.edges
        for target in ("cpu", "auto")
    )
    assert [edge.tensor for edge in there] == [edge.tensor for edge in here]
    for one, other in zip(here, there, strict=True):
        assert other.largest == pytest.approx(one.largest, rel=1e-5)
        assert other.threshold == pytest.approx(one.threshold, rel=0.02)
        assert other.sqnr == pytest.approx(one.sqnr, abs=0.5)


@pytest.mark.parametrize("format", ["int8", "weights-int8", "weights-int4"])
def test_onnxruntimes_integer_kernels_take_it(format: str) -> None:
    """With all optimisations onnxruntime replaces Q/DQ by integer arithmetic, which rounds in other places."""
    x = images()
    quantised = fusec.quantize(residual_net(), x, format=format)
    (fast,) = in_onnxruntime(quantised.model, {"x": x}, as_written=False)
    (exact,) = in_onnxruntime(residual_net(), {"x": x})
    assert -20 * np.log10(relative_l2(fast, exact)) > KEEPS[format]


def test_names_and_structure_stay() -> None:
    """Batch norms are folded, Q/DQ pairs appear, all other nodes and tensors keep their names."""
    quantised = fusec.quantize(residual_net(), images()).model
    source = [node for node in residual_net().graph.node if node.op_type != "BatchNormalization"]
    kept = [
        node for node in quantised.graph.node if "Quantize" not in node.op_type and "Dequantize" not in node.op_type
    ]
    assert [(node.name, node.op_type) for node in kept] == [(node.name, node.op_type) for node in source]
    assert [v.name for v in (*quantised.graph.input, *quantised.graph.output)] == ["x", "y"]
    pairs = {node.name for node in quantised.graph.node if node.op_type == "QuantizeLinear"}
    # the residual input and the first convolution share one pair
    assert pairs == {"r0_QuantizeLinear", "r1_QuantizeLinear", "f_QuantizeLinear"}
    inputs = {node.name: list(node.input) for node in quantised.graph.node}
    assert inputs["sum"] == ["c2", "r0_DequantizeLinear_Output"]
    assert inputs["conv1"][0] == "r0_DequantizeLinear_Output"
    assert inputs["stem"] == ["x", "w0", "b0"]
    assert inputs["linear"][2] == "b3"  # a bias stays in float
    weights = {t.name: numpy_helper.to_array(t) for t in quantised.graph.initializer}
    assert weights["w1_folded_quantized"].dtype == np.int8
    assert "w1" not in weights
    assert weights["w1_folded_scale"].shape == (16,)


def test_the_model_is_not_changed() -> None:
    proto = residual_net()
    before = proto.SerializeToString()
    fusec.quantize(proto, images(), report=True)
    assert proto.SerializeToString() == before


def test_blocks_of_four_bits() -> None:
    """Blocks run along the inputs of a product; a last block may be shorter."""
    weight = normal(0, 40, 24)
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], "g", transB=1)]
    proto = model(nodes, {"x": [4, 40]}, {"y": [4, 24]}, {"w": np.ascontiguousarray(weight.T)}, opset=13)
    quantised = fusec.quantize(proto, format="weights-int4", block_size=16).model
    assert quantised.opset_import[0].version == 21
    (node,) = (n for n in quantised.graph.node if n.op_type == "DequantizeLinear")
    attributes = {a.name: a.i for a in node.attribute}
    assert attributes == {"axis": 1, "block_size": 16}
    scale = next(numpy_helper.to_array(t) for t in quantised.graph.initializer if t.name == "w_scale")
    assert scale.shape == (24, 3)
    for i in range(3):  # of the largest weight as code 7, 7.5 or 8, what leaves the least error in each block
        part = weight.T[:, 16 * i : 16 * i + 16]
        tried = [np.abs(part).max(1, keepdims=True) / np.float32(code) for code in (7, 7.5, 8)]
        errors = [np.square(np.clip(np.rint(part / s), -8, 7) * s - part).sum(1) for s in tried]
        best = np.argmin(errors, axis=0)
        assert scale[:, i] == pytest.approx([tried[b][row, 0] for row, b in enumerate(best)])
        assert 0 < np.count_nonzero(best) < 24
    x = rows(4, 40)
    (theirs,), (ours,) = in_onnxruntime(quantised, {"x": x}), in_fusec(quantised, {"x": x})
    assert relative_l2(ours, theirs) < 1e-6
    assert 0.01 < relative_l2(theirs, x @ weight) < 0.2


def test_a_weight_that_is_computed_from_constants() -> None:
    weights = {"w": normal(0, 32, 48)}
    nodes = [
        helper.make_node("Transpose", ["w"], ["wt"], "turn", perm=[1, 0]),
        helper.make_node("MatMul", ["x", "wt"], ["y"], "product"),
    ]
    quantised = fusec.quantize(model(nodes, {"x": ["N", 48]}, {"y": ["N", 32]}, weights), rows()).model
    assert "Transpose" not in kinds(quantised)
    (ours,) = in_fusec(quantised, {"x": rows()})
    assert relative_l2(ours, rows() @ weights["w"].T) < 0.03


def test_pooled_and_unpooled_readers_share_a_scale() -> None:
    """So `QuantizeLinear` can move before the pooling."""
    weights = {"w1": normal(0, 16, 16, 1, 1), "w2": normal(1, 16, 16, 1, 1)}
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], "relu"),
        helper.make_node("MaxPool", ["r"], ["p"], "pool", kernel_shape=[2, 2]),
        helper.make_node("Conv", ["r", "w1"], ["a"], "conv1"),
        helper.make_node("Conv", ["p", "w2"], ["b"], "conv2"),
    ]
    outputs: dict[str, list[int | str]] = {"a": [2, 16, 6, 6], "b": [2, 16, 5, 5]}
    proto = model(nodes, {"x": [2, 16, 6, 6]}, outputs, weights)
    x = np.random.default_rng(0).standard_normal((2, 16, 6, 6)).astype(np.float32)
    quantised = fusec.quantize(proto, x, calibration="max").model
    scales = {t.name: numpy_helper.to_array(t) for t in quantised.graph.initializer}
    assert scales["r_scale"] == scales["p_scale"] == np.float32(x.max() / 127)


@pytest.mark.parametrize("opset", [13, 17, 21])
def test_fp16_models_have_fp16_scales(opset: int) -> None:
    """ONNX has them from opset 19 on."""
    proto = linear_net(opset=opset)
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    quantised = fusec.quantize(proto, rows())  # data in fp32 is cast
    assert quantised.model.opset_import[0].version == max(19, opset)
    onnx.checker.check_model(quantised.model, full_check=True)
    x = rows().astype(np.float16)
    (theirs,), (ours,) = in_onnxruntime(quantised.model, {"x": x}), in_fusec(quantised.model, {"x": x})
    assert relative_l2(ours, theirs) < 5e-3


def test_attention_is_quantised_when_asked() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "k"], ["s"], "scores"),
        helper.make_node("Softmax", ["s"], ["p"], "softmax"),
        helper.make_node("MatMul", ["p", "v"], ["o"], "mix"),
        helper.make_node("MatMul", ["o", "w"], ["y"], "out"),
    ]
    shapes: dict[str, Any] = {"x": [4, 6, 16], "k": [4, 16, 6], "v": [4, 6, 16]}
    proto = model(nodes, shapes, {"y": [4, 6, 16]}, {"w": normal(0, 16, 16)})
    rng = np.random.default_rng(0)
    data = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    plain = fusec.quantize(proto, data)
    assert [row.name for row in plain.report.layers] == ["out"]
    reasons = {node.name: node.reason for node in plain.report.floats}
    assert reasons["scores"] == reasons["mix"] == "a product of two computed values, as in attention"
    quantised = fusec.quantize(proto, data, format="fp8", attention=True)
    assert [row.name for row in quantised.report.layers] == ["scores", "mix", "out"]
    (ours,), (exact,) = in_fusec(quantised.model, data), in_onnxruntime(proto, data)
    assert relative_l2(ours, exact) < 0.08


def test_external_data_is_read_and_embedded(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(linear_net(), path, save_as_external_data=True, size_threshold=0, location="weights.bin")
    quantised = fusec.quantize(path, rows())
    quantised.save(tmp_path / "int8.onnx")
    (tmp_path / "weights.bin").unlink()
    (ours,) = in_fusec(onnx.load(tmp_path / "int8.onnx"), {"x": rows()})
    (exact,) = in_onnxruntime(linear_net(), {"x": rows()})
    assert relative_l2(ours, exact) < 0.05


def test_an_old_model_gets_the_opset_that_scales_per_channel_need() -> None:
    weights = {"w": normal(0, 16, 16, 3, 3)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "conv")]
    proto = model(nodes, {"x": [2, 16, 8, 8], "w": [16, 16, 3, 3]}, {"y": [2, 16, 6, 6]}, weights, opset=9)
    proto.ir_version = 3  # which lists weights among the inputs
    x = np.random.default_rng(0).standard_normal((2, 16, 8, 8)).astype(np.float32)
    quantised = fusec.quantize(proto, x).model
    assert quantised.opset_import[0].version == 13
    assert [value.name for value in quantised.graph.input] == ["x"]
    (theirs,), (ours,) = in_onnxruntime(quantised, {"x": x}), in_fusec(quantised, {"x": x})
    assert relative_l2(ours, theirs) < 1e-6


def report_of(**options: Any) -> QuantizationReport:
    return fusec.quantize(linear_net(), rows(), calibration="max", **options).report


def test_the_worst_layers_stay_in_float() -> None:
    every = report_of(report=True)
    ranked = sorted(every.layers, key=lambda row: row.output or 0.0)
    kept = report_of(keep_float=1)
    assert [row.name for row in kept.layers] == [row.name for row in every.layers if row is not ranked[0]]
    (left,) = kept.floats
    assert left.name == ranked[0].name
    assert left.reason.startswith("loses most: ")
    assert kept.outputs["t2"] > every.outputs["t2"]


def test_a_bound_leaves_as_few_layers_in_float_as_it_needs() -> None:
    found = {n: report_of(keep_float=n, report=True).outputs["t2"] for n in range(3)}
    bound = (found[0] + found[1]) / 2
    bounded = report_of(min_sqnr=bound)
    assert len(bounded.floats) == 1
    assert bounded.outputs["t2"] == found[1] >= bound
    assert not report_of(min_sqnr=found[0] - 1).floats
    with pytest.raises(CheckError, match="the bound holds only with all 3 layers in float"):
        report_of(min_sqnr=found[2] + 1)


def test_a_score_of_the_users_own_bounds_the_loss() -> None:
    x = rows()
    (exact,) = in_onnxruntime(linear_net(), {"x": x})
    calls: list[float] = []

    def score(run: Any) -> float:
        (got,) = run({"x": x})
        calls.append(-float(np.abs(got - exact).max()))
        return calls[-1]

    loose = fusec.quantize(linear_net(), x, score=score, max_loss=1.0)
    assert not loose.report.floats
    assert loose.report.loss == pytest.approx(calls[0] - calls[-1])
    assert calls[0] > -1e-5  # the float model
    tight = fusec.quantize(linear_net(), x, score=score, max_loss=0.8 * (loose.report.loss or 0.0))
    assert 0 < len(tight.report.floats) < 3
    assert (tight.report.loss or 0.0) <= 0.8 * (loose.report.loss or 0.0)


def test_a_sum_is_float_if_its_convolution_is() -> None:
    report = fusec.quantize(residual_net(), images(), exclude=["conv2"]).report
    assert [row.name for row in report.layers] == ["conv1", "linear"]
    reasons = {node.name: node.reason for node in report.floats}
    assert reasons["conv2"] == "excluded by its name"
    assert reasons["sum"] == "an addition whose convolution stays in float"


def test_the_report_of_an_edge_is_its_own_noise() -> None:
    x = rows(8)
    quantised = fusec.quantize(linear_net(), x, calibration="max", report=True)
    edge = quantised.report.edges[0]
    assert (edge.tensor, edge.largest) == ("x", float(np.abs(x).max()))
    assert edge.scale == np.float32(edge.largest / 127)
    rounded = np.clip(np.rint(x / np.float32(edge.scale)), -128, 127) * np.float32(edge.scale)
    assert edge.sqnr == pytest.approx(-20 * np.log10(relative_l2(rounded, x)), abs=1e-3)
    text = str(quantised.report)
    for name in ("product0", "tensor", "SQNR", "weight"):
        assert name in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int9"}, "format is one of int8, fp8, weights-int8, weights-int4, not 'int9'"),
        ({"calibration": "mean"}, "calibration is one of max, entropy, percentile, not 'mean'"),
        ({"format": "weights-int4", "calibration": "max"}, "leaves activations in float"),
        ({"format": "weights-int8", "attention": True}, "the products of attention have none"),
        ({"percentile": 0.0}, "percentile is 0.0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"keep_float": -1}, "keep_float is -1"),
        ({"max_loss": 0.1}, "score and max_loss belong together"),
        ({"exclude": ["nosuch*"]}, "no node is named 'nosuch*'"),
        ({"exclude": ["product*"]}, "has no layer to quantise"),
        ({"data": None}, "calibration data is needed"),
        ({"data": None, "format": "weights-int8", "min_sqnr": 3.0}, "calibration data is needed"),
        ({"data": []}, "holds no batches"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"data": rows(), **options}
    with pytest.raises(FusecError, match=message.replace("*", r"\*")):
        fusec.quantize(linear_net(), **given)


def test_a_bound_is_checked_without_sums_whose_convolution_is_float() -> None:
    placement = Placement(
        frontends.Source(residual_net()).standalone(13), activations=True, grouped=True, attention=False
    )
    tried: list[set[str]] = []

    class Recorder:
        def sensitivities(self, progress: Any) -> dict[str, float]:
            return {name: float(i) for i, name in enumerate(("conv2", "sum", "conv1", "linear"))}

        def lowest_sqnr(self, quantised: set[str]) -> float:
            tried.append(quantised)
            return 10.0 if len(quantised) < 3 else 1.0

    recorder: Any = Recorder()
    choose_float(placement, recorder, QuantizeOptions(min_sqnr=5.0))
    assert {"conv1", "linear"} in tried
    assert all("conv2" in quantised for quantised in tried if "sum" in quantised)
    assert [layer.name for layer in placement.layers] == ["conv1", "linear"]


def test_an_addition_alone_does_not_hold_a_bound() -> None:
    """Its convolution is float, so it would be float, too: nothing would be quantised."""
    placement = Placement(
        frontends.Source(residual_net()).standalone(13), activations=True, grouped=True, attention=False
    )

    class Recorder:
        def sensitivities(self, progress: Any) -> dict[str, float]:
            return {name: float(i) for i, name in enumerate(("conv2", "conv1", "linear", "sum"))}

        def lowest_sqnr(self, quantised: set[str]) -> float:
            return 1.0 if quantised else float("inf")

    recorder: Any = Recorder()
    with pytest.raises(CheckError, match="the bound holds only with all 4 layers in float"):
        choose_float(placement, recorder, QuantizeOptions(min_sqnr=5.0))


def test_names_with_brackets_are_excluded_as_they_are() -> None:
    proto = linear_net()
    proto.graph.node[0].name = "layers[0]"
    report = fusec.quantize(proto, rows(), exclude=["layers[0]", "product2"]).report
    assert [row.name for row in report.layers] == ["product1"]


def test_a_quantised_model_is_refused() -> None:
    once = fusec.quantize(linear_net(), rows()).model
    with pytest.raises(FusecError, match=r"is quantised already: node 'x_QuantizeLinear' \(QuantizeLinear\)"):
        fusec.quantize(once, rows())


@pytest.mark.cudnn
def test_a_residual_block_becomes_one_step_a_convolution(asked_once: Oracle) -> None:
    """The shortcut is read in int8, and the sum is computed where the convolution is."""
    quantised = fusec.quantize(residual_net(8, 32), images(8)).model
    program = driver.build(quantised, target="h200", precision="fp16", oracle=asked_once).program
    steps = [step.signature.split("+") for step in program.steps if "conv" in step.signature]
    assert len(steps) == 3
    assert {"conv", "add", "relu"} <= set(steps[-1])
    (block,) = (step for step in program.steps if "conv" in step.signature and "add" in step.signature.split("+"))
    integers = [v.type.dtype for v in block.inputs if v.type.rank == 4]
    assert integers == [DType.I8, DType.I8]  # image and shortcut


def test_a_report_of_weights_needs_no_data() -> None:
    report = fusec.quantize(linear_net(), format="weights-int4", report=True).report
    assert all(15 < (row.weight or 0) < 30 and row.output is None for row in report.layers)


def test_a_graph_of_fusec_is_refused() -> None:
    with pytest.raises(FusecError, match="is a graph of fusec, not an ONNX model"):
        fusec.quantize(fusec.parse('graph "g" (%x: f32[2]) {\n  return %x\n}'), rows())  # pyright: ignore[reportArgumentType] - untyped callers
