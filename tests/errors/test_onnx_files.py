"""Test files, bytes and headers that are no ONNX model fusec can read: one ModelError each."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, one

import fusec
from examples.models import light
from fusec.errors import ModelError
from fusec.frontends import load
from fusec.ir import DType, Graph, TensorType


def fails(model: Any, *parts: str, **more: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(model, **more)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message


def test_missing_file(tmp_path: Path) -> None:
    fails(tmp_path / "none.onnx", "none.onnx: No such file")


def test_a_file_of_a_few_bytes(tmp_path: Path) -> None:
    (tmp_path / "short.onnx").write_bytes(b"hello")
    fails(tmp_path / "short.onnx", "short.onnx: is no ONNX model, or a truncated one")


def test_a_compiled_model(tmp_path: Path) -> None:
    """Not a truncated ONNX model, as which protobuf would refuse it."""
    fusec.compile(one("Relu", [2]).SerializeToString(), target="cpu").save(tmp_path / "m.fusec")
    wanted = "m.fusec: is a compiled model: load it with fusec.load, or give the model that it was compiled from"
    fails(tmp_path / "m.fusec", wanted)
    with pytest.raises(ModelError, match=re.escape(wanted)):
        fusec.compile(tmp_path / "m.fusec")
    with pytest.raises(ModelError, match=re.escape(wanted)):
        fusec.quantize(tmp_path / "m.fusec", format="weights-int8")


def test_an_old_model_that_onnx_cannot_convert() -> None:
    """Up to IR version 3 initializers are inputs, too; onnx's converter does not find others."""
    value = onnx.numpy_helper.from_array(np.zeros(3, np.float32), "w")
    node = onnx.helper.make_node("Add", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [info("x", [3])], [info("y", [3])], [value])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 6)], ir_version=3)
    fails(proto, "has opset 6, older than 7, and onnx cannot convert it: Input w is undefined")


def test_null_byte_in_the_name() -> None:
    fails("a\0b.onnx", "null byte")


def test_directory(tmp_path: Path) -> None:
    fails(tmp_path, f"{tmp_path}: is a directory")


def test_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    fails(tmp_path / "pipe", "is not a regular file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(one("Relu", [2]).SerializeToString())
    path.chmod(0)
    fails(path, "m.onnx: Permission denied")


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    fails(tmp_path / "m.onnx", "m.onnx: is empty")


def test_empty_bytes() -> None:
    fails(b"", "<bytes>: is empty")


def test_a_file_protobuf_cannot_hold_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "m.onnx").open("wb") as file:
        file.truncate(1 << 40)  # sparse: takes no room
    fails(tmp_path / "m.onnx", "protobuf reads less than 2 GiB", "external data")


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_truncated_model(tmp_path: Path, part: float) -> None:
    data = light("squeezenet").read_bytes()
    (tmp_path / "m.onnx").write_bytes(data[: int(len(data) * part)])
    fails(tmp_path / "m.onnx", "m.onnx: ")


def test_random_bytes() -> None:
    generator = random.Random(0)
    for size in range(1, 400):
        fails(generator.randbytes(size), "<bytes>: ")


def test_mutated_models_load_or_raise_model_error() -> None:
    """Whatever a flipped byte makes of a model, nothing but a ModelError comes out."""
    generator = random.Random(1)
    data = light("squeezenet").read_bytes()
    raised = 0
    for _ in range(150):
        mutated = bytearray(data)
        for _ in range(3):
            mutated[generator.randrange(len(data))] = generator.randrange(256)
        try:
            load(bytes(mutated))
        except ModelError:
            raised += 1
    assert raised > 50


def test_names_that_are_not_utf8() -> None:
    data = one("Relu", [2]).SerializeToString().replace(b"Relu", b"Re\xff\xfe")
    fails(data, "b'Re\\xff\\xfe'", "not UTF-8")


def test_something_else_than_a_model() -> None:
    message = "a model is a path, bytes, a ModelProto or a Graph, not int"
    fails(12, message)
    with pytest.raises(ModelError, match=message):  # its interface is read before it is checked
        fusec.compile(cast("bytes", 12), shapes={"n": "1..8"})


def test_proto_without_graph() -> None:
    fails(onnx.ModelProto(ir_version=8), "is no ONNX model: it has no graph")


def test_proto_without_ir_version() -> None:
    proto = one("Relu", [2])
    proto.ClearField("ir_version")
    fails(proto, "is no ONNX model: it has no IR version")


def test_newer_ir_version() -> None:
    proto = one("Relu", [2])
    proto.ir_version = 999
    fails(proto, "has IR version 999", "install a newer onnx")


def test_newer_opset() -> None:
    fails(one("Relu", [2], opset=999), "has opset 999", "install a newer onnx")


def test_older_opset() -> None:
    """onnx converts what it can: Upsample is not there yet."""
    fails(one("Upsample", [1, 1, 2, 2], opset=1), "has opset 1, older than 7, and onnx cannot convert it")


def test_no_opset() -> None:
    proto = one("Relu", [2])
    del proto.opset_import[:]
    fails(proto, "does not say which opset")


def test_two_opsets_of_one_domain() -> None:
    proto = one("Relu", [2])
    proto.opset_import.add(domain="ai.onnx", version=13)
    fails(proto, "imports domain '' in versions 21 and 13")


def test_text_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "g.txt").write_text('graph "g" (%x: f32[2]) {\n  %y = nothing(%x) : f32[2]\n  return %y\n}\n')
    fails(tmp_path / "g.txt", "g.txt: ", "nothing")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "g.fusec-ir").write_bytes(b'graph "\xff"')
    fails(tmp_path / "g.fusec-ir", "is not UTF-8 text")


def test_shapes_that_contradict_a_graph() -> None:
    graph = Graph()
    graph.set_outputs([graph.add_input("x", TensorType((2,), DType.F32))])
    fails(graph, "input 'x' has shape [2], not [3]", shapes={"x": (3,)})
    fails(graph, "there is no input 'y'; inputs: x", shapes={"y": (3,)})
