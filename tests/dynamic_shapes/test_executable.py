"""Test models with symbolic dims: a program per set of shapes, shared weights, padding where it is proved harmless."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model, run
from helpers import assert_close, one_program, quick
from onnx import TensorProto, helper

import fusec
from fusec.errors import ExecutionError, FusecError, ModelError
from fusec.ir import Array, Literal
from fusec.passes.rewriting.derived_constants import EAGER_BYTES

pytestmark = [pytest.mark.cudnn, pytest.mark.usefixtures("no_gpu")]


node = helper.make_node


def weights(**shapes: Sequence[int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}


def image_net() -> onnx.ModelProto:
    """A convolution, a pool, a flatten by the batch size, and a classifier."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("GlobalAveragePool", ["r"], ["g"]),
        node("Shape", ["g"], ["s"], start=0, end=1),
        node("Concat", ["s", "rest"], ["to"], axis=0),
        node("Reshape", ["g", "to"], ["f"]),
        node("MatMul", ["f", "fc"], ["y"]),
    ]
    held = {**weights(w=[8, 3, 3, 3], fc=[8, 5]), "rest": np.array([-1], np.int64)}
    return model(nodes, [info("x", ["N", 3, "H", "H"])], [info("y", ["N", 5])], held)


def attention() -> onnx.ModelProto:
    """Self-attention of two heads over [B, S, 8], heads and batch joined in one dim, and a residual."""
    nodes: list[onnx.NodeProto] = []
    for name in "qkv":
        nodes += [
            node("MatMul", ["x", f"w{name}"], [f"{name}1"]),
            node("Reshape", [f"{name}1", "split"], [f"{name}2"]),
            node("Transpose", [f"{name}2"], [f"{name}3"], perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]),
        ]
    nodes += [
        node("MatMul", ["q3", "k3"], ["a"]),
        node("Softmax", ["a"], ["p"], axis=-1),
        node("MatMul", ["p", "v3"], ["o"]),
        node("Transpose", ["o"], ["t"], perm=[0, 2, 1, 3]),
        node("Reshape", ["t", "join"], ["j"]),
        node("Add", ["j", "x"], ["y"]),
        node("ReduceMean", ["y", "one"], ["z"], keepdims=0),
    ]
    ints = {"split": [0, 0, 2, 4], "join": [0, 0, 8], "one": [1]}
    held = {**weights(wq=[8, 8], wk=[8, 8], wv=[8, 8]), **{k: np.array(v, np.int64) for k, v in ints.items()}}
    return model(nodes, [info("x", ["B", "S", 8])], [info("y", ["B", "S", 8]), info("z", ["B", 8])], held)


def fresh(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def check(exe: fusec.DynamicExecutable, proto: onnx.ModelProto, **feeds: np.ndarray) -> None:
    want = run(proto, feeds)
    got = exe.run(None, feeds)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-5)


def test_each_shape_is_compiled_once_when_it_first_comes() -> None:
    proto = image_net()
    exe = fusec.compile_dynamic(proto, max_shapes=2)
    assert exe.device == "simulated"
    assert [(s.name, s.shape) for s in exe.inputs] == [("x", ("N", 3, "H", "H"))]
    assert exe.shapes == []
    for batch, side in ((1, 8), (3, 8), (1, 8)):
        check(exe, proto, x=fresh(batch, 3, side, side))
    first = exe.at({"x": (1, 3, 8, 8)})
    assert exe.shapes == [{"x": (3, 3, 8, 8)}, {"x": (1, 3, 8, 8)}]
    check(exe, proto, x=fresh(2, 3, 6, 6))
    assert exe.shapes == [{"x": (1, 3, 8, 8)}, {"x": (2, 3, 6, 6)}], "the one used longest ago goes"
    assert exe.at({"x": (1, 3, 8, 8)}) is first
    assert_close(exe(fresh(2, 3, 6, 6)), run(proto, {"x": fresh(2, 3, 6, 6)})[0], 1e-5)


def prepared(exe: fusec.Executable) -> list[Array]:
    return [array for array in exe._constants.arrays.values() if array.size > 16]


def test_weights_are_held_once_and_let_go_of() -> None:
    exe = fusec.compile_dynamic(image_net(), max_shapes=2)
    one, two = one_program(exe.at({"x": (1, 3, 8, 8)})), one_program(exe.at({"x": (2, 3, 8, 8)}))
    for batch, each in ((1, one), (2, two)):
        each(fresh(batch, 3, 8, 8))
    assert prepared(one)
    assert {id(a) for a in prepared(one)} == {id(a) for a in prepared(two)}
    literals = [{id(v.literal) for v in e.compiled.graph.values() if v.literal is not None} for e in (one, two)]
    assert literals[0] & literals[1]
    apart = one_program(fusec.compile(image_net(), shapes={"x": (2, 3, 8, 8)}))
    apart(fresh(2, 3, 8, 8))
    assert prepared(apart)
    assert not {id(a) for a in prepared(apart)} & {id(a) for a in prepared(one)}
    gone = [weakref.ref(a) for a in prepared(one)]
    del one, two, each, exe
    gc.collect()
    assert all(ref() is None for ref in gone)


@pytest.mark.parametrize("called", quick([True, False], [False]))
def test_the_next_size_reads_no_weights(monkeypatch: pytest.MonkeyPatch, called: bool) -> None:
    """Neither those of the model, nor those that passes folded, cast or transposed."""
    rng = np.random.default_rng(5)
    filters, square = (rng.standard_normal(shape).astype(np.float32) for shape in ((1280, 3, 3, 3), (200, 200)))
    statistics = {name: rng.uniform(0.5, 1.5, 1280).astype(np.float32) for name in ("scale", "bias", "mean", "var")}
    nodes = [
        node("Conv", ["x", "f"], ["c"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", *statistics], ["n"]),
        node("Relu", ["n"], ["r"]),
        node("Reshape", ["r", "rows"], ["s"]),
        node("MatMul", ["s", "w"], ["m"]),
        node("Gelu", ["m"], ["y"]),
    ]
    held = {"f": filters, **statistics, "rows": np.array([-1, 2, 200]), "w": square}
    proto = model(nodes, [info("x", ["N", 3, 10, 10])], ["y"], held, opset=20)
    exe = fusec.compile_dynamic(proto, precision="fp16")
    if called:
        exe(fresh(1, 3, 10, 10))
    else:
        exe.at({"x": (1, 3, 10, 10)})
    read: list[int] = []
    loaded = Literal._loaded

    def counted(literal: Literal) -> np.ndarray:
        read.append(literal.type.nbytes)
        return loaded(literal)

    monkeypatch.setattr(Literal, "_loaded", counted)
    second = exe(np.concatenate([fresh(1, 3, 10, 10)] * 2))
    first = exe(fresh(1, 3, 10, 10))
    assert max(read) <= EAGER_BYTES
    assert_close(second[:320], first, 1e-6)
    apart = fusec.compile(proto, shapes={"x": (2, 3, 10, 10)}, precision="fp16")
    assert_close(apart(np.concatenate([fresh(1, 3, 10, 10)] * 2)), second, 0.0)
    assert max(read) == square.nbytes, "somebody reads them"


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"a": (2, 3), "b": (4, 3)}, "dim 'N' is 2 in input %a, 4 in input %b"),
        ({"a": (2, 4), "b": (2, 3)}, r"input %a has shape \[N, 3\], the array \[2, 4\]"),
        ({"a": (2, 3, 1), "b": (2, 3)}, r"input %a has shape \[N, 3\], the array \[2, 3, 1\]"),
        ({"a": (2, 3)}, "input %b is missing"),
        ({"a": (2, 3), "b": (2, 3), "c": (1,)}, "no input %c; inputs are %a, %b"),
    ],
)
def test_shapes_that_do_not_agree(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    proto = model([node("Add", ["a", "b"], ["y"])], [info("a", ["N", 3]), info("b", ["N", 3])], ["y"])
    exe = fusec.compile_dynamic(proto)
    with pytest.raises(ExecutionError, match=message):
        exe.run(None, {name: fresh(*shape) for name, shape in shapes.items()})
    with pytest.raises(ExecutionError, match=message):
        exe.at(shapes)


def test_buckets_pad_and_cut_back() -> None:
    proto = image_net()
    exe = fusec.compile_dynamic(proto, buckets={"N": [4, 2]})
    for batch in (1, 2, 3, 4, 3, 6):
        check(exe, proto, x=fresh(batch, 3, 8, 8, seed=batch))
    assert [s["x"][0] for s in exe.shapes] == [2, 4, 6]
    out = np.empty((3, 5), np.float32)
    (got,) = exe.run(["y"], {"x": fresh(3, 3, 8, 8)}, out={"y": out})
    assert got is out
    assert_close(out, run(proto, {"x": fresh(3, 3, 8, 8)})[0], 1e-5)


def test_a_size_that_is_a_bucket_is_not_padded() -> None:
    exe = fusec.compile_dynamic(image_net(), buckets={"N": [2, 4]})
    exe(fresh(2, 3, 8, 8))
    exe(fresh(4, 3, 8, 8))
    assert [s["x"][0] for s in exe.shapes] == [2, 4]


def test_padded_results_go_to_the_arrays_that_are_given() -> None:
    nodes = [node("Relu", ["x"], ["y"]), node("Neg", ["x"], ["z"]), node("ReduceSum", ["x", "last"], ["s"], keepdims=0)]
    proto = model(nodes, [info("x", ["N", 4])], ["y", "z", "s"], ints(last=[1]))
    exe = fusec.compile_dynamic(proto, buckets={"N": [8]})
    x = fresh(3, 4)
    want = dict(zip("yzs", run(proto, {"x": x}), strict=True))
    out = {"z": np.empty((3, 4), np.float32), "y": np.empty((3, 4), np.float32)}
    got = exe.run(["z", "s", "y"], {"x": x}, out=out)
    assert got[0] is out["z"] and got[2] is out["y"]
    for name, array in zip("zsy", got, strict=True):
        assert_close(array, want[name], 1e-6)


def test_batches_of_attention_are_padded_and_sequences_are_not() -> None:
    proto = attention()
    exe = fusec.compile_dynamic(proto, buckets={"B": [4]})
    for batch, length in ((3, 5), (1, 5), (1, 1), (4, 5)):
        check(exe, proto, x=fresh(batch, length, 8))
    assert [s["x"] for s in exe.shapes] == [(4, 1, 8), (4, 5, 8)]
    refused = fusec.compile_dynamic(proto, buckets={"S": [8]})
    with pytest.raises(ModelError, match=r"dim 'S' cannot be padded from 5 to 8: rows meet other rows"):
        refused(fresh(2, 5, 8))
    check(refused, proto, x=fresh(2, 8, 8))


def test_two_dims_are_padded_at_once() -> None:
    """The results are cut along both, also where they are joined in one dim."""
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Reshape", ["m", "flat"], ["f"]), node("Relu", ["f"], ["y"])]
    held = {**weights(w=[4, 6]), "flat": np.array([-1, 6], np.int64)}
    proto = model(nodes, [info("x", ["B", "S", 4])], [info("y", ["BS", 6])], held)
    exe = fusec.compile_dynamic(proto, buckets={"B": [4], "S": [8]})
    for batch, length in ((3, 5), (4, 5), (1, 8), (1, 1)):
        check(exe, proto, x=fresh(batch, length, 4))
    assert [s["x"] for s in exe.shapes] == [(4, 8, 4)]


def refused(nodes: Sequence[onnx.NodeProto], held: dict[str, np.ndarray] | None = None, dtype: int = 1) -> str:
    """Return the reason why a model of `x: [N, 4]` cannot be padded from 3 rows to 8."""
    proto = model(nodes, [info("x", ["N", 4], dtype)], ["y"], held)
    exe = fusec.compile_dynamic(proto, buckets={"N": [8]})
    array = np.random.default_rng(0).integers(0, 3, (3, 4)) if dtype == TensorProto.INT64 else fresh(3, 4)
    with pytest.raises(ModelError, match="dim 'N' cannot be padded from 3 to 8: ") as caught:
        exe(array)
    return str(caught.value)


def ints(**values: Sequence[int]) -> dict[str, np.ndarray]:
    return {name: np.array(value, np.int64) for name, value in values.items()}


def test_what_mixes_rows_is_refused_with_the_reason() -> None:
    assert "it is reduced" in refused([node("ReduceSum", ["x", "a"], ["y"])], ints(a=[0]))
    assert "softmax works along it" in refused([node("Softmax", ["x"], ["y"], axis=0)])
    assert "rows meet other rows" in refused(
        [node("Transpose", ["x"], ["t"], perm=[1, 0]), node("MatMul", ["x", "t"], ["y"])]
    )
    assert "it is summed over" in refused(
        [node("Transpose", ["x"], ["t"], perm=[1, 0]), node("MatMul", ["t", "x"], ["y"])]
    )
    assert "concat works along it" in refused([node("Concat", ["x", "x"], ["y"], axis=0)])
    assert "rows are gathered" in refused([node("Gather", ["x", "i"], ["y"], axis=0)], ints(i=[0, 2]))
    assert "it is sliced" in refused([node("Slice", ["x", "a", "b"], ["y"])], ints(a=[1], b=[3]))
    backwards = ints(a=[-1], b=[-9], c=[0], d=[-1])
    assert "starts depends on it" in refused([node("Slice", ["x", "a", "b", "c", "d"], ["y"])], backwards)
    assert "it is padded" in refused([node("Pad", ["x", "p"], ["y"])], ints(p=[1, 0, 0, 0]))
    assert "cumulate works along it" in refused([node("CumSum", ["x", "a"], ["y"])], {"a": np.array(0)})


def test_numbers_made_from_the_size_are_refused() -> None:
    """A scale by the batch size keeps rows apart, and yet the padded rows would count."""
    nodes = [
        node("Shape", ["x"], ["s"], end=1),
        node("Cast", ["s"], ["f"], to=TensorProto.FLOAT),
        node("Div", ["x", "f"], ["y"]),
    ]
    assert "a number depends on it" in refused(nodes)
    nodes = [node("Shape", ["x"], ["s"], end=1), node("Sub", ["s", "one"], ["l"]), node("Gather", ["w", "l"], ["r"])]
    nodes.append(node("Add", ["x", "r"], ["y"]))
    assert "depends on it" in refused(nodes, {**weights(w=[20, 4]), **ints(one=[1])})


def test_constants_with_more_rows_of_the_same_beginning_are_fine() -> None:
    """Row numbers, and zeros for each row, as exporters make them from the shape."""
    nodes = [
        node("Shape", ["x"], ["s"], end=1),
        node("Squeeze", ["s"], ["n"]),
        node("Range", ["zero", "n", "one"], ["r"]),
        node("Unsqueeze", ["r", "axis"], ["c"]),
        node("Cast", ["c"], ["f"], to=TensorProto.FLOAT),
        node("Add", ["x", "f"], ["y"]),
    ]
    held = {"zero": np.array(0, np.int64), "one": np.array(1, np.int64), **ints(axis=[1])}
    proto = model(nodes, [info("x", ["N", 4])], [info("y", ["N", 4])], held)
    exe = fusec.compile_dynamic(proto, buckets={"N": [8]})
    check(exe, proto, x=fresh(3, 4))
    assert exe.shapes == [{"x": (8, 4)}]


def test_ops_along_other_dims_let_a_batch_be_padded() -> None:
    nodes = [
        node("Slice", ["x", "from", "to", "dim"], ["a"]),
        node("Pad", ["a", "pads"], ["b"]),
        node("Resize", ["b", "", "scales"], ["c"], mode="linear"),
        node("Shape", ["x"], ["n"], end=1),
        node("Concat", ["n", "row"], ["shape"], axis=0),
        node("Expand", ["token", "shape"], ["t"]),
        node("Concat", ["t", "c"], ["y"], axis=3),
    ]
    ints_held = ints(**{"from": [1], "to": [4], "dim": [2], "pads": [0, 0, 1, 0, 0, 0, 0, 1], "row": [1, 8, 1]})
    held = {**ints_held, **weights(token=[1, 8, 1]), "scales": np.array([1, 1, 2, 1], np.float32)}
    proto = model(nodes, [info("x", ["N", 1, 4, 5])], [info("y", ["N", 1, 8, 7])], held)
    exe = fusec.compile_dynamic(proto, buckets={"N": [4]})
    for batch in (3, 1, 4):
        check(exe, proto, x=fresh(batch, 1, 4, 5))
    assert [s["x"] for s in exe.shapes] == [(4, 1, 4, 5)]


def test_a_square_input_is_refused() -> None:
    proto = model([node("Relu", ["x"], ["y"])], [info("x", ["N", "N"])], ["y"])
    with pytest.raises(ModelError, match="input %x has it twice"):
        fusec.compile_dynamic(proto, buckets={"N": [8]})(fresh(3, 3))


def test_options_that_make_no_sense() -> None:
    proto = image_net()
    with pytest.raises(FusecError, match="max_shapes is 0, but must be 1 or more"):
        fusec.compile_dynamic(proto, max_shapes=0)
    with pytest.raises(ModelError, match="there is no symbolic dim 'batch'; those of the inputs: H, N"):
        fusec.compile_dynamic(proto, buckets={"batch": [1]})
    with pytest.raises(FusecError, match=r"buckets of 'N' are \[0\], but must be sizes"):
        fusec.compile_dynamic(proto, buckets={"N": [0]})
    with pytest.raises(ModelError, match="No such file"):
        fusec.compile_dynamic("nowhere.onnx")


def test_a_graph_is_dynamic_in_nothing() -> None:
    graph = fusec.parse('graph "g" (%x: f32[2,3]) {\n %y = relu(%x)\n return %y\n}')
    exe = fusec.compile_dynamic(graph)
    assert_close(exe(fresh(2, 3)), np.maximum(fresh(2, 3), 0), 0)
    with pytest.raises(ExecutionError, match=r"has shape \[2, 3\], the array \[1, 3\]"):
        exe(fresh(1, 3))


def test_the_next_size_is_made_without_looking_for_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    exe = fusec.compile_dynamic(image_net(), simulate=True)
    enabled: list[bool] = []
    compiled = exe._compile
    monkeypatch.setattr(exe, "_compile", lambda shapes: (enabled.append(gc.isenabled()), compiled(shapes))[1])
    for batch in (1, 2):
        exe(fresh(batch, 3, 4, 4))
    assert enabled == [True, False]
    assert gc.isenabled()
    monkeypatch.setattr(exe, "_compile", lambda shapes: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        exe(fresh(3, 3, 4, 4))
    assert gc.isenabled()


@pytest.mark.parametrize("function", [fusec.compile_dynamic, fusec.InferenceSession], ids=lambda f: f.__name__)
def test_every_option_of_a_program_is_one_for_all_sizes(function: Callable[..., Any]) -> None:
    for_one_program = {"state", "lock", "family", "oracle"}
    elsewhere = {"constants", "progress", "simulate"} if function is fusec.InferenceSession else set[str]()
    missing = inspect.signature(fusec.compile).parameters.keys() - inspect.signature(function).parameters.keys()
    assert missing - elsewhere - {"model"} == for_one_program


def test_rounding_as_in_the_source_for_all_sizes() -> None:
    """A value that the model rounds to fp16 stays rounded, in both calls."""
    nodes = [node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16), node("Cast", ["h"], ["y"], to=TensorProto.FLOAT)]
    proto = model(nodes, [info("x", ["N"])], [info("y", ["N"])])
    x = np.array([1 + 2**-12, 2 + 2**-11], np.float32)
    assert fusec.compile_dynamic(proto, rounding="source")(x).tolist() == [1.0, 2.0]
    session = fusec.InferenceSession(proto.SerializeToString(), rounding="source")
    assert session.run(None, {"x": x})[0].tolist() == [1.0, 2.0]
    assert fusec.compile_dynamic(proto)(x).tolist() == x.tolist()
