"""Import of If, Loop, Scan, sequences and ops with function bodies, compared with onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model, run
from helpers import assert_close
from onnx import TensorProto, helper
from onnx_suite.suite import models

from fusec.errors import ModelError
from fusec.frontends import load
from fusec.frontends.onnx.load import load_bound
from fusec.onnx_backend import FusecBackend
from fusec.reference import evaluate

X = info("x", [2, 3])
X_VALUE = np.arange(6, dtype=np.float32).reshape(2, 3) - 2
TESTED_IN_MODELS = ("Optional", "SequenceConstruct", "SequenceAt", "SequenceErase", "ConcatFromSequence")
node = helper.make_node


def _branch(op: str, name: str) -> onnx.GraphProto:
    """Make a body that reads x of the outer graph."""
    return helper.make_graph([node(op, ["x"], [name])], op, [], [info(name, None)])


def _check_agrees(proto: onnx.ModelProto, **feeds: np.ndarray) -> list[str]:
    """Compare a model with onnxruntime, and return the op names of its graph."""
    graph = load(proto)
    got = evaluate(graph, feeds)
    for name, want in zip(graph.output_names, run(proto, feeds), strict=True):
        assert_close(got[name], want, 1e-6)
    return [n.op.name for n in graph.nodes]


@pytest.mark.parametrize(("condition", "op"), [(True, "relu"), (False, "neg")])
def test_a_known_condition_chooses_its_branch(condition: bool, op: str) -> None:
    branches: dict[str, Any] = {"then_branch": _branch("Relu", "a"), "else_branch": _branch("Neg", "b")}
    proto = model([node("If", ["c"], ["y"], **branches)], [X], [info("y", None)], {"c": np.array(condition)}, opset=16)
    assert _check_agrees(proto, x=X_VALUE) == [op]


def test_a_condition_on_a_shape_is_known() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("ReduceMax", ["s"], ["m"], keepdims=0),
        node("Equal", ["m", "three"], ["c"]),
        node("If", ["c"], ["y"], then_branch=_branch("Relu", "a"), else_branch=_branch("Neg", "b")),
    ]
    proto = model(nodes, [X], [info("y", None)], {"three": np.array(3)}, opset=16)
    assert _check_agrees(proto, x=X_VALUE) == ["relu"]


def test_a_function_called_in_a_branch_is_inlined() -> None:
    double = helper.make_function("me", "Double", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])],
                                  [helper.make_opsetid("", 16)])  # fmt: skip
    call = helper.make_graph([node("Double", ["x"], ["d"], domain="me")], "then", [], [info("d", None)])
    branches: dict[str, Any] = {"then_branch": call, "else_branch": _branch("Neg", "b")}
    proto = model([node("If", ["c"], ["y"], **branches)], [X], [info("y", None)], {"c": np.array(True)}, opset=16,
                  functions=[double])  # fmt: skip
    proto.opset_import.add(domain="me", version=1)
    assert _check_agrees(proto, x=X_VALUE) == ["add"]


def _loop_body(condition: list[onnx.NodeProto]) -> onnx.GraphProto:
    nodes = [
        node("Add", ["v", "x"], ["next"]),
        node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        node("Mul", ["next", "f"], ["row"]),
        *condition,
    ]
    inputs = [info("i", [], TensorProto.INT64), info("go", [], TensorProto.BOOL), info("v", None)]
    return helper.make_graph(
        nodes, "body", inputs, [info("on", [], TensorProto.BOOL), info("next", None), info("row", None)]
    )


def test_a_loop_is_unrolled() -> None:
    body = _loop_body([node("Identity", ["go"], ["on"])])
    proto = model(
        [node("Loop", ["n", "", "x"], ["last", "rows"], body=body)], [X], [info("last", None), info("rows", None)],
        {"n": np.array(3)}, opset=16,
    )  # fmt: skip
    assert _check_agrees(proto, x=X_VALUE).count("add") == 3


@pytest.mark.parametrize(("trips", "runs"), [(0, True), (3, False)])
def test_scan_outputs_of_a_loop_without_trips_have_no_rows(trips: int, runs: bool) -> None:
    body = _loop_body([node("Identity", ["go"], ["on"])])
    proto = model(
        [node("Loop", ["n", "c", "x"], ["last", "rows"], body=body)], [X], [info("last", None), info("rows", None)],
        {"n": np.array(trips), "c": np.array(runs)}, opset=16,
    )  # fmt: skip
    got = evaluate(load(proto), {"x": X_VALUE})
    np.testing.assert_array_equal(got["last"], X_VALUE)
    assert got["rows"].shape == (0, 2, 3) and got["rows"].dtype == np.float32  # onnxruntime gives (0,): no rank


def test_a_loop_ends_by_its_own_condition() -> None:
    body = _loop_body([node("Less", ["i", "two"], ["on"])])
    proto = model(
        [node("Loop", ["", "yes", "x"], ["last", "rows"], body=body)], [X], [info("last", None), info("rows", None)],
        {"yes": np.array(True), "two": np.array(2)}, opset=16,
    )  # fmt: skip
    assert _check_agrees(proto, x=X_VALUE).count("add") == 3


def test_scan_reads_rows_backwards() -> None:
    nodes = [node("Add", ["state", "row"], ["now"]), node("Identity", ["now"], ["seen"])]
    body = helper.make_graph(nodes, "b", [info("state", [3]), info("row", [3])], [info("now", [3]), info("seen", [3])])
    scan = node("Scan", ["s", "x"], ["last", "rows"], body=body, num_scan_inputs=1, scan_input_directions=[1],
                scan_output_directions=[1], scan_output_axes=[1])  # fmt: skip
    proto = model([scan], [X], [info("last", None), info("rows", None)], {"s": np.ones(3, np.float32)}, opset=16)
    _check_agrees(proto, x=X_VALUE)


def test_optional_values_are_resolved() -> None:
    nodes = [
        node("Optional", ["x"], ["present"]),
        node("OptionalHasElement", ["present"], ["yes"]),
        node("OptionalGetElement", ["present"], ["same"]),
        node("Optional", [], ["missing"], type=helper.make_tensor_type_proto(TensorProto.FLOAT, None)),
        node("Identity", ["missing"], ["passed"]),
        node("OptionalHasElement", ["passed"], ["no"]),
        node("If", ["no"], ["y"], then_branch=_branch("Neg", "a"), else_branch=_branch("Relu", "b")),
    ]
    outputs = [info("yes", [], TensorProto.BOOL), info("no", [], TensorProto.BOOL), info("same", None), info("y", None)]
    assert _check_agrees(model(nodes, [X], outputs, opset=18), x=X_VALUE) == ["constant", "constant", "relu"]


@pytest.mark.slow
def test_an_optional_sequence_in_a_loop() -> None:
    """Cases of onnx's suite that its runner cannot compare, because tensors of rank 0 have no length."""
    case = models()["test_loop16_seq_none"]
    (inputs, (want,)) = case.data_sets[0]
    (got,) = FusecBackend.prepare(case.model).run(inputs)
    assert [a.tolist() for a in got] == [a.tolist() for a in want]
    (got,) = FusecBackend.prepare(case.model).run([*inputs[:2], None])
    assert [a.tolist() for a in got] == [0.0, *([float(i + 1) for i in range(k)] for k in range(1, 6))]


def test_sequences_are_resolved() -> None:
    nodes = [
        node("Relu", ["x"], ["r"]),
        node("SequenceConstruct", ["x", "r", "x"], ["s"]),
        node("SequenceErase", ["s", "zero"], ["t"]),
        node("ConcatFromSequence", ["t"], ["joined"], axis=1),
        node("ConcatFromSequence", ["t"], ["stacked"], axis=-1, new_axis=1),
        node("SequenceAt", ["t", "minus"], ["last"]),
        node("SequenceLength", ["t"], ["n"]),
    ]
    outputs = [info(n, None) for n in ("joined", "stacked", "last")] + [info("n", [], TensorProto.INT64)]
    proto = model(nodes, [X], outputs, {"zero": np.array(0), "minus": np.array(-1)}, opset=16)
    assert set(_check_agrees(proto, x=X_VALUE)) <= {"relu", "concat", "reshape", "constant"}


def test_control_flow_that_depends_on_inputs_is_refused_by_name() -> None:
    branches: dict[str, Any] = {"then_branch": _branch("Relu", "a"), "else_branch": _branch("Size", "b")}
    c = info("c", [], TensorProto.BOOL)
    refused = {
        "the condition must be known": [node("If", ["c"], ["y"], name="n", **branches)],
        "the operand of NonZero must be known": [node("NonZero", ["x"], ["y"], name="n")],
        "op Nonsense (not in ONNX opset 21)": [node("Nonsense", ["x"], ["y"], name="n")],
        "the optional value has no element": [
            node("Optional", [], ["o"], type=helper.make_tensor_type_proto(1, None)),
            node("OptionalGetElement", ["o"], ["y"], name="n"),
        ],
    }
    for words, nodes in refused.items():
        with pytest.raises(ModelError) as caught:
            load(model(nodes, [X, c], ["y"]))
        assert words in str(caught.value)
        assert "'n'" in str(caught.value)


def test_a_refusal_in_a_body_names_all_outer_nodes() -> None:
    body = helper.make_graph([node("Nonsense", ["x"], ["a"], name="inner")], "b", [], [info("a", None)])
    branches: dict[str, Any] = {"then_branch": body, "else_branch": _branch("Neg", "b")}
    proto = model([node("If", ["c"], ["y"], name="outer", **branches)], [X], ["y"], {"c": np.array(True)})
    with pytest.raises(ModelError, match=r"node 'outer' \(If\): in its body: op Nonsense .*: node 'inner'"):
        load(proto)


def test_endless_loops_are_refused() -> None:
    body = _loop_body([node("Identity", ["go"], ["on"])])
    proto = model([node("Loop", ["", "", "x"], ["last", "rows"], name="loop", body=body)], [X], ["last"], opset=16)
    with pytest.raises(ModelError, match=r"node 'loop' \(Loop\): (more than \d+ trips|the model unrolls)"):
        load(proto)


def test_a_sequence_may_be_an_output_only_with_bound_inputs() -> None:
    proto = model([node("SequenceConstruct", ["x", "x"], ["s"])], [X], ["s"], opset=16)
    with pytest.raises(ModelError, match=r"output 's' is a sequence of tensors, .*: add a SequenceAt node for each"):
        load(proto)
    graph, lengths = load_bound(proto, {}, {}, "m")
    assert (list(graph.output_names), lengths) == (["s[0]", "s[1]"], {"s": 2})


def test_ops_with_a_function_body_are_imported_by_it() -> None:
    """Attention has no import function in fusec, so its function body in the standard is imported."""
    q = info("q", [1, 2, 4, 8])
    proto = model([node("Attention", ["q", "q", "q"], ["y"], is_causal=1)], [q], [info("y", None)], opset=23)
    value = np.random.default_rng(0).standard_normal((1, 2, 4, 8)).astype(np.float32)
    ops = _check_agrees(proto, q=value)
    assert {"matmul", "softmax"} <= set(ops)
    assert "where" not in ops  # the guard against rows that see nothing: with this mask there are none


def _on_condition(branches: dict[str, Any]) -> onnx.ModelProto:
    """Make a model whose If has a condition that it computes from x."""
    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Greater", ["sum", "zero"], ["c"]),
        node("If", ["c"], ["y"], name="cond", **branches),
    ]
    return model(nodes, [X], [info("y", None)], {"zero": np.array(0, np.float32)}, opset=16)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_computed_condition_selects_between_both_branches(sign: int) -> None:
    branches = {"then_branch": _branch("Relu", "a"), "else_branch": _branch("Neg", "b")}
    x = np.abs(X_VALUE) * np.float32(sign)
    assert "where" in _check_agrees(_on_condition(branches), x=x)


def test_branches_with_a_result_in_common_select_nothing() -> None:
    branches = {"then_branch": _branch("Identity", "a"), "else_branch": _branch("Identity", "b")}
    assert _check_agrees(_on_condition(branches), x=X_VALUE) == []


@pytest.mark.parametrize("start", [-2.5, 2.5])
def test_a_computed_condition_within_a_loop(start: float) -> None:
    branches: dict[str, Any] = {
        "then_branch": _named("Add", ["v", "x"], "a"),
        "else_branch": _named("Sub", ["v", "x"], "b"),
    }
    nodes = [
        node("ReduceSum", ["v"], ["sum"], keepdims=0),
        node("Less", ["sum", "limit"], ["c"]),
        node("If", ["c"], ["next"], **branches),
        node("Identity", ["go"], ["on"]),
    ]
    inputs = [info("i", [], TensorProto.INT64), info("go", [], TensorProto.BOOL), info("v", None)]
    body = helper.make_graph(nodes, "body", inputs, [info("on", [], TensorProto.BOOL), info("next", None)])
    proto = model([node("Loop", ["n", "", "v0"], ["y"], body=body)], [X, info("v0", [2, 3])], [info("y", None)],
                  {"n": np.array(5), "limit": np.array(3, np.float32)}, opset=16)  # fmt: skip
    ops = _check_agrees(proto, x=X_VALUE + 2, v0=np.full((2, 3), start, np.float32))
    assert ops.count("where") == 5


def _named(op: str, operands: list[str], name: str) -> onnx.GraphProto:
    return helper.make_graph([node(op, operands, [name])], op, [], [info(name, None)])


def test_a_branch_whose_index_may_be_out_of_range_is_not_computed_in_vain() -> None:
    """The graph of both branches would read row 5 of 2 if the condition is false."""
    safe = helper.make_graph([node("Gather", ["x", "k"], ["a"])], "then", [], [info("a", None)])
    other = helper.make_graph([node("Gather", ["x", "first"], ["b"])], "else", [], [info("b", None)])
    nodes = [
        node("Less", ["k", "two"], ["c"]),
        node("If", ["c"], ["y"], name="cond", then_branch=safe, else_branch=other),
    ]
    proto = model(nodes, [X, info("k", [], TensorProto.INT64)], [info("y", None)],
                  {"two": np.array(2), "first": np.array(0)}, opset=16)  # fmt: skip
    with pytest.raises(ModelError, match="the condition must be known at import"):
        load(proto)
