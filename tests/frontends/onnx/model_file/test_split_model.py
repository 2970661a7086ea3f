"""Test that large weights of ONNX models stay in the file until they are used, whatever the file looks like."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model, run
from google.protobuf.message import DecodeError
from helpers import CountedRanges, assert_close, literal_of
from onnx import ModelProto, TensorProto, helper, numpy_helper

from fusec.errors import ModelError
from fusec.frontends import Source, load
from fusec.frontends.onnx.load import decoded
from fusec.frontends.onnx.model_file import split_model
from fusec.frontends.onnx.model_file.split_model import LARGE_BYTES, OWN, TensorFiles, place_of, split
from fusec.frontends.onnx.model_file.tensors import Tensors
from fusec.ir import DType
from fusec.reference import evaluate
from fusec.system.byte_ranges import FileRanges, MemoryRanges

SIDE = 160  # SIDE * SIDE numbers of 4 bytes are large data
node = helper.make_node


def products(weights: list[np.ndarray], opset: int = 21) -> ModelProto:
    """A sequence of products of [2, N] with weights [N, N], and a small bias at the end."""
    count, side = len(weights), len(weights[0])
    nodes = [node("MatMul", [f"v{i}", f"w{i}"], [f"v{i + 1}"]) for i in range(count)]
    nodes.append(node("Add", [f"v{count}", "b"], ["y"]))
    held = {f"w{i}": w for i, w in enumerate(weights)} | {"b": np.ones(side, np.float32)}
    return model(nodes, [info("v0", [2, side])], ["y"], held, opset=opset)


def test_numbers_of_fields_are_those_of_onnx() -> None:
    def number(message: type, name: str) -> int:
        return int(getattr(message, f"{name}_FIELD_NUMBER"))

    assert number(ModelProto, "GRAPH") == split_model.GRAPH
    assert number(onnx.GraphProto, "INITIALIZER") == split_model.INITIALIZER
    names = ("RAW_DATA", "EXTERNAL_DATA", "DATA_LOCATION")
    assert [number(TensorProto, name) for name in names] == [getattr(split_model, name) for name in names]
    others = ("SEGMENT", "FLOAT_DATA", "INT32_DATA", "STRING_DATA", "INT64_DATA", "DOUBLE_DATA", "UINT64_DATA")
    assert {number(TensorProto, name) for name in others} == split_model.OTHER_DATA
    entry = onnx.StringStringEntryProto
    assert [number(entry, name) for name in ("KEY", "VALUE")] == [split_model.KEY, split_model.VALUE]
    assert [TensorProto.DEFAULT, TensorProto.EXTERNAL] == [split_model.DEFAULT, split_model.EXTERNAL]


def test_heads_of_fields_are_read_in_blocks() -> None:
    """Some file systems take long for each read, and a model has some fields for each node."""
    bits = [np.ones((SIDE, SIDE), np.float32), *(np.ones(3, np.float32) for _ in range(300))]
    proto = model([node("Identity", ["v"], ["y"])], [info("v", [2])], ["y"], {f"w{i}": w for i, w in enumerate(bits)})
    data = CountedRanges(proto.SerializeToString())
    assert len(split(data)[1]) == 1
    assert data.reads < 20


@pytest.fixture
def weights(rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.standard_normal((SIDE, SIDE)).astype(np.float32) for _ in range(3)]


def whole(message: bytes, files: TensorFiles) -> ModelProto:
    """Decode a message and put the data back that was split off."""
    proto = ModelProto.FromString(message)
    for tensor in proto.graph.initializer:
        place = place_of(tensor, files)
        if place is not None:
            del tensor.external_data[-3:]
            tensor.ClearField("data_location")
            assert files.own is not None
            tensor.raw_data = files.own.read(place.offset, place.offset + place.length)
    return proto


def large(tensor: TensorProto) -> bytes:
    """A model with this tensor as its output."""
    proto = model([], [], [tensor.name])
    proto.graph.initializer.append(tensor)
    return proto.SerializeToString()


@pytest.mark.parametrize("kind", ["file", "bytes"])
def test_large_weights_are_no_part_of_the_message(kind: str, weights: list[np.ndarray], tmp_path: Path) -> None:
    proto = products(weights)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    data = FileRanges(tmp_path / "m.onnx") if kind == "file" else MemoryRanges(proto.SerializeToString())
    message, places = split(data)
    assert len(places) == 3
    assert len(message) < 2000 < LARGE_BYTES
    assert whole(message, TensorFiles(None, data, places)) == proto


def test_results_are_those_of_onnxruntime(weights: list[np.ndarray], tmp_path: Path, rng: np.random.Generator) -> None:
    proto = products(weights)
    onnx.save(proto, tmp_path / "m.onnx")
    x = {"v0": rng.standard_normal((2, SIDE)).astype(np.float32)}
    want = run(proto, x)[0]
    for given in (tmp_path / "m.onnx", proto.SerializeToString(), proto):
        assert_close(evaluate(load(given), x)["y"], want, 1e-5)


def test_weights_take_memory_only_while_they_are_used(tmp_path: Path) -> None:
    proto = products([np.full((1024, 1024), i, np.float32) for i in range(4)])
    onnx.save(proto, tmp_path / "m.onnx")
    del proto
    one = 1024 * 1024 * 4
    gc.collect()
    tracemalloc.start()
    try:
        graph = load(tmp_path / "m.onnx")
        assert tracemalloc.get_traced_memory()[1] < one / 4
        literals = [v.literal for v in graph.values() if v.literal is not None and v.literal.type.nbytes == one]
        assert len({literal.digest for literal in literals}) == 4
        assert tracemalloc.get_traced_memory()[1] < 2 * one
        held = [literal.array for literal in literals]
        again = [literal.array for literal in literals]
        assert tracemalloc.get_traced_memory()[0] < 4.5 * one, "an array in use is read once"
        assert all(np.shares_memory(a, b) for a, b in zip(held, again, strict=True))
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.FLOAT8E4M3FN, TensorProto.BFLOAT16, TensorProto.BOOL])
def test_large_weights_of_other_types(kind: int) -> None:
    numbers = (np.arange(300 * 601) % 2).astype(helper.tensor_dtype_to_np_dtype(kind)).reshape(300, 601)
    data = large(numpy_helper.from_array(numbers, "w"))
    assert split(MemoryRanges(data))[1]
    literal = load(data).outputs[0].literal
    assert literal is not None
    first = literal.array
    np.testing.assert_array_equal(first, numbers)
    np.testing.assert_array_equal(literal.array, numbers)


def test_an_unset_location_that_is_written_out() -> None:
    """onnx writes `data_location: DEFAULT` after it has loaded external data."""
    numbers = np.arange(SIDE * SIDE, dtype=np.float32)
    tensor = numpy_helper.from_array(numbers, "w")
    tensor.data_location = TensorProto.DEFAULT
    data = large(tensor)
    assert split(MemoryRanges(data))[1]
    np.testing.assert_array_equal(literal_of(load(data).outputs[0]), numbers)


def _twice(tensor: TensorProto) -> None:
    tensor.float_data.extend([1.0])


def _segment(tensor: TensorProto) -> None:
    tensor.segment.begin = 1


def _external(tensor: TensorProto) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="none.bin")


def _own(tensor: TensorProto) -> None:
    """Ask for other bytes of the file."""
    _external(tensor)
    tensor.external_data[0].value = OWN
    tensor.external_data.add(key="offset", value="0")
    tensor.external_data.add(key="length", value=str(4 * SIDE * SIDE))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_twice, "holds its elements twice, in float_data and raw_data"),
        (_segment, "segmented tensors are not supported"),
        (_external, "external data 'none.bin': no such file"),
        (_own, "external data at the location"),
    ],
)
def test_tensors_that_are_refused(change: Callable[[TensorProto], None], said: str, tmp_path: Path) -> None:
    """The other tensor is split off, so that places exist."""
    proto = products([np.zeros((SIDE, SIDE), np.float32)] * 2)
    change(proto.graph.initializer[0])
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=said):
        load(tmp_path / "m.onnx")


def test_a_wrong_number_of_bytes() -> None:
    data = large(TensorProto(name="w", dims=[SIDE, SIDE], data_type=1, raw_data=bytes(4 * SIDE * SIDE + 4)))
    with pytest.raises(ModelError, match=r"f32\[160,160\] takes 102400 bytes, its data has 102404"):
        load(data)


def test_the_last_of_two_values_counts_as_in_protobuf() -> None:
    """A field that occurs twice is merged; a tensor with raw data twice is left to protobuf."""
    first, second = (np.full(SIDE * SIDE, i, np.float32) for i in (1, 2))
    tensor = numpy_helper.from_array(first, "w").SerializeToString()
    tensor += TensorProto(raw_data=second.tobytes()).SerializeToString()
    graph = model([], [], ["w"]).graph.SerializeToString() + _field(5, tensor)
    header = model([], [], ["w"])
    header.ClearField("graph")
    data = header.SerializeToString() + _field(7, graph)
    np.testing.assert_array_equal(literal_of(load(data).outputs[0]), second)


def test_a_graph_in_two_parts() -> None:
    """protobuf merges them."""
    proto = products([np.full((SIDE, SIDE), i, np.float32) for i in range(2)])
    rest = ModelProto()
    rest.graph.initializer.append(proto.graph.initializer.pop(0))
    data = MemoryRanges(proto.SerializeToString() + rest.SerializeToString())
    message, places = split(data)
    assert len(places) == 2
    assert whole(message, TensorFiles(None, data, places)) == ModelProto.FromString(data.read(0, data.size))


def _field(number: int, content: bytes) -> bytes:
    length, size = bytearray(), len(content)
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def test_an_old_model_is_converted(tmp_path: Path, rng: np.random.Generator) -> None:
    """onnx's converter drops external data."""
    w = rng.standard_normal((SIDE, SIDE)).astype(np.float32)
    proto = model([node("MatMul", ["x", "w"], ["y"])], [info("x", [2, SIDE])], [info("y", [2, SIDE])], {"w": w}, 6)
    proto.graph.input.append(info("w", [SIDE, SIDE]))
    proto.ir_version = 3
    onnx.save(proto, tmp_path / "m.onnx")
    x = rng.standard_normal((2, SIDE)).astype(np.float32)
    assert_close(evaluate(load(tmp_path / "m.onnx"), {"x": x})["y"], x @ w, 1e-5)


def test_functions_are_inlined_around_large_weights(weights: list[np.ndarray], rng: np.random.Generator) -> None:
    proto = products(weights)
    body = helper.make_function("local", "Twice", ["a"], ["c"], [node("Add", ["a", "a"], ["c"])],
                                [helper.make_opsetid("", 21)])  # fmt: skip
    proto.functions.append(body)
    proto.opset_import.append(helper.make_opsetid("local", 1))
    proto.graph.node.append(node("Twice", ["y"], ["z"], domain="local"))
    proto.graph.output[0].name = "z"
    x = rng.standard_normal((2, SIDE)).astype(np.float32)
    want = 2 * (x @ weights[0] @ weights[1] @ weights[2] + 1)
    assert_close(evaluate(load(proto.SerializeToString()), {"v0": x})["z"], want, 1e-5)


def test_copies_of_a_model_keep_its_weights(weights: list[np.ndarray]) -> None:
    proto = products(weights)
    source = Source(proto.SerializeToString())
    made = source.standalone(21)
    assert [t for t in made.graph.initializer if t.name == "w1"] == [proto.graph.initializer[1]]
    renamed = source.edited(lambda copy: setattr(copy.graph, "name", "renamed"))
    assert renamed.load().name == "renamed"
    np.testing.assert_array_equal(literal_of(renamed.load().value("w1")), weights[1])
    ones = np.ones((2, SIDE), np.float32)
    bound = source.with_constants({"v0": ones}).load()
    assert_close(evaluate(bound, {})["y"], ones @ weights[0] @ weights[1] @ weights[2] + 1, 1e-5)


def test_a_file_may_be_removed_or_replaced_but_not_changed(weights: list[np.ndarray], tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(products(weights), path)
    before = load(path)
    (tmp_path / "new.onnx").write_bytes(products(weights[::-1]).SerializeToString())
    (tmp_path / "new.onnx").replace(path)
    np.testing.assert_array_equal(literal_of(before.value("w0")), weights[0])
    after = load(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(ModelError, match=r"m\.onnx: a weight cannot be read: was changed after it was opened"):
        _ = literal_of(after.value("w0"))
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="was changed after it was opened"):
        _ = literal_of(after.value("w1"))
    path.unlink()
    np.testing.assert_array_equal(literal_of(before.value("w2")), weights[2])


def test_truncated_files(weights: list[np.ndarray], tmp_path: Path) -> None:
    data = products(weights).SerializeToString()
    for part in (*np.linspace(0.01, 0.999, 40), 1 - 1 / len(data)):
        (tmp_path / "m.onnx").write_bytes(data[: int(part * len(data))])
        with pytest.raises(ModelError) as raised:
            load(tmp_path / "m.onnx")
        assert "truncated" in str(raised.value)


def test_changed_bytes_are_read_as_protobuf_reads_them(weights: list[np.ndarray], rng: np.random.Generator) -> None:
    """Each byte outside the data of weights is changed several times."""
    data = products(weights).SerializeToString()
    message, places = split(MemoryRanges(data))
    inside = np.zeros(len(data), bool)
    for place in places:
        inside[place.offset : place.offset + place.length] = True
    outcomes = {"same": 0, "refused": 0}
    for at in np.repeat(np.flatnonzero(~inside), 5):
        changed = bytearray(data)
        changed[at] = rng.integers(256)
        given = MemoryRanges(bytes(changed))
        try:
            want = ModelProto.FromString(bytes(changed))
        except DecodeError:
            with pytest.raises(ModelError):
                decoded(given, "m", None)
            outcomes["refused"] += 1
            continue
        message, places = split(given)
        assert whole(message, TensorFiles(None, given, places)) == want
        outcomes["same"] += 1
    assert min(outcomes.values()) > 500


def test_weights_of_bytes_are_aligned_copies() -> None:
    numbers = np.arange(SIDE * SIDE, dtype=np.float64)
    data = large(TensorProto(name="odd", dims=[SIDE * SIDE], data_type=TensorProto.DOUBLE, raw_data=numbers.tobytes()))
    literal = load(data).outputs[0].literal
    assert literal is not None
    assert literal.type.dtype is DType.F64
    assert literal.array.flags.aligned
    np.testing.assert_array_equal(literal.array, numbers)


def test_a_message_without_its_files_is_refused(weights: list[np.ndarray]) -> None:
    message, _ = split(MemoryRanges(products(weights).SerializeToString()))
    (tensor, *_) = ModelProto.FromString(message).graph.initializer
    with pytest.raises(Exception, match="external data"):
        Tensors().literal(tensor)
