"""Test broken graphs, and unsupported ones: the message names the node, the tensor and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model, one
from onnx import TensorProto, helper

from fusec.errors import ModelError
from fusec.frontends import load

X = info("x", [2, 3])
node = helper.make_node


def fails(proto: onnx.ModelProto, *parts: str, **more: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(proto, **more)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    assert message.startswith("<ModelProto>: ")
    return message


def test_unsupported_ops_are_listed_all_at_once() -> None:
    nodes = [
        node("Scatter", ["x"], ["a"], name="first"),
        node("Scatter", ["a"], ["b"], name="second"),
        node("Inverse", ["b"], ["c"], name="third", domain="com.microsoft"),
        node("Nonsense", ["c"], ["y"]),
    ]
    proto = model(nodes, [X], ["y"])
    proto.opset_import.add(domain="com.microsoft", version=1)
    message = fails(proto, "3 problems")
    assert "op Scatter (removed from ONNX in opset 11, the model is of opset 21): nodes 'first', 'second'" in message
    assert "op com.microsoft.Inverse (domain 'com.microsoft', version 1): node 'third'" in message
    assert "op Nonsense (not in ONNX opset 21): node 'Nonsense_3'" in message


@pytest.mark.parametrize(
    ("op", "domain", "words"),
    [
        ("Scatter", "", "onnx.version_converter writes it as a newer op"),
        ("TfIdfVectorizer", "ai.onnx.ml", "run this one in onnxruntime"),
        ("Mine", "me", "define it as a function of the model"),
    ],
)
def test_a_refusal_says_what_to_do(op: str, domain: str, words: str) -> None:
    proto = model([node(op, ["x"], ["y"], name="n", domain=domain)], [X], ["y"])
    assert words in fails(proto, op, "node 'n' - not supported: ")


def test_a_graph_of_a_model_with_host_steps_says_what_to_do() -> None:
    proto = model([node("NonZero", ["x"], ["y"], name="n")], [X], ["y"])
    fails(proto, "node 'n' (NonZero)", "fusec.compile runs the model as several programs", "--constant name=value")


def test_many_nodes_of_an_unsupported_op_are_counted() -> None:
    nodes = [node("Nonsense", ["x"], [f"y{i}"], name=f"n{i}") for i in range(9)]
    fails(
        model(nodes, [X], [f"y{i}" for i in range(9)]),
        "op Nonsense (not in ONNX opset 21): nodes 'n0', 'n1', 'n2', 'n3' and 5 more",
    )


def test_unused_unsupported_nodes_do_no_harm() -> None:
    graph = load(model([node("Nonsense", ["x"], ["d"]), node("Relu", ["x"], ["y"])], [X], ["y"]))
    assert [n.op.name for n in graph.nodes] == ["relu"]


def test_domain_that_is_not_imported() -> None:
    proto = model([node("Mine", ["x"], ["y"], domain="me")], [X], ["y"])
    fails(proto, "op me.Mine (domain 'me', which the model does not import)")


def test_control_flow() -> None:
    body = helper.make_graph([node("Relu", ["x"], ["z"])], "body", [], [info("z", [2, 3])])
    other = helper.make_graph([node("Flatten", ["x"], ["z"], axis=0)], "other", [], [info("z", [1, 6])])
    proto = model([node("If", ["c"], ["y"], name="cond", then_branch=body, else_branch=other)],
                  [X, info("c", [], TensorProto.BOOL)], ["y"])  # fmt: skip
    fails(proto, "node 'cond' (If): the condition must be known at import, but %c is computed at run time")


def test_op_removed_from_onnx() -> None:
    proto = model([node("Upsample", ["x", "s"], ["y"])], [X], ["y"], {"s": np.ones(2, np.float32)})
    fails(proto, "op Upsample (removed from ONNX in opset 10, the model is of opset 21)")


def test_op_newer_than_the_opset() -> None:
    fails(one("Gelu", [2], opset=13), "op Gelu (not in ONNX opset 13)")


def test_missing_input() -> None:
    proto = model([node("Conv", ["x", "w"], ["y"], name="c1")], [X], ["y"])
    fails(proto, "node 'c1' (Conv): its input 'w' is neither a graph input, an initializer, nor the output of a node")


def test_all_missing_inputs_are_listed() -> None:
    proto = model([node("Add", ["a", "b"], ["y"], name="n")], [X], ["y", "z"])
    fails(proto, "3 problems", "'a'", "'b'", 'graph output "z" is not defined')


def test_cycle() -> None:
    nodes = [
        node("Add", ["x", "c"], ["a"], name="n1"),
        node("Relu", ["a"], ["b"], name="n2"),
        node("Relu", ["b"], ["c"], name="n3"),
        node("Relu", ["c"], ["y"], name="after"),
    ]
    message = fails(model(nodes, [X], ["y"]), "is part of a cycle")
    assert "'after'" not in message


def test_long_cycle_is_no_recursion() -> None:
    nodes = [node("Relu", [f"v{(i - 1) % 5000}"], [f"v{i}"]) for i in range(5000)]
    fails(model(nodes, [], ["v0"]), "is part of a cycle")


def test_unsorted_nodes_are_sorted() -> None:
    nodes = [node("Relu", ["a"], ["y"], name="second"), node("Neg", ["x"], ["a"], name="first")]
    assert [n.origin for n in load(model(nodes, [X], ["y"])).nodes] == [("first",), ("second",)]


def test_value_defined_twice() -> None:
    nodes = [node("Relu", ["x"], ["y"], name="a"), node("Neg", ["x"], ["y"], name="b")]
    fails(model(nodes, [X], ["y"]), "node 'b' (Neg): its output 'y' is already defined by node 'a'")


def test_node_that_defines_a_graph_input() -> None:
    fails(model([node("Relu", ["x"], ["x"], name="a")], [X], ["x"]), "already defined by a graph input")


def test_duplicate_inputs_initializers_and_outputs() -> None:
    proto = model([node("Relu", ["x"], ["y"])], [X, X], ["y", "y"], {"w": np.ones(1, np.float32)})
    proto.graph.initializer.append(proto.graph.initializer[0])
    fails(proto, "two graph inputs are named 'x'", "two initializers are named 'w'", "two graph outputs are named 'y'")


def test_no_outputs() -> None:
    fails(model([node("Relu", ["x"], ["y"])], [X], []), "the graph has no outputs")


def test_node_without_outputs_or_op() -> None:
    fails(model([node("Relu", ["x"], [], name="a")], [X], ["x"]), "node 'a' (Relu): has no output")
    fails(model([node("", ["x"], ["y"], name="a")], [X], ["y"]), "node 'a': has no op type")


def test_ill_typed_node() -> None:
    proto = model([node("Add", ["x", "i"], ["y"], name="sum")], [X, info("i", [3], TensorProto.INT32)], ["y"])
    fails(proto, "node 'sum' (Add): operands differ in dtype: f32, i32")


def test_shape_conflict() -> None:
    fails(one("Conv", [1, 3, 8, 8], [4, 64, 3, 3]), "node 'n' (Conv): weight takes 64 channels, x has 3 (groups=1)")


def test_problems_of_several_nodes_are_listed_and_their_results_are_not_missed() -> None:
    nodes = [
        node("Add", ["x", "b"], ["a"], name="n1"),
        node("Relu", ["a"], ["y"], name="n2"),
        node("MatMul", ["x", "x"], ["z"], name="n3"),
    ]
    message = fails(model(nodes, [X, info("b", [5])], ["y", "z"]), "2 problems", "'n1'", "'n3'")
    assert "'n2'" not in message


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (info("y", [2, 3], TensorProto.INT32), "the model declares 'y' as i32[2,3], but it is f32[2,3]"),
        (info("y", [2, 4], TensorProto.INT32), "the model declares 'y' as i32[2,4], but it is f32[2,3]"),
        (info("y", [2, 3], TensorProto.STRING), "the model declares 'y' as string[2,3], but it is f32[2,3]"),
    ],
)
def test_declared_type_that_conflicts(declared: onnx.ValueInfoProto, said: str) -> None:
    fails(model([node("Relu", ["x"], ["y"], name="r")], [X], [declared]), f"node 'r' (Relu): {said}")


def test_declared_type_of_an_initializer_that_conflicts() -> None:
    proto = model([node("Add", ["x", "w"], ["y"])], [X, info("w", [4])], ["y"], {"w": np.ones(3, np.float32)})
    fails(proto, "initializer 'w': the model declares 'w' as f32[4], but it is f32[3]")


def test_symbolic_declarations_agree_with_all() -> None:
    graph = load(model([node("Relu", ["x"], ["y"])], [X], [info("y", ["n", None])]))
    assert graph.outputs[0].type == graph.inputs[0].type


def _recurrent(op: str, gates: int, initial: Sequence[int]) -> onnx.ModelProto:
    """Make a model of one recurrent node, with an initial state of the given shape."""
    shapes = {"x": [2, 1, 3], "w": [1, 4 * gates, 3], "r": [1, 4 * gates, 4], "h": initial}
    nodes = [node(op, ["x", "w", "r", "", "", "h"], ["y"], name="n")]
    return model(nodes, [info(name, shape) for name, shape in shapes.items()], ["y"])


def _without_ngram_counts() -> onnx.ModelProto:
    counting: dict[str, Any] = {"max_gram_length": 1, "min_gram_length": 1, "max_skip_count": 0, "mode": "TF"}
    counter = node("TfIdfVectorizer", ["x"], ["y"], name="n", ngram_indexes=[0], pool_int64s=[1], **counting)
    counter.attribute.append(onnx.AttributeProto(name="ngram_counts", type=onnx.AttributeProto.INTS))
    return model([counter], [info("x", [2, 3], TensorProto.INT64)], ["y"])


@pytest.mark.parametrize(
    ("proto", "said"),
    [
        (one("Relu", [2], alpha=1.0), "has no attribute 'alpha' (version 14 of the op)"),
        (one("LRN", [1, 2, 3]), "needs an attribute 'size'"),
        (one("Elu", [2], alpha=1), "attribute 'alpha' is of type int, not float"),
        (one("Relu", [2], [2]), "takes 1 inputs, not 2"),
        (one("Conv", [1, 1, 3]), "takes 2 to 3 inputs, not 1"),
        (one("Conv", [1, 1, 3, 3], [1, 1, 1, 1], strides=[1]), "strides needs 2 entries, not 1"),
        (one("Conv", [1, 1, 3, 3], [1, 1, 1, 1], kernel_shape=[3, 3]), "kernel_shape [3, 3], but the weight"),
        (one("Conv", [1, 1, 3, 3], [1, 1, 1, 1], auto_pad="SAME"), "knows no auto_pad 'SAME'"),
        (one("Conv", [1, 1, 3, 3], [1, 1, 1, 1], auto_pad="VALID", pads=[1] * 4), "both auto_pad=VALID and pads"),
        (one("Conv", [3, 3], [1, 1]), "takes 1 to 3 spatial dims, x has shape [3, 3]"),
        (one("Conv", [1, 1, 3], [2, 1, 1], [3]), "bias has shape [3], not [2]"),
        (one("RMSNormalization", [2, 3], [3], outputs=2, opset=23), "its output 'y1' (number 1) is read"),
        (one("BatchNormalization", [2], [2], [2], [2], [2], training_mode=1), "needs a channel dim, x has shape [2]"),
        (one("BatchNormalization", [1, 2], [2], [2], [2], [2], opset=7, spatial=0), "spatial=0 is not supported"),
        (one("LayerNormalization", [2, 3], [3], stash_type=7), "stash_type=7 is i64, no float"),
        (one("Dropout", [2], outputs=2, opset=7), "its output 'y1' (number 1) is read"),
        (one("Gemm", [2, 3], [3, 4], [5, 2, 4]), "C of shape [5, 2, 4] does not broadcast to [2, 4]"),
        (one("PRelu", [2, 3], [4, 2, 3]), "a slope of shape [4, 2, 3] does not broadcast to [2, 3]"),
        (one("Mod", [2], [2]), "need fmod=1"),
        (one("Softmax", [2, 3], axis=2), "axis 2 is out of range for rank 2"),
        (one("Concat", [2, 3], [2, 4], axis=0), "do not join along axis 0"),
        (one("Split", [5], opset=13, outputs=2), "5 of axis 0 does not divide into 2 equal parts"),
        (one("Split", [5], num_outputs=3, outputs=2), "num_outputs is 3, the node has 2 outputs"),
        (one("GlobalLpPool", [1, 2, 4], p=0), "p is 0"),
        (one("DepthToSpace", [1, 3, 2, 2], blocksize=2), "3 channels do not divide into blocks of 2x2"),
        (one("Cast", [2], to=TensorProto.COMPLEX64), "element type complex64 is not supported"),
        (one("Cast", [2], to=77), "element type number 77 is not supported"),
        (one("Gelu", [2], approximate="erf"), "knows no approximation 'erf'"),
        (one("RNN", [2, 1, 3], [1, 4, 3], [], hidden_size=4), "R has shape [], not [directions, gates * size, size]"),
        (one("GRU", [2, 1, 3], [1, 12, 3], []), "R has shape [], not [directions, gates * size, size]"),
        (_recurrent("LSTM", 4, initial=[]), "an initial state has shape [], not [1, 1, 4]"),
        (_recurrent("GRU", 3, initial=[1, 1]), "an initial state has shape [1, 1], not [1, 1, 4]"),
        (one("DeformConv", [1, 2, 4, 4], [2, 2, 1, 1], [1, 2, 4, 4], group=0), "group is 0 and offset_group 1"),
        (one("DeformConv", [1, 2, 4, 4], [2, 2, 1, 1], [1, 2, 4, 4], offset_group=0), "group is 1 and offset_group 0"),
        (_without_ngram_counts(), "ngram_counts is empty"),
        (one("GatherND", [2, 3], [2, 1], batch_dims=-1), "batch_dims is -1 for indices of rank 2"),
        (one("Constant", value_string="a", value_int=1), "needs exactly one value"),
        (one("Constant"), "needs exactly one value"),
        (one("Pad", [3], opset=2 + 7, pads=[-2, -2]), "remove more than x of shape [3] has"),
        (one("GroupNormalization", [1, 4], [3], [3], opset=18, num_groups=3), "4 channels do not divide into 3 groups"),
    ],
)  # fmt: skip
def test_refusals_of_ops(proto: onnx.ModelProto, said: str) -> None:
    node_name = f"node 'n' ({proto.graph.node[0].op_type}): "
    assert node_name in fails(proto, said)


def _with_constants(op: str, held: Sequence[np.ndarray | None], opset: int = 21, **attributes: Any) -> onnx.ModelProto:
    names = ["x", *("" if a is None else f"c{i}" for i, a in enumerate(held))]
    constants = {f"c{i}": a for i, a in enumerate(held) if a is not None}
    return model([node(op, names, ["y"], name="n", **attributes)], [info("x", [1, 1, 2, 3])], ["y"], constants, opset)


def _i(*items: int) -> np.ndarray:
    return np.array(items, np.int64)


@pytest.mark.parametrize(
    ("proto", "said"),
    [
        (_with_constants("Reshape", [_i(5, -1)]), "[1, 1, 2, 3] has 6 elements, no [5, -1] fits them"),
        (_with_constants("Reshape", [_i(-1, -1)]), "more than one -1"),
        (_with_constants("Reshape", [_i(-2, 3)]), "negative dimension in the new shape [-2, 3]"),
        (_with_constants("Reshape", [_i(1, 1, 1, 1, 0)]), "dim 4 of [1, 1, 1, 1, 0] copies that of x"),
        (_with_constants("Reshape", [_i(4)]), "[1, 1, 2, 3] has 6 elements, [4] 4"),
        (_with_constants("Reshape", [np.ones(2, np.float32)]), "the new shape must be integers, not f32"),
        (_with_constants("Reshape", [np.ones((1, 1), np.int64)]), "the new shape must be a list, not of shape [1, 1]"),
        (_with_constants("Expand", [_i(-1)]), "negative dimension in [-1]"),
        (_with_constants("Expand", [_i(5, 3)]), "do not broadcast"),
        (_with_constants("Squeeze", [_i(2)]), "dim 2 of [1, 1, 2, 3] is not 1"),
        (_with_constants("Squeeze", [_i(0, -4)]), "axes [0, -4] name a dim twice"),
        (_with_constants("Unsqueeze", [_i(9)]), "axis 9 is out of range for rank 5"),
        (_with_constants("Slice", [_i(0), _i(1), _i(0), _i(0)]), "a step is 0"),
        (_with_constants("Slice", [_i(0), _i(1, 2)]), "1 starts, 2 ends"),
        (_with_constants("Pad", [_i(1, 1)]), "2 pads for 4 axes"),
        (_with_constants("Tile", [_i(1, 1)]), "2 repeats for 4 dims"),
        (_with_constants("ReduceSum", [_i(7)]), "axis 7 is out of range for rank 4"),
        (_with_constants("Dropout", [np.ones((), np.float32), np.array(True)]), "the ratio is 1.0, not in [0, 1)"),
        (_with_constants("Clip", [np.ones(2, np.float32)]), "a bound must be a single number"),
        (_with_constants("Resize", [None, None, _i(1, 1, 4, 6)], mode="sinc"), "knows no mode 'sinc'"),
        (_with_constants("Resize", [None, None, _i(1, 1, 4, 6)], coordinate_transformation_mode="mine"), "mode 'mine'"),
        (_with_constants("Resize", [None, None, _i(4, 6)]), "2 sizes for 4 dims"),
        (_with_constants("Resize", [None, None, _i(1, 1, 0, 6)]), "resize [1, 1, 2, 3] to [1, 1, 0, 6]"),
        (_with_constants("Resize", [None, np.ones(4, np.float32), _i(1, 1, 4, 6)]), "either scales or sizes, not both"),
        (_with_constants("Resize", [None, -np.ones(4, np.float32)]), "scales must be positive"),
        (
            _with_constants(
                "Resize", [None, None, _i(1, 1, 4, 6)], coordinate_transformation_mode="tf_crop_and_resize"
            ),
            "tf_crop_and_resize needs 2 numbers a dim as roi",
        ),
        (_with_constants("Resize", [None, np.full(4, 3e38, np.float32)]), "scales [3"),
        (_with_constants("Gather", [np.ones(2, np.float32)]), "indices are f32, not integers"),
    ],
)
def test_refusals_of_constant_operands(proto: onnx.ModelProto, said: str) -> None:
    assert f"node 'n' ({proto.graph.node[0].op_type}): " in fails(proto, said)


def test_shape_that_is_computed_at_run_time() -> None:
    proto = model([node("Reshape", ["x", "s"], ["y"], name="n")], [X, info("s", [2], TensorProto.INT64)], ["y"])
    fails(proto, "node 'n' (Reshape): the new shape must be known at import, but %s is computed at run time")


def test_left_out_operand() -> None:
    fails(model([node("Add", ["x", ""], ["y"], name="n")], [X], ["y"]), "node 'n' (Add): input number 1 is missing")


def test_constants_that_cannot_be_evaluated() -> None:
    proto = model([node("Gather", ["a", "b"], ["y"], name="n")], [], ["y"], {"a": _i(1, 2), "b": _i(7)})
    fails(proto, "node 'n' (Gather): gather of constants: index 7 is out of bounds")


@pytest.mark.parametrize("size", [[1 << 40], [100_000, 100_000], [1 << 62, 1 << 62]])
def test_absurd_constants_are_refused_not_made(size: list[int]) -> None:
    shape = _i(*size)
    fill = [node("ConstantOfShape", ["s"], ["c"], name="fill"), node("ReduceSum", ["c"], ["y"])]
    fails(
        model(fill, [], ["y"], {"s": shape}),
        "node 'fill' (ConstantOfShape): for its result 'c', a ",
        "f32[",
        "the limit is ",
    )
    grow = [node("Expand", ["w", "s"], ["c"], name="grow"), node("ReduceSum", ["c"], ["y"])]
    held = {"s": shape, "w": np.ones(1, np.float32)}
    fails(model(grow, [], ["y"], held), "node 'grow' (Expand): for its result 'c', ", "f32[", "the limit is ")


def test_absurd_range() -> None:
    held = {"a": np.array(0), "b": np.array(1 << 60), "c": np.array(1)}
    fails(
        model([node("Range", list(held), ["y"], name="n")], [], ["y"], held),
        "node 'n' (Range): for its result 'y', a tensor i64[1152921504606846976] takes",
    )


def test_absurd_results() -> None:
    proto = model([node("Expand", ["x", "s"], ["y"], name="n")], [info("x", [1])], ["y"], {"s": _i(1 << 40)})
    fails(proto, "node 'n' (Expand): for its result 'y', a tensor f32[1099511627776]", "the limit is 64 GiB")


def _function(name: str, nodes: list[onnx.NodeProto]) -> onnx.FunctionProto:
    return helper.make_function("me", name, ["x"], ["y"], nodes, [helper.make_opsetid("", 21)])


def _calling(functions: list[onnx.FunctionProto], name: str) -> onnx.ModelProto:
    proto = model([node(name, ["x"], ["y"], domain="me", name="call")], [X], ["y"], functions=functions)
    proto.opset_import.add(domain="me", version=1)
    return proto


def test_recursive_function() -> None:
    functions = [
        _function("F", [node("G", ["x"], ["y"], domain="me")]),
        _function("G", [node("F", ["x"], ["y"], domain="me")]),
    ]
    fails(_calling(functions, "F"), "function me.", "calls itself")


def test_functions_that_would_explode() -> None:
    functions = [_function("F0", [node("Relu", ["x"], ["y"])])]
    for i in range(1, 40):
        calls = [node(f"F{i - 1}", ["x"], ["a"], domain="me"), node(f"F{i - 1}", ["a"], ["y"], domain="me")]
        functions.append(_function(f"F{i}", calls))
    fails(_calling(functions, "F39"), "inlining its functions would make", "the limit is 1000000")


def test_two_functions_of_one_name() -> None:
    body = [node("Relu", ["x"], ["y"])]
    fails(_calling([_function("F", body), _function("F", body)], "F"), "two functions are named me.F")


def test_function_of_another_opset() -> None:
    function = _function("F", [node("Relu", ["x"], ["y"])])
    function.opset_import[0].version = 13
    fails(
        _calling([function], "F"),
        "function me.F is written in opset 13 of domain '', the model in 21, where ",
        " is another op",
    )


def test_call_with_too_many_operands() -> None:
    proto = _calling([_function("F", [node("Relu", ["x"], ["y"])])], "F")
    proto.graph.node[0].input.append("x")
    fails(proto, "its functions cannot be inlined")


def test_unsupported_op_in_a_function() -> None:
    function = _function("F", [node("Nonsense", ["x"], ["y"])])
    fails(_calling([function], "F"), "op Nonsense (not in ONNX opset 21): node ")


def test_attribute_that_refers_to_a_function() -> None:
    proto = one("Elu", [2], alpha=1.0)
    proto.graph.node[0].attribute[0].ref_attr_name = "a"
    fails(proto, "node 'n' (Elu): attribute 'alpha' refers to a function's, but the node is in none")
