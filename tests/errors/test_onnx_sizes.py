"""Test small models that ask for huge tensors: refused by a message with the size, before anything is allocated."""

from __future__ import annotations

import os
import re
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frontends.onnx.models import info, model
from onnx import NodeProto, TensorProto, helper

from fusec.errors import ModelError, VerifyError
from fusec.frontends import Source, load
from fusec.graph.types import MAX_TENSOR_BYTES
from fusec.ir import Constant, DType, Graph, Literal, TensorType
from fusec.ops import Concat, pw
from fusec.passes.base import Options
from fusec.passes.cleanup.fold_constants import FoldConstants

MOST = 8 << 20  # bytes an import that is refused may have allocated at one time
INT = TensorProto.INT64
HUGE = 1 << 40
node = helper.make_node
Held = dict[str, Any]


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def _number(value: float, dtype: type = np.int64) -> np.ndarray:
    return np.array(value, dtype)


def _mel(bins: int, length: int) -> Held:
    edges = {"low": np.float32(0), "high": np.float32(8000)}
    return {"bins": _number(bins), "length": _number(length), "rate": _number(16000), **edges}


def _windowed(op: str, **attributes: Any) -> NodeProto:
    return node(op, ["x", "w"] if "Conv" in op else ["x"], ["y"], name="n", **attributes)


def _body(result: NodeProto, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    flags = {"go": TensorProto.BOOL, "i": INT}
    read, made = ([info(v, [] if v in flags else None, flags.get(v, 1)) for v in vs] for vs in (inputs, outputs))
    return helper.make_graph([result], "b", read, made)


IMAGE = [1, 1, 4, 4]
WEIGHT: Held = {"w": np.ones((1, 1, 2, 2), np.float32)}
ROW = [1, 1, 1 << 20]
# case: (nodes, the last one named n; shape of x, None for no input; initializers)
CASES: dict[str, tuple[list[NodeProto], Sequence[int] | None, Held]] = {
    "ConstantOfShape": ([node("ConstantOfShape", ["s"], ["y"], name="n")], None, {"s": _ints(HUGE)}),
    "Expand": ([node("Expand", ["x", "s"], ["y"], name="n")], [1], {"s": _ints(HUGE)}),
    "Expand of a constant": ([node("Expand", ["c", "s"], ["y"], name="n")], None,
                             {"c": np.ones(1, np.float32), "s": _ints(1 << 30)}),
    "Tile": ([node("Tile", ["x", "s"], ["y"], name="n")], [2, 3], {"s": _ints(HUGE, 1)}),
    "Range": ([node("Range", ["a", "b", "c"], ["y"], name="n")], None,
              {"a": _number(0), "b": _number(1 << 30), "c": _number(1)}),
    "Range of floats": ([node("Range", ["a", "b", "c"], ["y"], name="n")], None,
                        {"a": _number(0, np.float32), "b": _number(1e30, np.float32), "c": _number(1, np.float32)}),
    "OneHot": ([node("OneHot", ["i", "d", "v"], ["y"], name="n")], None,
               {"i": _ints(1, 2), "d": _number(HUGE), "v": np.array([0, 1], np.float32)}),
    "OneHot of 2**29": ([node("OneHot", ["i", "d", "v"], ["y"], name="n")], None,
                        {"i": _ints(1, 2), "d": _number(1 << 29), "v": np.array([0, 1], np.float32)}),
    "MelWeightMatrix": ([node("MelWeightMatrix", [*_mel(1 << 30, 4)], ["y"], name="n")], None, _mel(1 << 30, 4)),
    "MelWeightMatrix, long": ([node("MelWeightMatrix", [*_mel(8, 1 << 28)], ["y"], name="n")], None, _mel(8, 1 << 28)),
    "HannWindow": ([node("HannWindow", ["s"], ["y"], name="n")], None, {"s": _number(1 << 31)}),
    "BlackmanWindow": ([node("BlackmanWindow", ["s"], ["y"], name="n")], None, {"s": _number(HUGE)}),
    "Pad": ([node("Pad", ["x", "p"], ["y"], name="n")], [2], {"p": _ints(0, HUGE)}),
    "Resize by sizes": ([node("Resize", ["x", "", "", "s"], ["y"], name="n")], IMAGE, {"s": _ints(1, 1, 4, HUGE)}),
    "Resize by scales": ([node("Resize", ["x", "", "s"], ["y"], name="n", mode="linear")], IMAGE,
                         {"s": np.array([1, 1, 1e6, 1e6], np.float32)}),
    "cubic Resize": ([node("Resize", ["x", "", "", "s"], ["y"], name="n", mode="cubic")], IMAGE,
                     {"s": _ints(1, 1, 4, 1 << 28)}),
    "cropped Resize": ([node("Resize", ["x", "r", "", "s"], ["y"], name="n",
                             coordinate_transformation_mode="tf_crop_and_resize")], IMAGE,
                       {"r": np.array([0, 0, 0, 0, 1, 1, 1, 1], np.float32), "s": _ints(1, 1, 4, 1 << 28)}),
    "EyeLike": ([node("EyeLike", ["x"], ["y"], name="n")], [1 << 16, 1 << 16], {}),
    "Trilu": ([node("Trilu", ["x"], ["y"], name="n")], [1 << 17, 1 << 15], {}),
    "ConvTranspose by strides": ([_windowed("ConvTranspose", strides=[1 << 30, 1 << 30])], IMAGE, WEIGHT),
    "ConvTranspose by output_padding": (
        [_windowed("ConvTranspose", strides=[1, HUGE], output_padding=[0, HUGE - 1])], [1, 1, 4, 1], WEIGHT),
    "ConvTranspose by pads": (
        [_windowed("ConvTranspose", strides=[1, HUGE], pads=[0, 0, 0, 3 * HUGE])], IMAGE, WEIGHT),
    "Conv by pads": ([_windowed("Conv", strides=[1, HUGE], pads=[0, 0, 0, HUGE])], IMAGE, WEIGHT),
    "MaxPool by pads": (
        [_windowed("MaxPool", kernel_shape=[1, HUGE], pads=[0, HUGE - 1, 0, HUGE - 1], strides=[1, HUGE])], IMAGE, {}),
    "LpPool": ([_windowed("LpPool", kernel_shape=[1, HUGE], pads=[0, HUGE - 1, 0, 0])], IMAGE, {}),
    "MaxUnpool": ([node("MaxUnpool", ["x", "p"], ["y"], name="n", kernel_shape=[2, 2], strides=[1 << 20, 1 << 20])],
                  [1, 1, 4, 4], {"p": np.zeros((1, 1, 4, 4), np.int64)}),
    "MaxPool with places": ([node("MaxPool", ["x"], ["z", "y"], name="n", kernel_shape=[1 << 14])], ROW, {}),
    "Add that broadcasts": (
        [node("Reshape", ["x", "s"], ["a"]), node("Reshape", ["x", "t"], ["b"]),
         node("Add", ["a", "b"], ["y"], name="n")], [1 << 20], {"s": _ints(-1, 1), "t": _ints(1, -1)}),
    "MatMul": (
        [node("Reshape", ["x", "s"], ["a"]), node("Reshape", ["x", "t"], ["b"]),
         node("MatMul", ["a", "b"], ["y"], name="n")], [1 << 20], {"s": _ints(-1, 1), "t": _ints(1, -1)}),
    "Gather": ([node("Gather", ["x", "i"], ["y"], name="n")], [1, 1 << 24], {"i": np.zeros(1 << 12, np.int64)}),
    "GatherElements": ([node("Expand", ["i", "s"], ["j"]), node("GatherElements", ["x", "j"], ["y"], name="n", axis=1)],
                       [1 << 20, 2], {"i": _ints(0), "s": _ints(1 << 20, 1 << 10)}),
    "ScatterND": ([node("Expand", ["x", "s"], ["big"], name="n"), node("ScatterND", ["big", "i", "u"], ["y"])],
                  [1], {"s": _ints(HUGE), "i": _ints(0).reshape(1, 1), "u": np.ones(1, np.float32)}),
    "STFT": ([node("STFT", ["x", "h", "", "l"], ["y"], name="n")], [1, 1 << 20, 1],
             {"h": _number(1), "l": _number(1 << 13)}),
    "DFT": ([node("DFT", ["x", "l"], ["y"], name="n")], [1 << 21, 4, 1], {"l": _number(1 << 13)}),
    "Col2Im": ([node("Col2Im", ["x", "i", "b"], ["y"], name="n")], [1, 1, 1 << 30],
               {"i": _ints(1, 1 << 30), "b": _ints(1, 1)}),
    "TfIdfVectorizer": ([node("TfIdfVectorizer", ["x"], ["y"], name="n", mode="TF", min_gram_length=1,
                              max_gram_length=1, max_skip_count=0, ngram_counts=[0], ngram_indexes=[HUGE],
                              pool_int64s=[1])], [4], {}),
    "ConcatFromSequence": ([node("Expand", ["x", "s"], ["e"]), node("SequenceConstruct", ["e"] * 8, ["q"]),
                            node("ConcatFromSequence", ["q"], ["y"], name="n", axis=0)], [1], {"s": _ints(1 << 33)}),
    "Loop": ([node("Loop", ["t", "", "x"], ["y"], name="n",
                   body=_body(node("Concat", ["e", "e"], ["f"], axis=0), ["i", "go", "e"], ["go", "f"]))],
             [4], {"t": _number(64)}),
    "Scan": ([node("Expand", ["c", "s"], ["e"]),
              node("Scan", ["x", "e"], ["z", "y"], name="n", num_scan_inputs=1,
                   body=_body(node("Add", ["a", "b"], ["f"]), ["a", "b"], ["f", "f"]))],
             [1, 1 << 34], {"c": np.ones(1, np.float32), "s": _ints(64, 1)}),
}  # fmt: skip


# what the message names where it is not the node n and its result y
NAMED = {
    "GatherElements": ("node 'Expand_0' (Expand)", "'j'"),
    "ScatterND": ("node 'n' (Expand)", "'big'"),
    "MaxPool with places": ("node 'n' (MaxPool)", "'z'"),
    "Loop": ("node 'n' (Loop): in its body, node 'Concat_0' (Concat)", "'f'"),
    "Scan": ("node 'n' (Scan)", "'z'"),
    "HannWindow": ("node 'n' (HannWindow): in its body, node ", "'Range'"),
    "BlackmanWindow": ("node 'n' (BlackmanWindow): in its body, node ", "'Range'"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_huge_result_is_refused_before_it_is_allocated(name: str) -> None:
    nodes, shape, held = CASES[name]
    inputs = [] if shape is None else [info("x", shape, INT if name == "TfIdfVectorizer" else TensorProto.FLOAT)]
    source = Source(model(nodes, inputs, ["y"], held))
    op = nodes[-1].op_type
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as caught:
            source.load()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST
    at, result = NAMED.get(name, (f"node 'n' ({op})", "'y'"))
    said = rf"{re.escape(at)}.*: for its result {result}, .* takes [0-9.e+]+ GiB; the limit is (2|64) GiB"
    assert re.search(said, str(caught.value)), str(caught.value)


def test_a_sequence_of_very_many_parts_is_refused_before_it_is_made() -> None:
    nodes = [node("SplitToSequence", ["x"], ["q"], name="n"), node("ConcatFromSequence", ["q"], ["y"], axis=0)]
    with pytest.raises(ModelError, match=r"node 'n' \(SplitToSequence\): the model unrolls to more than"):
        load(model(nodes, [info("x", [1 << 30])], ["y"]))


@pytest.mark.parametrize(
    ("nodes", "shape", "held"),
    [
        ([node("Range", ["a", "b", "c"], ["y"])], None, {"a": _number(0), "b": _number(1 << 27), "c": _number(1)}),
        ([node("EyeLike", ["x"], ["y"])], [1 << 14, 1 << 14], {}),
        ([node("MelWeightMatrix", [*_mel(8, 1 << 26)], ["y"])], None, _mel(8, 1 << 26)),
        ([node("DFT", ["x"], ["y"])], [1, 1 << 13, 2], {}),
        ([node("OneHot", ["i", "d", "v"], ["y"])], None,
         {"i": _ints(1, 2), "d": _number(1 << 27), "v": np.array([0, 1], np.float32)}),
    ],
    ids=["Range", "EyeLike", "MelWeightMatrix", "DFT", "OneHot"],
)  # fmt: skip
def test_a_large_constant_within_the_limit_takes_no_memory_until_it_is_read(
    nodes: list[NodeProto], shape: Sequence[int] | None, held: Held
) -> None:
    source = Source(model(nodes, [] if shape is None else [info("x", shape)], ["y"], held))
    tracemalloc.start()
    try:
        graph = source.load()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST
    assert any(v.type.nbytes >= 1 << 30 for v in graph.values())


def test_a_constant_computed_by_blocks_is_the_same_as_at_once() -> None:
    """3,000,001 elements: two whole blocks and a part."""
    held = {"a": _number(5), "b": _number(5 + 3 * 3_000_001), "c": _number(3)}
    graph = load(model([node("Range", list(held), ["y"])], [], ["y"], held))
    literal = graph.outputs[0].literal
    assert literal is not None
    np.testing.assert_array_equal(literal.array, np.arange(5, 5 + 3 * 3_000_001, 3))


def test_a_large_weight_may_be_transposed(tmp_path: Path) -> None:
    """A constant may be as large as its operands: here 3 GiB, of which the file has no byte."""
    (tmp_path / "w.bin").touch()
    os.truncate(tmp_path / "w.bin", 3 << 30)
    weight = TensorProto(name="w", dims=[3, 1 << 28], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="w.bin")
    proto = model([node("Transpose", ["w"], ["y"])], [], ["y"])
    proto.graph.initializer.append(weight)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    assert load(tmp_path / "m.onnx").outputs[0].type.shape == (1 << 28, 3)


def test_the_limit_holds_for_every_tensor() -> None:
    assert TensorType((1 << 34,), DType.F32).nbytes == MAX_TENSOR_BYTES
    with pytest.raises(VerifyError, match=r"a tensor f32\[17179869185\] takes 64 GiB; the limit is 64 GiB"):
        TensorType(((1 << 34) + 1,), DType.F32)


def test_folding_makes_no_constant_beyond_the_limit() -> None:
    graph = Graph()
    whole = Literal(TensorType((1 << 28,), DType.F32), lambda: np.zeros(1 << 28, np.float32))
    given = graph.add(Constant(whole))
    graph.set_outputs([graph.add(Concat(0), given, given, given), graph.add(pw("neg"), given)])
    FoldConstants().run(graph, Options())
    assert [n.op.name for n in graph.nodes if not isinstance(n.op, Constant)] == ["concat"]
