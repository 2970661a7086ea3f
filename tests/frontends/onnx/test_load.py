"""Test properties of loaded models: names, origins, folding, lazy weights, bound dims, inlined functions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model, one, run
from helpers import assert_close, literal_of
from onnx import TensorProto, helper, numpy_helper

from examples.models import LIGHT, light, random_inputs, randomised, reference_inputs, reference_outputs
from fusec.errors import ModelError
from fusec.frontends import Source, load
from fusec.frontends.onnx.model_file.stored_data import StoredData
from fusec.frontends.onnx.model_file.tensors import DTYPES
from fusec.ir import Constant, DType, TensorType, noted_reads
from fusec.reference import evaluate
from fusec.text import parse

node = helper.make_node


@pytest.mark.parametrize("name", LIGHT)
def test_light_models_import(name: str) -> None:
    proto = onnx.load(light(name))
    graph = load(light(name))
    assert graph.output_names == tuple(v.name for v in proto.graph.output)
    known = {n.name or f"{n.op_type}_{i}" for i, n in enumerate(proto.graph.node)}
    assert all(known.issuperset(n.origin) and n.origin for n in graph.nodes if not isinstance(n.op, Constant))
    assert sum(n.op.name == "conv" for n in graph.nodes) == sum(n.op_type == "Conv" for n in proto.graph.node)


def test_a_light_model_gives_the_reference_outputs() -> None:
    """Others have logits near 1e10, which turn on the order in which the BLAS of this machine adds numbers."""
    got = evaluate(load(light("light_shufflenet")), reference_inputs("light_shufflenet"))
    for output, want in reference_outputs("light_shufflenet").items():
        assert_close(got[output], want, 1e-4)


@pytest.mark.parametrize("name", ["light_shufflenet", "light_squeezenet", "light_inception_v1"])
def test_light_models_with_random_weights_match_onnxruntime(name: str) -> None:
    proto = randomised(onnx.load(light(name)), 5)
    inputs = random_inputs(proto, 6)
    graph = load(proto)
    got = evaluate(graph, inputs)
    for output, want in zip(graph.output_names, run(proto, inputs), strict=True):
        assert_close(got[output], want, 1e-5)


def test_an_imported_graph_survives_its_text_form() -> None:
    graph = load(light("squeezenet"))
    weights = {n.op.literal.label: n.op.literal.array for n in graph.nodes if isinstance(n.op, Constant)}
    assert len(weights) == sum(isinstance(n.op, Constant) for n in graph.nodes)
    assert str(parse(str(graph), weights)) == str(graph)


def test_path_bytes_and_proto_give_equal_graphs(tmp_path: Path) -> None:
    proto = one("Relu", [2, 3])
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    assert str(load(path)) == str(load(str(path))) == str(load(path.read_bytes())) == str(load(proto))


def test_text_form(tmp_path: Path) -> None:
    text = 'graph "g" (%x: f32[2]) {\n  %y = relu(%x) : f32[2]\n  return %y\n}'
    for name in ("g.txt", "g.fusec-ir", "g"):
        (tmp_path / name).write_text(text)
        assert str(load(tmp_path / name)) == text
    assert str(load(text.encode())) == text


def test_graph_is_passed_through() -> None:
    graph = load(one("Relu", [2]))
    assert load(graph) is graph
    assert load(graph, {"x0": (2,)}) is graph


def test_names_and_origins() -> None:
    nodes = [
        node("Conv", ["x", "w", "b"], ["t.out"], name="conv1"),
        node("Identity", ["t.out"], ["u"], name="same"),
        node("Relu", ["u"], ["y out"]),
    ]
    held = {"w": np.ones((4, 3, 1, 1), np.float32), "b": np.ones(4, np.float32)}
    graph = load(model(nodes, [info("x", [1, 3, 2, 2])], ["y out", "u", "x"], held))
    found = [(n.op.name, n.result.name, n.origin) for n in graph.nodes if not isinstance(n.op, Constant)]
    assert found == [
        ("conv", "t.out/conv", ("conv1",)),
        ("add", "t.out", ("conv1",)),
        ("relu", "y out", ("Relu_2",)),
    ]
    assert graph.output_names == ("y out", "u", "x")
    assert [v.name for v in graph.outputs] == ["y out", "t.out", "x"]
    assert [n.result.name for n in graph.nodes if isinstance(n.op, Constant)] == ["w", "t.out/constant"]


def test_intermediate_names_never_equal_names_of_the_model() -> None:
    nodes = [node("Gemm", ["x", "x"], ["y"], alpha=2.0), node("Relu", ["y"], ["y/matmul"])]
    graph = load(model(nodes, [info("x", [2, 2])], ["y/matmul", "y"]))
    assert [v.name for v in graph.outputs] == ["y/matmul", "y"]


def test_shape_arithmetic_is_folded() -> None:
    """Exporters write x.view(x.shape[0], -1) so."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "axes"], ["n1"]),
        node("Concat", ["n1", "rest"], ["shape"], axis=0),
        node("Reshape", ["x", "shape"], ["y"]),
    ]
    held = {"zero": np.array(0), "axes": np.array([0]), "rest": np.array([-1])}
    graph = load(model(nodes, [info("x", ["n", 3, 4])], ["y"], held), {"x": (5, 3, 4)})
    assert [n.op.name for n in graph.nodes] == ["reshape"]
    assert graph.outputs[0].type == TensorType((5, 12), DType.F32)


def test_heads_repeated_by_tile_become_an_expand() -> None:
    """torch's exporter writes repeat_interleave so, and the attention passes look for an expanded dim of 1."""
    repeat = [
        node("Unsqueeze", ["x", "axes"], ["u"]),
        node("Tile", ["u", "repeats"], ["t"]),
        node("Reshape", ["t", "shape"], ["y"]),
    ]
    held = {"axes": np.array([2]), "repeats": np.array([1, 1, 4, 1, 1]), "shape": np.array([1, 8, 3, 5])}
    graph = load(model(repeat, [info("x", [1, 2, 3, 5])], ["y"], held))
    nodes = list(graph.nodes)
    assert [n.op.name for n in nodes] == ["reshape", "expand", "reshape"]
    assert nodes[1].operands[0].type.shape == (1, 2, 1, 3, 5)
    assert nodes[1].result.type.shape == (1, 2, 4, 3, 5)


def test_large_constants_are_left_to_the_folding_pass() -> None:
    held = {"w": np.ones((100, 100), np.float32)}
    graph = load(model([node("Transpose", ["w"], ["t"]), node("MatMul", ["x", "t"], ["y"])],
                       [info("x", [1, 100])], ["y"], held))  # fmt: skip
    assert [n.op.name for n in graph.nodes] == ["constant", "transpose", "matmul"]


@pytest.mark.parametrize("op", ["ConstantOfShape", "Expand"])
def test_constants_of_one_element_take_no_memory(op: str) -> None:
    held = {"s": np.array([20_000, 20_000]), "one": np.ones(1, np.float32)}
    fill = node(op, ["s"], ["c"]) if op == "ConstantOfShape" else node(op, ["one", "s"], ["c"])
    graph = load(model([fill, node("Add", ["x", "c"], ["y"])], [info("x", [1])], ["y"], held))
    literal = graph.value("c").literal
    assert literal is not None
    assert literal.array.shape == (20_000, 20_000)
    assert literal.array.strides == (0, 0)


def test_unused_weights_stay_out() -> None:
    held = {"w": np.ones(3, np.float32), "unused": np.ones(3, np.float32)}
    graph = load(model([node("Add", ["x", "w"], ["y"])], [info("x", [3])], ["y"], held))
    assert [n.result.name for n in graph.nodes] == ["w", "y"]


def test_initializers_among_the_inputs_are_no_inputs() -> None:
    held = {"w": np.ones(3, np.float32)}
    graph = load(model([node("Add", ["x", "w"], ["y"])], [info("x", [3]), info("w", [3])], ["y"], held))
    assert [v.name for v in graph.inputs] == ["x"]


def test_outputs_may_be_inputs_and_initializers() -> None:
    graph = load(model([], [info("x", [3])], ["x", "w"], {"w": np.ones(3, np.float32)}))
    assert graph.output_names == ("x", "w")


def test_ai_onnx_is_the_default_domain() -> None:
    proto = one("Relu", [2])
    proto.opset_import[0].domain = proto.graph.node[0].domain = "ai.onnx"
    assert [n.op.name for n in load(proto).nodes] == ["relu"]


def test_functions_of_other_domains_are_imported_for_models_that_use_them(tmp_path: Path) -> None:
    inputs, outputs = [info("x", (2, 3))], [info("y", None)]
    plain, theirs = tmp_path / "plain.onnx", tmp_path / "theirs.onnx"
    onnx.save(model([node("Relu", ["x"], ["y"])], inputs, outputs), plain)
    onnx.save(model([node("FastGelu", ["x"], ["y"], domain="com.microsoft")], inputs, outputs), theirs)
    program = (
        "import sys, warnings; from fusec.frontends import load; from fusec.frontends.onnx import tables\n"
        "warnings.simplefilter('ignore')\n"
        "for path in sys.argv[1:]:\n"
        "    load(path)\n"
        "    found = {m.split('.')[3] for m in sys.modules if m.startswith('fusec.frontends.onnx.')}\n"
        "    others = sorted(found & {'classical', 'contrib', 'training_steps'})\n"
        "    print(others, tables.newest_versions.cache_info().misses)\n"
    )
    command = [sys.executable, "-c", program, str(plain), str(theirs)]
    environment = {"FUSEC_DEVICE": "none", "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == ["[] 0", "['contrib'] 1"]


def test_unread_outputs_may_be_missing() -> None:
    graph = load(model([node("Dropout", ["x"], ["y", "mask"])], [info("x", [2])], ["y"]))
    assert len(graph) == 0
    proto = one("MaxPool", [1, 1, 4], kernel_shape=[2], outputs=2)
    del proto.graph.output[1]
    assert [n.op.name for n in load(proto).nodes] == ["max_pool"]


# symbolic dims ------------------------------------------------------------------------------------------


def _two(first: Sequence[int | str | None], second: Sequence[int | str | None]) -> onnx.ModelProto:
    nodes = [node("Relu", ["a"], ["ya"]), node("Relu", ["b"], ["yb"])]
    return model(nodes, [info("a", first), info("b", second)], ["ya", "yb"])


def test_a_dim_bound_for_one_input_is_bound_for_all() -> None:
    graph = load(_two(["batch", 3], ["batch", "batch"]), {"a": (7, 3)})
    assert [v.type.shape for v in graph.inputs] == [(7, 3), (7, 7)]


def test_dims_without_a_name_are_independent() -> None:
    graph = load(_two([None, 3], [None]), {"a": (7, 3), "b": [2]})
    assert [v.type.shape for v in graph.inputs] == [(7, 3), (2,)]


def test_input_without_shape_takes_the_one_given() -> None:
    proto = model([node("Relu", ["x"], ["y"])], [info("x", None)], ["y"])
    assert load(proto, {"x": (2, 5)}).inputs[0].type.shape == (2, 5)


def test_numpy_integers_are_sizes() -> None:
    shapes: dict[str, Any] = {"a": np.array([4])}
    assert load(_two(["n"], ["n"]), shapes).inputs[1].type.shape == (4,)


# how tensors are stored ----------------------------------------------------------------------------------

_ARRAYS = [
    np.array([[1.5, -2.0]], np.float32),
    np.array([1.5, -2.0], np.float64),
    np.array([1.5, -2.0], np.float16),
    np.array([1.5, -2.0], ml_dtypes.bfloat16),
    np.array([-(2**62), 3], np.int64),
    np.array([-(2**31), 3], np.int32),
    np.array([-(2**15), 3], np.int16),
    np.array([-128, 3], np.int8),
    np.array([2**64 - 1, 3], np.uint64),
    np.array([2**32 - 1, 3], np.uint32),
    np.array([2**16 - 1, 3], np.uint16),
    np.array([255, 3], np.uint8),
    np.array([True, False]),
    np.zeros((0, 3), np.float32),
    np.array(2.5, np.float32),
]


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "fields"])
@pytest.mark.parametrize("array", _ARRAYS, ids=lambda a: f"{a.dtype}{list(a.shape)}")
def test_inline_tensors(array: np.ndarray, raw: bool) -> None:
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    items = array.tobytes() if raw else array.astype(np.float32 if array.dtype.itemsize == 2 and
                                                     array.dtype.kind in "fV" else array.dtype).reshape(-1)  # fmt: skip
    tensor = helper.make_tensor("w", kind, array.shape, items, raw=raw)
    assert tensor.HasField("raw_data") == raw
    proto = model([], [], ["w"])
    proto.graph.initializer.append(tensor)
    literal = load(proto).outputs[0].literal
    assert literal is not None
    assert literal.array.dtype == array.dtype
    np.testing.assert_array_equal(literal.array, array)


def test_half_packed_into_int32_data() -> None:
    array = np.array([1.5, -2.0, np.inf], np.float16)
    tensor = TensorProto(name="w", dims=[3], data_type=TensorProto.FLOAT16, int32_data=array.view(np.uint16).tolist())
    proto = model([], [], ["w"])
    proto.graph.initializer.append(tensor)
    np.testing.assert_array_equal(literal_of(load(proto).outputs[0]), array)


@pytest.mark.parametrize("indices", [[1, 4], [[0, 1], [1, 1]]], ids=["linear", "coordinates"])
def test_sparse_tensors(indices: list[object]) -> None:
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.array([5.0, 7.0], np.float32), "w"),
        numpy_helper.from_array(np.array(indices)),
        [2, 3],
    )
    want = [[0, 5, 0], [0, 7, 0]]
    held = model([], [], ["w"])
    held.graph.sparse_initializer.append(sparse)
    np.testing.assert_array_equal(literal_of(load(held).outputs[0]), want)
    made = model([node("Constant", [], ["w"], sparse_value=sparse)], [], ["w"])
    np.testing.assert_array_equal(literal_of(load(made).outputs[0]), want)


def test_external_data_is_read_lazily_from_a_file_that_is_opened_once(tmp_path: Path, rng: np.random.Generator) -> None:
    held = {f"w{i}": rng.standard_normal((3, 5)).astype(np.float32) for i in range(4)}
    nodes = [node("Add", ["x" if i == 0 else f"v{i - 1}", f"w{i}"], [f"v{i}"]) for i in range(4)]
    proto = model(nodes, [info("x", [3, 5])], ["v3"], held)
    onnx.save_model(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    source = Source(tmp_path / "m.onnx")
    with noted_reads() as read:
        graph = source.load()
    assert not read, "nothing is read at import"
    (file,) = source.external_files.values()
    literals = [graph.value(f"w{i}").literal for i in range(4)]
    assert all(x is not None and isinstance(x.load, StoredData) and x.load.data is file for x in literals)
    x = rng.standard_normal((3, 5)).astype(np.float32)
    assert_close(evaluate(graph, {"x": x})["v3"], x + sum(held.values()), 1e-6)


def test_external_data_that_is_changed_after_the_import_is_not_used(tmp_path: Path) -> None:
    held = {"w": np.ones((64, 64), np.float32)}
    proto = model([node("Add", ["x", "w"], ["y"])], [info("x", [64, 64])], ["y"], held)
    onnx.save_model(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    graph = load(tmp_path / "m.onnx")
    os.truncate(tmp_path / "w.bin", 99)
    with pytest.raises(ModelError, match="a weight cannot be read: was changed after it was opened"):
        literal_of(graph.value("w"))


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT8E4M3FN, TensorProto.UINT2])
def test_external_data_of_a_narrow_type(kind: int, tmp_path: Path) -> None:
    """Several numbers share a byte in the file, too."""
    dtype = DTYPES[kind]
    weight = (np.arange(77) % 3).astype(np.float32).astype(np.int8).astype(dtype.numpy).reshape(7, 11)
    nodes = [helper.make_node("Cast", ["w"], ["c"], to=TensorProto.FLOAT), helper.make_node("Add", ["x", "c"], ["y"])]
    proto = model(nodes, [info("x", [7, 11])], ["y"], opset=26)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save_model(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert (tmp_path / "w.bin").stat().st_size == -(-77 * dtype.bits // 8)
    x = np.zeros((7, 11), np.float32)
    np.testing.assert_array_equal(evaluate(load(tmp_path / "m.onnx"), {"x": x})["y"], weight.astype(np.float32))


def test_external_data_at_an_odd_offset_in_a_subfolder(tmp_path: Path) -> None:
    array = np.array([1.5, 2.5], np.float32)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(b"xyz" + array.tobytes())
    tensor = TensorProto(name="w", dims=[2], data_type=1, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "sub/w.bin", "offset": "3", "length": "8"}.items():
        tensor.external_data.add(key=key, value=value)
    proto = model([], [], ["w"])
    proto.graph.initializer.append(tensor)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    np.testing.assert_array_equal(literal_of(load(tmp_path / "m.onnx").outputs[0]), array)


# functions ---------------------------------------------------------------------------------------------------


def test_functions_are_inlined(rng: np.random.Generator) -> None:
    attribute = node("Elu", ["x"], ["y"])
    attribute.attribute.add(name="alpha", ref_attr_name="a", type=onnx.AttributeProto.FLOAT)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("me", 1)]
    inner = helper.make_function("me", "Inner", ["x"], ["y"], [attribute], opsets, attributes=["a"])
    outer_nodes = [node("Inner", ["x"], ["h"], domain="me", a=0.5), node("Add", ["h", "x"], ["y"])]
    outer = helper.make_function("me", "Outer", ["x"], ["y"], outer_nodes, opsets)
    nodes = [node("Outer", ["x"], ["t"], domain="me"), node("Outer", ["t"], ["y"], domain="me")]
    proto = model(nodes, [info("x", [4, 5])], ["y"], functions=[outer, inner])
    proto.opset_import.add(domain="me", version=1)
    graph = load(proto)
    assert [n.op.name for n in graph.nodes] == ["elu", "add", "elu", "add"]
    x = rng.standard_normal((4, 5)).astype(np.float32)
    plain = model([node("Elu", ["x"], ["h"], alpha=0.5), node("Add", ["h", "x"], ["t"]),
                   node("Elu", ["t"], ["k"], alpha=0.5), node("Add", ["k", "t"], ["y"])],
                  [info("x", [4, 5])], [info("y", [4, 5])])  # fmt: skip
    assert_close(evaluate(graph, {"x": x})["y"], run(plain, {"x": x})[0], 1e-6)


@pytest.mark.parametrize(
    ("op", "shape", "how"),
    [
        ("Add", (3,), {"axis": 1}),
        ("Mul", (3,), {"axis": -2}),
        ("Sub", (2, 3), {"axis": 0}),
        ("Pow", (3, 4), {"axis": 1}),
        ("Div", (4,), {}),
    ],
)
def test_operands_of_opset_6_broadcast_along_their_axis(op: str, shape: tuple[int, ...], how: dict[str, Any]) -> None:
    """onnx's converter refuses all of these whose operand does not fit the last dims."""
    nodes = [node("Abs", ["w"], ["v"]), node(op, ["x", "v"], ["y"], broadcast=1, **how)]
    w = np.linspace(0.5, 2, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    outputs = [info("y", [2, 3, 4])]
    graph = load(model(nodes, [info("x", [2, 3, 4]), info("w", shape)], outputs, {"w": w}, opset=6))
    x = np.linspace(1, 2, 24, dtype=np.float32).reshape(2, 3, 4)
    start = how.get("axis", -len(shape)) % 3
    wide = w.reshape(*shape, *[1] * (3 - start - len(shape)))
    meaning = {"Add": np.add, "Mul": np.multiply, "Sub": np.subtract, "Pow": np.power, "Div": np.divide}[op]
    assert_close(evaluate(graph, {"x": x})["y"], meaning(x, wide), 1e-6)


def test_the_mean_of_no_elements_is_nan() -> None:
    """As in NumPy, torch and onnx's reference; onnxruntime gives 0."""
    proto = model([node("ReduceMean", ["x", "axes"], ["y"])], [info("x", [0, 4])], ["y"], {"axes": np.array([0])})
    y = evaluate(load(proto), {"x": np.zeros((0, 4), np.float32)})["y"]
    assert y.shape == (1, 4)
    assert np.isnan(y).all()


def test_the_mean_of_no_integers_is_refused() -> None:
    inputs = [info("x", [0, 4], TensorProto.INT32)]
    with pytest.raises(ModelError, match="mean of no i32"):
        load(model([node("ReduceMean", ["x", "axes"], ["y"])], inputs, ["y"], {"axes": np.array([0])}))


def test_functions_of_another_opset_that_has_the_same_ops() -> None:
    """skl2onnx writes imputers so, the functions in opset 21 and the model in 22. onnxruntime takes them, too."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])
    body = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])]
    function = helper.make_function("me", "F", ["x"], ["y"], body, [helper.make_opsetid("", 17)])
    graph = helper.make_graph([helper.make_node("F", ["x"], ["y"], domain="me")], "g", [x], [y])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("me", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)
    values = np.array([-1.0, 0.5, 2.0], np.float32)
    got = evaluate(load(proto), {"x": values})["y"]
    assert_close(got, values / (1 + np.exp(-values.astype(np.float64))), 1e-6)
    assert proto.functions[0].opset_import[0].version == 17, "the caller's model stays as it was"
