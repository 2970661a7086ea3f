"""Test models with small errors that onnxruntime accepts: fusec accepts them too, with one warning."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model, run
from helpers import assert_close
from onnx import TensorProto, helper

from fusec.errors import ModelError
from fusec.frontends import Source, load
from fusec.frontends.onnx.emission import emit
from fusec.reference import evaluate

X = info("x", [2, 3])
X_VALUE = np.arange(6, dtype=np.float32).reshape(2, 3) - 2
node = helper.make_node


def _check_agrees(proto: onnx.ModelProto, said: str, **feeds: np.ndarray) -> None:
    """Import a model with one warning, and compare the graph with onnxruntime."""
    with pytest.warns(UserWarning, match=r"^<ModelProto>: ") as caught:
        graph = load(proto)
    assert len(caught) == 1
    assert said in str(caught[0].message), str(caught[0].message)
    got = evaluate(graph, feeds)
    for name, want in zip(graph.output_names, run(proto, feeds), strict=True):
        assert got[name].shape == want.shape
        assert got[name].dtype == want.dtype
        assert_close(got[name], want, 1e-5)


# annotations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [[2, 4], [2], ["n", 4], []], ids=str)
def test_a_stale_shape_of_a_result_is_a_warning(declared: list[int | str]) -> None:
    proto = model([node("Relu", ["x"], ["y"])], [X], [info("y", declared)])
    shape = ",".join(map(str, declared))
    _check_agrees(proto, f"the model declares 'y' as f32[{shape}], but it is f32[2,3]", x=X_VALUE)


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("MaxPool", {"kernel_shape": [2, 2]}),
        ("AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("LpPool", {"kernel_shape": [3, 3], "pads": [1, 1, 0, 0]}),
    ],
)
def test_a_stale_shape_of_a_pool_is_a_warning(op: str, attributes: dict[str, Any]) -> None:
    x = np.random.default_rng(1).random((1, 2, 5, 5), np.float32)
    proto = model([node(op, ["x"], ["y"], **attributes)], [info("x", x.shape)], [info("y", [1, 2, 5, 5])])
    _check_agrees(proto, "the model declares 'y' as f32[1,2,5,5]", x=x)


def test_several_stale_annotations_are_one_warning() -> None:
    nodes = [node("Split", ["x"], ["a", "b", "c"], axis=1, num_outputs=3), node("Neg", ["b"], ["y"])]
    proto = model(nodes, [X], [info("a", [2, 2]), info("y", [2, 1]), info("c", [2, 2])])
    proto.graph.value_info.append(info("b", [7]))
    _check_agrees(proto, "'a' as f32[2,2], but it is f32[2,1], the model declares 'b' as f32[7]", x=X_VALUE)


def test_a_stale_annotation_of_an_intermediate_value_is_a_warning() -> None:
    for stale in (info("a", [2, 3], TensorProto.FLOAT16), info("a", [2, 3], TensorProto.STRING)):
        proto = model([node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["y"])], [X], ["y"])
        proto.graph.value_info.append(stale)
        with pytest.warns(UserWarning, match="'a'"):
            assert [n.op.name for n in load(proto).nodes] == ["relu", "neg"]


def test_a_negative_dim_of_a_result_is_unknown() -> None:
    proto = model([node("Relu", ["x"], ["y"])], [X], [info("y", [-1, 3])])
    assert load(proto).outputs[0].type.shape == (2, 3)
    assert Source(proto).interface[1][0].dims == ("", 3)


def test_a_stale_annotation_of_a_weight_is_a_warning() -> None:
    proto = model([node("Add", ["x", "w"], ["y"])], [X], ["y"], {"w": np.ones(3, np.float32)})
    proto.graph.value_info.append(info("w", [4]))
    _check_agrees(proto, "the model declares 'w' as f32[4], but it is f32[3]", x=X_VALUE)


def test_a_source_warns_once_for_all_its_shapes() -> None:
    source = Source(model([node("Relu", ["x"], ["y"])], [info("x", ["n", 3])], [info("y", ["n", 4])]))
    with pytest.warns(UserWarning, match="'y' as f32"):
        source.load({"x": (2, 3)})
    assert source.load({"x": (5, 3)}).outputs[0].type.shape == (5, 3)  # a warning would be an error


def test_a_model_that_is_refused_does_not_warn() -> None:
    proto = model([node("Relu", ["x"], ["y"]), node("Add", ["y", "w"], ["z"])], [X, info("w", [7])], [info("z", [1])])
    proto.graph.value_info.append(info("y", [9]))
    with pytest.raises(ModelError, match="do not broadcast"):  # a warning would be an error of another type
        load(proto)


# types and versions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "parameters"), [("f4", "f2"), ("f2", "f4"), ("f8", "f2")])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm_with_parameters_of_another_type(data: str, parameters: str, biased: bool) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((4, 64)).astype(data)
    held = {n: rng.standard_normal(64).astype(parameters) for n in ("s", "b")}
    proto = model(
        [node("LayerNormalization", ["x", "s", "b"][: 2 + biased], ["y"], name=f"n{i}") for i in range(1)]
        + [node("LayerNormalization", ["y", "s"], ["z", "m", "d"], name="second")],
        [info("x", x.shape, helper.np_dtype_to_tensor_dtype(x.dtype))],
        ["z", "m", "d"],
        held,
    )
    with pytest.warns(UserWarning, match="node 'n0', node 'second': LayerNormalization has parameters") as caught:
        graph = load(proto)
    assert len(caught) == 1
    got = evaluate(graph, {"x": x})
    assert [got[n].dtype for n in ("z", "m", "d")] == [x.dtype, np.float32, np.float32]

    def normed(v: np.ndarray, bias: np.ndarray | float) -> np.ndarray:
        v = v.astype(np.float64)
        centred = v - v.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * held["s"].astype(np.float64) + bias

    first = normed(x, held["b"].astype(np.float64) if biased else 0.0)
    assert_close(got["z"], normed(first.astype(data), 0.0).astype(data), 2e-3 if data == "f2" else 1e-6)


def test_layer_norm_with_parameters_that_are_no_floats() -> None:
    proto = model([node("LayerNormalization", ["x", "s"], ["y"])], [X], ["y"], {"s": np.ones(3, np.int32)})
    with pytest.raises(ModelError, match="takes floats, not f32, i32"):
        load(proto)


@pytest.mark.parametrize("opset", [7, 11, 16])
def test_layer_norm_below_its_opset(opset: int) -> None:
    held = {"s": np.array([1, 2, 3], np.float32), "b": np.array([3, 2, 1], np.float32)}
    proto = model([node("LayerNormalization", ["x", "s", "b"], ["y"], epsilon=0.1)], [X], ["y"], held, opset=opset)
    (want,) = run(proto, {"x": X_VALUE})
    assert_close(evaluate(load(proto), {"x": X_VALUE})["y"], want, 1e-6)


@pytest.mark.parametrize(
    ("op", "held", "attributes"),
    [
        ("Gelu", {}, {}),
        ("Trilu", {"k": np.array(1)}, {"upper": 0}),
        ("Pad", {"p": np.array([0, 1, 1, 0])}, {"mode": "constant"}),
        ("GatherND", {"i": np.array([[1], [0]])}, {}),
        ("QuantizeLinear", {"s": np.array(0.1, np.float32), "z": np.array(3, np.int16)}, {}),
    ],
)
def test_ops_of_microsofts_domain_that_is_not_imported(
    op: str, held: dict[str, np.ndarray], attributes: dict[str, Any]
) -> None:
    nodes = [node(op, ["x", *held], ["y"], domain="com.microsoft", **attributes)]
    _check_agrees(model(nodes, [X], ["y"], held, opset=13), "does not import domain 'com.microsoft'", x=X_VALUE)
    proto = model(nodes, [X], ["y"], held, opset=13)
    proto.opset_import.add(domain="com.microsoft", version=1)
    assert_close(evaluate(load(proto), {"x": X_VALUE})["y"], run(proto, {"x": X_VALUE})[0], 1e-5)


def test_dequantize_and_grid_sample_of_microsofts_domain() -> None:
    held = {"s": np.array(0.1, np.float32), "z": np.array(3, np.int8), "g": np.zeros((1, 1, 1, 2), np.float32)}
    nodes = [
        node("DequantizeLinear", ["q", "s", "z"], ["x"], domain="com.microsoft"),
        node("GridSample", ["x", "g"], ["y"], domain="com.microsoft", mode="bilinear"),
    ]
    q = np.arange(12, dtype=np.int8).reshape(1, 1, 3, 4)
    proto = model(nodes, [info("q", q.shape, TensorProto.INT8)], ["y"], held, opset=13)
    _check_agrees(proto, "does not import domain 'com.microsoft'", q=q)


def test_other_ops_of_microsofts_domain_are_refused() -> None:
    proto = model([node("Inverse", ["x"], ["y"], name="m", domain="com.microsoft")], [X], ["y"])
    with pytest.raises(ModelError, match=r"op com.microsoft.Inverse .*node 'm' - not supported"):
        load(proto)


def test_ops_for_one_kind_of_cpu_are_refused_with_advice() -> None:
    proto = model([node("Conv", ["x", "x"], ["y"], name="m", domain="com.microsoft.nchwc")], [X], ["y"])
    with pytest.raises(
        ModelError, match=r"com.microsoft.nchwc.Conv .*optimise with ORT_ENABLE_EXTENDED instead"
    ) as caught:
        load(proto)
    assert "custom_ops" not in str(caught.value), "no Python function can know how the weights are blocked"


def test_advice_about_onnxs_own_op_is_not_given_for_another_of_its_name() -> None:
    proto = model([node("Upsample", ["x"], ["y"], name="m", domain="my.domain")], [X], ["y"])
    proto.opset_import.add(domain="my.domain", version=1)
    with pytest.raises(ModelError, match=r"my.domain.Upsample .*custom_ops") as caught:
        load(proto)
    assert "version_converter" not in str(caught.value)


# what is unrolled --------------------------------------------------------------------------------------------------


def test_a_model_without_loops_may_have_any_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit, "MAX_UNROLLED", 100)
    inner = helper.make_graph(
        [node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(200, 400)], "b", [], [info("v400", None)]
    )
    nodes = [node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(200)]
    nodes.append(node("If", ["c"], ["y"], then_branch=inner, else_branch=inner))
    proto = model(nodes, [info("v0", [2])], ["y"], {"c": np.array(True)})
    assert len(load(proto)) == 400


def test_many_nodes_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each third node becomes six, which is more in total than loops may make."""
    monkeypatch.setattr(emit, "MAX_UNROLLED", 10_000)
    ops = ["LpNormalization", "Neg", "Abs"]
    nodes = [node(ops[i % 3], [f"v{i}"], [f"v{i + 1}"]) for i in range(5_000)]
    assert len(load(model(nodes, [info("v0", [2])], ["v5000"]))) > 10_000


@pytest.mark.parametrize("op", ["Loop", "Scan", "SequenceMap", "SplitToSequence"])
def test_unrolled_nodes_are_counted(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit, "MAX_UNROLLED", 50)
    x = info("x", [100, 2])
    one = [node("CumSum", ["e", "axis"], ["f"])]  # which no scan runs
    if op == "Loop":
        body = helper.make_graph(
            one, "b", [info("i", [], TensorProto.INT64), info("go", [], TensorProto.BOOL), info("e", [100, 2])],
            [info("go", [], TensorProto.BOOL), info("f", [100, 2])],
        )  # fmt: skip
        nodes = [node("Loop", ["n", "", "x"], ["z"], body=body)]
    elif op == "Scan":
        body = helper.make_graph(one, "b", [info("e", [2])], [info("f", [2])])
        nodes = [node("Scan", ["x"], ["z"], body=body, num_scan_inputs=1)]
    else:
        nodes = [node("SplitToSequence", ["x"], ["q"], axis=0)]
        body = helper.make_graph(one, "b", [info("e", [1, 2])], [info("f", [1, 2])])
        nodes += [node("SequenceMap", ["q"], ["p"], body=body)] if op == "SequenceMap" else []
        nodes.append(node("ConcatFromSequence", ["p" if op == "SequenceMap" else "q"], ["z"], axis=0))
    held = {"n": np.array(100), "axis": np.array(0)}
    proto = model([*nodes, node("Neg", ["z"], ["y"])], [x], ["y"], held)
    with pytest.raises(ModelError, match="the model unrolls to more than 50 nodes"):
        load(proto)
