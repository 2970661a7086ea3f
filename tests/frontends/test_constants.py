"""Test values that the user gives for inputs at compile time, compared with onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cli.command import fusec as command
from frontends.onnx.models import info, model, run
from helpers import assert_close
from onnx import TensorProto, helper

import fusec
from fusec.errors import FusecError, ModelError
from fusec.text import parse

X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
INT = TensorProto.INT64


def running_sum() -> onnx.ModelProto:
    """Make a model whose input `axis` says along which dim to add."""
    nodes = [helper.make_node("CumSum", ["x", "axis"], ["s"]), helper.make_node("Relu", ["s"], ["y"])]
    return model(nodes, [info("x", ["n", 3, 4]), info("axis", [], INT)], [info("y", ["n", 3, 4])])


def reshaped() -> onnx.ModelProto:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["r"]), helper.make_node("Neg", ["r"], ["y"])]
    return model(nodes, [info("x", [2, 3, 4]), info("shape", ["r"], INT)], [info("y", None)])


@pytest.mark.parametrize("axis", [1, np.int64(2), np.array(0)])
def test_an_input_becomes_a_constant(axis: Any) -> None:
    exe = fusec.compile(running_sum(), target="cpu", shapes={"x": X.shape}, constants={"axis": axis})
    assert [spec.name for spec in exe.inputs] == ["x"]
    (want,) = run(running_sum(), {"x": X, "axis": np.array(axis, np.int64)})
    assert_close(exe(X), want, 1e-6)


def test_a_list_is_a_shape() -> None:
    exe = fusec.compile(reshaped(), target="cpu", constants={"shape": [6, -1]})
    assert_close(exe(X), -X.reshape(6, 4), 0)


def test_a_number_fills_an_input_of_one_element() -> None:
    assert fusec.compile(reshaped(), target="cpu", constants={"shape": 24})(X).shape == (24,)


def test_all_input_shapes_share_a_constant() -> None:
    exe = fusec.compile_dynamic(running_sum(), target="cpu", simulate=True, constants={"axis": 2})
    for batch in (1, 2):
        assert_close(exe(X[:batch]), np.maximum(X[:batch].cumsum(2), 0), 1e-6)


def test_a_graph_takes_constants() -> None:
    graph = fusec.parse('graph "g" (%x: f32[2], %k: f32[2]) {\n  %y = add(%x, %k) : f32[2]\n  return %y\n}')
    exe = fusec.compile(graph, target="cpu", constants={"k": [1.5, 2]})
    assert_close(exe(np.array([1, 1], np.float32)), np.array([2.5, 3], np.float32), 0)
    assert len(graph.inputs) == 2, "the graph given was changed"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"axes": 1}, "there is no input 'axes' to make a constant; inputs: x, axis"),
        ({"axis": 1.5}, "the constant for input 'axis' is 1.5, the model declares i64"),
        ({"axis": np.int32(1)}, "the constant for input 'axis' is int32, the model declares i64"),
        ({"axis": [1, 2]}, r"the constant for input 'axis' has shape [2], the model declares []"),
        ({"x": X[:, :2]}, r"the constant for input 'x' has shape [2, 2, 4], the model declares [n, 3, 4]"),
        ({"axis": 1 << 70}, "the constant for input 'axis'"),
        ({"axis": "two"}, "the constant for input 'axis' is 'two', the model declares i64"),
        ({"axis": [[1], [2, 3]]}, "the constant for input 'axis' is no array"),
    ],
)
def test_a_constant_that_does_not_fit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as raised:
        fusec.compile(running_sum(), target="cpu", shapes={"x": X.shape}, constants=given)
    assert message in str(raised.value)


def test_an_unsigned_constant_is_no_negative_number() -> None:
    graph = parse('graph "g" (%x: u64[2], %n: u64[]) { %y = add(%x, %n) return %y }')
    with pytest.raises(ModelError, match="the constant for input 'n' is -1, which u64 does not hold"):
        fusec.compile(graph, target="cpu", constants={"n": -1})


def test_the_shape_of_a_constant_is_its_own() -> None:
    with pytest.raises(ModelError, match="input 'axis' is a constant, so its shape cannot be given"):
        fusec.compile(running_sum(), target="cpu", shapes={"x": X.shape, "axis": ()}, constants={"axis": 1})


def test_a_builder_has_its_own_constants() -> None:
    builder = fusec.Builder()
    builder.output(y=builder.input("x", (2,)) + 1.0)
    with pytest.raises(FusecError, match="a Builder takes no constants"):
        fusec.compile(builder, target="cpu", constants={"x": 1})


def test_the_command_line_takes_constants(tmp_path: Path) -> None:
    path, array = tmp_path / "sum.onnx", tmp_path / "axis.npy"
    onnx.save(running_sum(), path)
    np.save(array, np.array(1))
    for value in ("1", array):
        given = (path, "--shape", "x=2,3,4", "--constant", f"axis={value}", "--target", "cpu")
        result = command("run", *given, "--compare", "onnxruntime")
        assert result.exit_code == 0, result.stderr
        assert command("explain", *given).exit_code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axis=one", "--constant axis=one: is no number"),
        ("axis", "--constant axis: has no name or no '='"),
        ("axis=missing.npy", "missing.npy: No such file"),
        ("y=1", "there is no input 'y' to make a constant"),
    ],
)
def test_a_bad_constant_on_the_command_line(tmp_path: Path, text: str, message: str) -> None:
    onnx.save(running_sum(), tmp_path / "sum.onnx")
    result = command("compile", tmp_path / "sum.onnx", "--shape", "x=2,3,4", "--constant", text, "--target", "cpu")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.slow
@pytest.mark.cudnn
def test_a_compiled_file_takes_no_constants(tmp_path: Path) -> None:
    path, file = tmp_path / "sum.onnx", tmp_path / "sum.fusec"
    onnx.save(running_sum(), path)
    given = ("--shape", "x=2,3,4", "--constant", "axis=1")
    assert command("compile", path, *given, "--target", "h200", "-o", file).exit_code == 0
    assert command("run", file).exit_code == 0
    result = command("run", file, "--constant", "axis=1")
    assert result.exit_code == 2
    assert "--constant comes too late" in result.stderr
