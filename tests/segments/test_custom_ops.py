"""Test ops that a user's Python function computes, compared with onnx's reference implementation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model
from helpers import assert_close
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from segments.models import FLOAT, INT, floats, n
from typer.testing import CliRunner

import fusec
from fusec import FusecError, ModelError
from fusec.cli.commands import app
from fusec.errors import ExecutionError
from fusec.segments import programs
from fusec.segments.executable import SegmentedExecutable

DOMAIN = "my.domain"
CPU: Any = {"target": "cpu"}
A, B = floats(5, 6), floats(6, 6)


def custom(text: str, **attributes: Any) -> onnx.NodeProto:
    node = n(text, **attributes)
    node.domain = DOMAIN
    return node


def proto(*nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("y",), **more: Any) -> onnx.ModelProto:
    results = [info(name, None, FLOAT) for name in outputs]
    made = model(list(nodes), [info("x", [4, 5])], results, more.pop("held", {}), **more)
    made.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return made


def swirl(x: np.ndarray, weight: np.ndarray | None = None, *, scale: float = 1.0, times: tuple[int, ...] = ()) -> Any:
    """Do something that no op does, with some steps of Python."""
    for time in times or (1,):
        x = x[:, ::-1] * np.float32(scale) + np.float32(time)
    return x if weight is None else x @ weight


class Swirl(OpRun):
    op_domain: ClassVar[str] = DOMAIN

    def _run(self, x: Any, weight: Any = None, scale: Any = None, times: Any = None) -> Any:
        return (swirl(x, weight, scale=1.0 if scale is None else scale, times=tuple(times or ())),)


def swirling() -> onnx.ModelProto:
    """Make a model with two custom ops, a product before, between and after them."""
    nodes = [
        n("MatMul x a -> p"),
        custom("Swirl p -> q", scale=0.5, times=[1, 2, 3]),
        n("MatMul q b -> r"),
        custom("Swirl r b -> s"),
        n("Relu s -> y"),
    ]
    return proto(*nodes, held={"a": A, "b": B})


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_a_function_agrees_with_the_reference(on_device: bool, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(programs, "SMALL_ELEMENTS", -1)
    function = fusec.CustomOp(swirl, on_device=True) if on_device else swirl
    executable = fusec.compile(swirling(), custom_ops={"my.domain::Swirl": function}, **CPU)
    assert isinstance(executable, SegmentedExecutable)
    for _ in range(2):
        x = floats(4, 5)
        (want,) = ReferenceEvaluator(swirling(), new_ops=[Swirl]).run(None, {"x": x})
        assert_close(executable(x), want, 1e-5)
    totals = executable.explain().totals
    assert (totals["segments"], totals["host_steps"]) == (3, 2)
    assert (totals["host_bytes"] == 0) == on_device
    text = str(executable.explain())
    where = "device" if on_device else "host"
    assert f"(my.domain::Swirl): it calls the Python function swirl on the {where}." in " ".join(text.split())


@pytest.mark.cudnn
def test_a_function_runs_between_programs_in_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SMALL_ELEMENTS", -1)
    executable = fusec.compile(swirling(), custom_ops={"my.domain::Swirl": swirl}, target="h200", simulate=True)
    x = floats(4, 5)
    (want,) = ReferenceEvaluator(swirling(), new_ops=[Swirl]).run(None, {"x": x})
    assert_close(executable(x), want, 1e-4)
    assert executable.verify().ok


def test_attributes_of_all_kinds_are_keywords() -> None:
    given: dict[str, Any] = {}

    def keep(x: np.ndarray, **attributes: Any) -> np.ndarray:
        given.update(attributes)
        return x

    table = onnx.numpy_helper.from_array(np.array([[1, 2]], np.int32))
    node = custom("Keep x -> y", i=3, f=0.5, s="text", many=[1, 2], floats=[0.25], strings=["a", "b"], t=table)
    fusec.compile(proto(node), custom_ops={"my.domain::Keep": keep}, **CPU)(floats(4, 5))
    array = given.pop("t")
    assert array.dtype == np.int32 and array.tolist() == [[1, 2]]
    assert given == {"i": 3, "f": 0.5, "s": "text", "many": (1, 2), "floats": (0.25,), "strings": ("a", "b")}


def test_several_results_and_operands_that_are_left_out() -> None:
    def parts(x: np.ndarray, none: None, k: np.ndarray) -> list[Any]:
        assert none is None
        return [x + k, None, x.sum(), (x > 0).astype(ml_dtypes.bfloat16)]

    node = custom("Parts x _ k -> a _ b c")
    node.output[1] = ""
    made = proto(node, n("Add a b -> y"), n("Cast c -> z", to=FLOAT), outputs=("y", "z"), held={"k": floats(5)})
    x = floats(4, 5)
    k = onnx.numpy_helper.to_array(made.graph.initializer[0])
    y, z = fusec.compile(made, custom_ops={"my.domain::Parts": parts}, **CPU)(x)
    assert_close(y, x + k + x.sum(), 1e-5)
    assert (z == (x > 0)).all()


def test_the_shape_of_a_result_may_depend_on_values() -> None:
    nodes = [custom("Positive x -> p"), n("Shape p -> s"), n("Cast s -> y", to=FLOAT)]
    executable = fusec.compile(proto(*nodes), custom_ops={"my.domain::Positive": lambda x: x[x > 0]}, **CPU)
    for x in (np.ones((4, 5), np.float32), -np.ones((4, 5), np.float32), floats(4, 5)):
        assert executable(x).tolist() == [(x > 0).sum()]


def test_a_function_of_constants_is_called_on_import() -> None:
    calls: list[np.ndarray] = []

    def double(x: np.ndarray) -> np.ndarray:
        calls.append(x)
        return 2 * x

    made = proto(custom("Double k -> d"), n("Add x d -> y"), held={"k": floats(5)})
    executable = fusec.compile(made, custom_ops={"my.domain::Double": double}, **CPU)
    assert isinstance(executable, fusec.Executable)
    assert len(calls) == 1
    x = floats(4, 5)
    assert_close(executable(x), x + 2 * calls[0], 1e-6)


def test_a_function_in_bodies() -> None:
    """In the branch of an If, and in a loop whose end is computed."""
    body = helper.make_graph(
        [custom("Half v -> w"), n("ReduceMax w big -> m", keepdims=0), n("Greater m one -> go")],
        "body",
        [info("i", [], INT), info("c", [], TensorProto.BOOL), info("v", [4, 5])],
        [info("go", [], TensorProto.BOOL), info("w", [4, 5])],
        [onnx.numpy_helper.from_array(np.array(1, np.float32), "one")],
    )
    body.node[1].CopyFrom(n("ReduceMax w -> m", keepdims=0))
    made = proto(n("Loop _ t x -> y", body=body), held={"t": np.array(True)})
    executable = fusec.compile(made, custom_ops={"my.domain::Half": lambda x: x / 2}, **CPU)
    x = np.abs(floats(4, 5)) * 8
    want = x / 2
    while want.max() > 1:
        want = want / 2
    assert_close(executable(x), want, 1e-6)

    then = helper.make_graph([custom("Half x -> h")], "then", [], [info("h", [4, 5])])
    other = helper.make_graph([n("Neg x -> g")], "other", [], [info("g", [4, 5])])
    nodes = [n("ReduceMax x -> m", keepdims=0), n("Greater m one -> c")]
    made = proto(*nodes, n("If c -> y", then_branch=then, else_branch=other), held={"one": np.array(1, np.float32)})
    executable = fusec.compile(made, custom_ops={"my.domain::Half": lambda x: x / 2}, **CPU)
    for x in (np.full((4, 5), 3, np.float32), np.zeros((4, 5), np.float32)):
        assert_close(executable(x), x / 2 if x.max() > 1 else -x, 1e-6)


def test_an_op_of_the_default_domain() -> None:
    """The function takes the place of fusec's import: these bytes are no image file."""

    def decode(data: np.ndarray, *, pixel_format: str) -> np.ndarray:
        assert pixel_format == "Grayscale"
        return data.reshape(2, 3, 1)

    made = model(
        [n("ImageDecoder x -> p", pixel_format="Grayscale"), n("Cast p -> y", to=FLOAT)],
        [info("x", [6], TensorProto.UINT8)], [info("y", None, FLOAT)], opset=20,
    )  # fmt: skip
    x = np.arange(6, dtype=np.uint8)
    with pytest.raises(ExecutionError, match="are no image"):
        fusec.compile(made, **CPU)(x)
    assert fusec.compile(made, custom_ops={"ImageDecoder": decode}, **CPU)(x).tolist() == x.reshape(2, 3, 1).tolist()


def test_memory_that_a_function_gives_again() -> None:
    memory = np.zeros((4, 5), np.float32)

    def negative(x: np.ndarray) -> np.ndarray:
        return np.negative(x, out=memory)

    made = proto(custom("Negative x -> a"), n("Add x x -> b"), custom("Negative b -> c"), outputs=("a", "c"))
    for on_device in (False, True):
        function = fusec.CustomOp(negative, on_device)
        x = floats(4, 5)
        a, c = fusec.compile(made, custom_ops={"my.domain::Negative": function}, **CPU)(x)
        assert (a == -x).all()
        assert (c == -2 * x).all()


def test_a_function_cannot_write_to_its_operands() -> None:
    def write(x: np.ndarray) -> np.ndarray:
        x[...] = 0
        return x

    executable = fusec.compile(proto(custom("Write x -> y")), custom_ops={"my.domain::Write": write}, **CPU)
    x = floats(4, 5)
    kept = x.copy()
    with pytest.raises(ExecutionError, match=r"node 'Write_0' \(my.domain::Write\).*raised ValueError.*read-only"):
        executable(x)
    assert (x == kept).all()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x: {}["lost"], "function .*lambda.* raised KeyError: 'lost'"),
        (lambda x: (), "gave 0 results, not 1"),
        (lambda x: object(), "result 0 of its function .* is no array of numbers"),
        (lambda x: b"text", "element type .* is not one fusec knows"),
    ],
)
def test_a_function_that_fails_is_named_with_its_node(function: Any, told: str) -> None:
    executable = fusec.compile(proto(custom("Bad x -> y")), custom_ops={"my.domain::Bad": function}, **CPU)
    with pytest.raises(ExecutionError, match=rf"node 'Bad_0' \(my.domain::Bad\): .*{told}"):
        executable(floats(4, 5))


def test_what_is_no_custom_op() -> None:
    made = proto(custom("Swirl x -> y"))
    with pytest.raises(ModelError, match=r"op my.domain.Swirl .*custom_ops"):
        fusec.compile(made, custom_ops={"my.domain::Other": swirl}, **CPU)
    with pytest.raises(ModelError, match="write its domain and name"):
        fusec.compile(made, custom_ops={"my.domain::": swirl}, **CPU)
    with pytest.raises(ModelError, match="needs a function, not 3"):
        fusec.compile(made, custom_ops={"my.domain::Swirl": 3}, **CPU)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="ONNX models"):
        fusec.compile(fusec.parse('graph "g"(%x: f32[2]) {\n  return %x\n}\n'), custom_ops={"a::B": swirl}, **CPU)
    function = helper.make_function(
        DOMAIN, "Swirl", ["x"], ["y"], [n("Neg x -> y")], [helper.make_opsetid("", made.opset_import[0].version)]
    )
    made.functions.append(function)
    with pytest.raises(ModelError, match=r"defines my.domain::Swirl as a function of its own"):
        fusec.compile(made, custom_ops={"my.domain::Swirl": swirl}, **CPU)


def test_a_file_cannot_hold_a_function(tmp_path: Path) -> None:
    executable = fusec.compile(swirling(), custom_ops={"my.domain::Swirl": swirl}, **CPU)
    with pytest.raises(FusecError, match=r"node 'Swirl_1' \(my.domain::Swirl\), which calls the Python function swirl"):
        executable.save(tmp_path / "model.fusec")


def test_sessions_and_several_shapes() -> None:
    made = swirling()
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    session = fusec.InferenceSession(made, custom_ops={"my.domain::Swirl": swirl}, **CPU)
    dynamic = fusec.compile_dynamic(made, custom_ops={"my.domain::Swirl": swirl}, **CPU)
    for rows in (3, 7):
        x = floats(rows, 5)
        (want,) = ReferenceEvaluator(made, new_ops=[Swirl]).run(None, {"x": x})
        assert_close(session.run(None, {"x": x})[0], want, 1e-5)
        assert_close(dynamic(x), want, 1e-5)


def test_the_command_line(tmp_path: Path) -> None:
    onnx.save(swirling(), tmp_path / "m.onnx")
    (tmp_path / "ops.py").write_text(
        "def swirl(x, weight=None, *, scale=1.0, times=()):\n    return x if weight is None else x @ weight\n"
    )
    option = f"my.domain::Swirl={tmp_path / 'ops.py'}:swirl"
    call = ["explain", str(tmp_path / "m.onnx"), "--target", "cpu", "--custom-op"]
    told = CliRunner().invoke(app, [*call, option])
    assert told.exit_code == 0, told.output
    assert "calls the Python function swirl on the host" in " ".join(told.output.split())
    for wrong, words in ((f"{option}l", "has no 'swirll'"), ("my.domain::Swirl=ops", "write FILE.py:NAME")):
        told = CliRunner().invoke(app, [*call, wrong])
        assert told.exit_code != 0
        assert words in told.output
    assert not any(name.startswith("swirl") for name in sys.modules)
