"""Test the models that examples, tests and benchmarks share: their files, their outputs, and their random weights."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers import assert_close, quick, relative_l2
from onnx import ModelProto, TensorProto, helper, numpy_helper

from examples.models import LIGHT, input_shapes, light, random_inputs, randomised, reference_inputs, reference_outputs

LARGE = {"light_bvlc_alexnet", "light_vgg19", "light_zfnet512"}  # their dense layers hold 240 to 570 MB
each = pytest.mark.parametrize("name", quick(LIGHT, set(LIGHT) - LARGE))


def run(model: ModelProto, inputs: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns of initializers among the inputs, as IR version 3 wants them
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, inputs)
    assert isinstance(y, np.ndarray)
    return y


def test_every_light_model_of_onnx_is_known():
    assert [p.stem for p in sorted(light("resnet50").parent.glob("*.onnx"))] == list(LIGHT)
    assert light("resnet50") == light("light_resnet50")
    with pytest.raises(ValueError, match=r"no light model 'resnet18'; there are light_bvlc_alexnet, "):
        light("resnet18")


@each
def test_shipped_outputs_belong_to_the_inputs(name: str):
    inputs, outputs = reference_inputs(name), reference_outputs(name)
    assert [x.shape for x in inputs.values()] == [(1, 3, 224, 224)]
    (want,) = outputs.values()
    assert_close(run(onnx.load(light(name)), inputs), want, rtol=1e-5)


@each
def test_random_weights_keep_activations_in_range(name: str):
    model = randomised(onnx.load(light(name)), seed=0)
    onnx.checker.check_model(model)
    assert input_shapes(model) == input_shapes(onnx.load(light(name)))
    assert not any(node.op_type == "ConstantOfShape" for node in model.graph.node)
    first, second = (run(model, random_inputs(model, seed)) for seed in (1, 2))
    # neither one-hot nor uniform, and not the same whatever comes in: each would hide errors
    assert np.isfinite(first).all()
    assert np.abs(first).max() < (0.9 if model.graph.node[-1].op_type == "Softmax" else 30.0)
    assert first.std() > 0.3 * abs(first.mean())
    assert relative_l2(first, second) > 0.03


def test_weights_depend_on_the_seed_alone():
    source = onnx.load(light("squeezenet"))
    before = source.SerializeToString(deterministic=True)
    one, same, other = (randomised(source, seed).SerializeToString(deterministic=True) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert source.SerializeToString(deterministic=True) == before


def test_no_float_weight_repeats_a_number():
    model = randomised(onnx.load(light("resnet50")), seed=0)
    weights = [numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type == TensorProto.FLOAT]
    assert len(weights) == 53 * 5 + 2
    assert all(np.unique(w).size > 0.9 * min(w.size, 100_000) for w in weights)
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            (variance,) = (numpy_helper.to_array(t) for t in model.graph.initializer if t.name == node.input[4])
            assert variance.min() >= 0.5
            assert variance.max() <= 1.5


@pytest.mark.parametrize("weight", ["gpu_0/conv1_w_0", "gpu_0/res3_1_branch2b_w_0", "gpu_0/res5_2_branch2c_w_0"])
def test_a_wrong_channel_order_shows(weight: str):
    model = randomised(onnx.load(light("resnet50")), seed=0)
    inputs = random_inputs(model, seed=1)
    want = run(model, inputs)
    (tensor,) = (t for t in model.graph.initializer if t.name == weight)
    swapped = numpy_helper.to_array(tensor).copy()
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    tensor.CopyFrom(numpy_helper.from_array(swapped, weight))
    # the bound for a right result is 1e-4
    assert relative_l2(run(model, inputs), want) > 1e-3


def test_weights_given_by_constant_nodes_and_plain_initializers():
    constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(np.ones((4, 6), np.float32)))
    nodes = [constant, helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Add", ["y", "b"], ["z"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 6])],
        [numpy_helper.from_array(np.zeros(6, np.float32), "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    drawn = randomised(model, seed=3)
    assert {t.name for t in drawn.graph.initializer} == {"w", "b"}
    assert [v.name for v in drawn.graph.input] == ["x"]
    assert np.unique(run(drawn, random_inputs(drawn, 0))).size == 6
