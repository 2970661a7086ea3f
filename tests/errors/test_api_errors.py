"""Test that each mistake of a Python caller raises an error of fusec that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import one_program
from onnx import TensorProto, helper, numpy_helper

import fusec
from fusec import driver
from fusec.driver import compile_dynamic
from fusec.errors import ExecutionError, FusecError, ModelError
from fusec.session import InferenceSession
from fusec.text import parse

TEXT = 'graph "g" (%x: f32[2,2]) {\n  %y = relu(%x)\n  return %y\n}'
RAGGED = [[1.0, 2.0], [3.0]]
Run = Callable[[Any, Any], Any]


def model() -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(
    params=[
        "executable",
        pytest.param("dynamic", marks=pytest.mark.cudnn),
        pytest.param("session", marks=pytest.mark.cudnn),
    ]
)
def run(request: pytest.FixtureRequest) -> Run:
    """Outputs from feeds, as each kind of executable takes them."""
    if request.param == "executable":
        return driver.compile(parse(TEXT), target="cpu").run
    if request.param == "dynamic":
        return compile_dynamic(model(), simulate=True).run
    return InferenceSession(model().SerializeToString(), providers=["CPUExecutionProvider"]).run


def test_good_feeds_are_taken(run: Run) -> None:
    assert run(["y"], {"x": np.ones((2, 2), np.float32)})[0].shape == (2, 2)


@pytest.mark.parametrize(
    ("names", "feeds", "words"),
    [
        (None, {"x": RAGGED}, "input %x: this list is no array .*inhomogeneous.*; give a NumPy array"),
        (None, [np.ones((2, 2), np.float32)], "in a dict by name, not in list"),
        (None, None, "in a dict by name, not in NoneType"),
        (None, {5: np.ones((2, 2), np.float32)}, "no input .*5"),
        ([5], {"x": np.ones((2, 2), np.float32)}, r"no output 5 \(names are strings\)"),
        ([["y"]], {"x": np.ones((2, 2), np.float32)}, r"no output \['y'\]"),
        ("y", {"x": np.ones((2, 2), np.float32)}, "a list of strings, or None for all, not 'y'"),
        (5, {"x": np.ones((2, 2), np.float32)}, "a list of strings, or None for all, not 5"),
    ],
)
def test_bad_feeds_are_refused(run: Run, names: Any, feeds: Any, words: str) -> None:
    with pytest.raises(ExecutionError, match=words):
        run(names, feeds)


def test_a_ragged_argument_of_a_call() -> None:
    with pytest.raises(ExecutionError, match="input %x: this list is no array"):
        driver.compile(parse(TEXT), target="cpu")(RAGGED)


def test_out_is_checked() -> None:
    net = driver.compile(parse(TEXT), target="cpu")
    x, out = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)
    out.flags.writeable = False
    for given, words in (
        ({"y": out}, "out %y: the array is read-only; give one that can be written"),
        ([out], "in a dict by name, not in list"),
        ({5: x}, "out has 5"),
        ({"y": RAGGED}, "results cannot be written into list"),
    ):
        with pytest.raises(ExecutionError, match=words):
            net.run(None, {"x": x}, out=given)  # type: ignore[arg-type]
    assert not out.any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shapes": 5}, "shapes are a dict of shapes by input name, such as .*, not 5"),
        ({"shapes": [(1, 2)]}, "shapes are a dict"),
        ({"disable": 5}, "disable takes a name or a list of names, not 5"),
        ({"disable": [5]}, r"disable takes a name or a list of names, not \[5\]"),
        ({"disable": [["cse"]]}, "disable takes a name"),
        ({"channels_last": 7}, "channels_last takes a name or a list of names, not 7"),
        ({"channels_last": None}, "channels_last takes a name"),
        ({"channels_last": [7]}, "channels_last takes a name"),
        ({"heuristics": "C"}, "heuristics is one or several of A, B, fallback, not 'C'"),
        ({"heuristics": ()}, "heuristics is one or several of A, B, fallback"),
        ({"engines": "fast"}, "engines are numbers, as in 45,1 or -0,-11, not 'fast'"),
        ({"engines": 7}, "engines are numbers"),
        ({"engines": (True,)}, "engines are numbers"),
        ({"engines": "1,-2"}, "engines names some to insist on and some to leave out"),
        ({"workspace_limit": -1}, "workspace_limit is a number of bytes, 0 or more, not -1"),
        ({"workspace_limit": 1.5}, "workspace_limit is a number of bytes"),
    ],
)
@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_bad_options_are_refused(options: dict[str, Any], words: str, target: str) -> None:
    with pytest.raises(FusecError, match=words):
        fusec.compile(parse(TEXT), target=target, **options)
    with pytest.raises(FusecError, match=words):
        fusec.compile(parse(TEXT), target=target, deterministic=True, **options)


@pytest.mark.parametrize("options", [{"disable": 5}, {"channels_last": 7}])
def test_bad_options_of_dynamic_models_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(FusecError, match="takes a name or a list of names"):
        compile_dynamic(model(), simulate=True, deterministic=True, **options)


def test_one_name_may_be_left_out_by_itself() -> None:
    assert one_program(driver.compile(parse(TEXT), target="cpu", disable="cse")).compiled.options.disable >= {"cse"}


@pytest.mark.parametrize("op", ["Add", "PRelu"])
def test_a_model_that_onnx_cannot_infer_is_refused(op: str) -> None:
    """The version converter of onnx infers shapes, and raises an error of its own for those that disagree."""
    old = model()
    old.opset_import[0].version = 6
    old.graph.node[0].CopyFrom(helper.make_node(op, ["x", "w"], ["y"]))
    old.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 5]))
    old.graph.initializer.append(numpy_helper.from_array(np.ones((3,), np.float32), "w"))
    with pytest.raises(ModelError, match=r"has opset 6, older than .*, and onnx cannot convert it"):
        driver.compile(old.SerializeToString(), target="cpu")
