"""Test hints after a compilation: each is given where it holds, names what it is about, and is absent elsewhere."""

from __future__ import annotations

import html
import json
import logging
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli.command import SHAPE, fusec, tiny
from onnx import ModelProto, TensorProto, helper, numpy_helper

import fusec as library
from fusec import frontends
from fusec.compiler import load_file
from fusec.diagnostics.hints import Hint, hints, launches
from fusec.errors import ManyLaunchesWarning
from fusec.execution.compilation import Compiled
from fusec.gpu.cudnn.legality.judges import RulesJudge
from fusec.ir import Graph
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.passes.partition.equivalent_spellings import respell
from fusec.runtime import Executable
from fusec.targets.target import load
from fusec.text import parse


def compiled(source: Graph, precision: str = "fp32", target: str = "h200") -> Compiled:
    """Compile with fusec's rules alone, which takes no time."""
    options = Options(precision)
    judge = RulesJudge(options.tensor_cores)
    program = partition(run(PIPELINE, source.clone(), options), judge, load(target))
    return Compiled(source, program, load(target), options, judge)


def kinds(found: tuple[Hint, ...]) -> list[str]:
    return [hint.kind for hint in found]


def looping(trips: int) -> ModelProto:
    """A loop of a product and a running sum, which no scan runs, and a relu: two nodes."""
    scalar, state = [], [4, 16]
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["s", "w"], ["t"]),
            helper.make_node("CumSum", ["t", "axis"], ["s2"]),
            helper.make_node("Identity", ["c"], ["c2"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, scalar),
            helper.make_tensor_value_info("c", TensorProto.BOOL, scalar),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, state),
        ],
        [
            helper.make_tensor_value_info("c2", TensorProto.BOOL, scalar),
            helper.make_tensor_value_info("s2", TensorProto.FLOAT, state),
        ],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["n", "", "x"], ["y"], "scan", body=body), helper.make_node("Relu", ["y"], ["z"])],
        "looping",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, state)],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, state)],
        [
            numpy_helper.from_array(np.array(trips), "n"),
            numpy_helper.from_array(np.array(1), "axis"),
            numpy_helper.from_array(np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16), "w"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


PRODUCT = 'graph "g" (%x: f32[2,8,8], %y: f32[2,8,8]) {\n  %z = matmul(%x, %y) loc("qk")\n  return %z\n}'


def test_fp32_tells_how_many_steps_it_leaves_out_of_cudnn() -> None:
    (hint,) = hints(compiled(parse(PRODUCT)))
    assert hint.kind == "precision"
    assert hint.text.startswith("fp32 leaves 1 step out of cuDNN") and "--precision tf32" in hint.text
    for precision in ("tf32", "fp16", "bf16"):
        assert hints(compiled(parse(PRODUCT), precision)) == ()


def test_the_refusal_of_the_judge_is_one_for_want_of_tensor_cores() -> None:
    """The hint counts these refusals, so the words of the message may change, but not its meaning."""
    check = pytest.importorskip("fusec.gpu.cudnn.legality.graph_check")
    deselected = {0: RuntimeError("Deselecting execution plan due to numerical notes")}
    fp32 = CudnnGraph((), (), tensor_cores=False)
    assert check._refusal(fp32, deselected).needs_tensor_cores
    assert not check._refusal(CudnnGraph((), ()), deselected).needs_tensor_cores
    assert not check._refusal(fp32, {0: RuntimeError("no engine")}).needs_tensor_cores
    assert not check._refusal(fp32, {}).needs_tensor_cores


def test_an_op_that_cudnn_never_takes_is_no_matter_of_precision() -> None:
    text = 'graph "g" (%x: f32[2,8,8]) {\n  %z = softmax(%x) {axis=2}\n  return %z\n}'
    assert hints(compiled(parse(text))) == ()


def chain(nodes: int, origins: int) -> Graph:
    """Make a graph of ops that no kernel runs together, from `origins` nodes of a model."""
    lines = [f'  %x{i + 1} = softmax(%x{i}) {{axis=1}} loc("n{i % origins}")' for i in range(nodes)]
    return parse("\n".join(['graph "g" (%x0: f32[4,8]) {', *lines, f"  return %x{nodes}\n}}"]))


@pytest.mark.parametrize(
    ("nodes", "origins", "told"),
    [
        (199, 199, []),
        (200, 200, ["launches"]),
        (60, 20, ["launches"]),
        (59, 20, []),
        (60, 2, ["unrolled", "launches"]),
        (15, 5, []),  # too few to matter
    ],
)
def test_growth_and_many_launches_are_reported(nodes: int, origins: int, told: list[str]) -> None:
    made = compiled(chain(nodes, origins))
    assert made.program.launches == nodes
    assert kinds(hints(made)) == told


def test_what_is_slow_has_a_name() -> None:
    hint = launches(compiled(chain(300, 2)))
    assert hint is not None and hint.grew
    assert "300 launches, from 2 nodes of the model" in hint.text and "n0 (150 launches)" in hint.text
    hint = launches(compiled(chain(300, 300)))
    assert hint is not None and not hint.grew
    assert "softmax (300 launches)" in hint.text, "no node became several: the ops are named"


def test_a_graph_without_a_model_has_launches_alone() -> None:
    graph = chain(250, 1)
    for node in graph.nodes:
        node.origin = ()
    hint = launches(compiled(graph))
    assert hint is not None and hint.text.startswith("250 launches, and each takes its time")


def test_names_are_escaped() -> None:
    graph = chain(40, 1)
    for node in graph.nodes:
        node.origin = ("a\x1b[31m",)
    hint = launches(compiled(graph))
    assert hint is not None and "\x1b" not in hint.text and "\\x1b[31m" in hint.text


def test_what_stays_in_floats_has_its_reason(rng: np.random.Generator) -> None:
    from quantized.test_explain import source

    (hint,) = (hint for hint in hints(compiled(source(rng), "fp16")) if hint.kind == "quantised")
    assert "values of the quantised model stay in floats: 1 because " in hint.text
    assert "for other reasons" in hint.text


def test_a_model_that_takes_bytes_is_not_quantised() -> None:
    images = parse(
        """graph "images" (%image: u8[2,3,8,8], %filters: f32[8,3,3,3]) {
          %floats = cast(%image) {to=f32}
          %y = conv(%floats, %filters) {strides=[1, 1], pads=[1, 1, 1, 1], dilations=[1, 1]}
          return %y
        }"""
    )
    assert "quantised" not in kinds(hints(compiled(images, "fp16")))


INTEGERS = """graph "g" (%x: i8[64,64]) {
  %w = constant weight("w") : i8[64,64]
  %s = constant [0.01] : f32[]
  %m = matmul(%x, %w)
  %f = cast(%m) {to=f32}
  %a = mul(%f, %s)
  %h = cast(%a) {to=f16}
  return %h
}"""


def with_products_in_halves(rounding: str) -> Compiled:
    """Return the program that a GPU chooses for a product of integers that is faster in fp16."""
    of = compiled(parse(INTEGERS, {"w": np.ones((64, 64), np.int8)}), "fp16")
    (step,) = of.program.steps
    body = respell(step.body, ("in_halves",))
    program = replace(of.program, steps=(replace(step, body=body, spelling=("in_halves",)),))
    return replace(of, program=program, options=replace(of.options, rounding=rounding))


def test_a_model_whose_integers_are_slower_than_fp16_names_the_option_that_lets_its_float_form_compete() -> None:
    (hint,) = (hint for hint in hints(with_products_in_halves("fused")) if hint.kind == "rounding")
    assert "1 of 1 products" in hint.text and "--rounding fastest" in hint.text
    assert "rounding" not in kinds(hints(with_products_in_halves("fastest"))), "both forms competed"
    as_integers = compiled(parse(INTEGERS, {"w": np.ones((64, 64), np.int8)}), "fp16")
    assert "rounding" not in kinds(hints(as_integers))


def test_an_unrolled_loop_has_its_reason() -> None:
    """Loops of few steps are always unrolled, so they have none."""
    (hint,) = (hint for hint in hints(compiled(frontends.load(looping(11)))) if hint.kind == "launches")
    assert "scan (22 launches: its loop is unrolled, because its body has cumulate)" in hint.text
    assert frontends.load(looping(7)).remarks == {}


@pytest.mark.cudnn
def test_a_file_gives_the_reason_why_a_loop_is_unrolled(tmp_path: Path) -> None:
    before = library.compile(looping(11), target="h200", simulate=True)
    assert isinstance(before, Executable)
    library.save(tmp_path / "net.fusec", [before.compiled])
    after = load_file.load(tmp_path / "net.fusec", simulate=True)
    reasons = [[hint.text for hint in hints(net.compiled) if hint.kind == "launches"] for net in (before, after)]
    assert reasons[0] == reasons[1]
    assert "because its body has cumulate" in reasons[1][0]


def test_the_cpu_target_has_no_hints() -> None:
    made = compiled(chain(300, 2))
    assert hints(replace(made, target=load("cpu"))) == ()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny(tmp_path)


@pytest.fixture
def unrolled(tmp_path: Path) -> Path:
    path = tmp_path / "loop.onnx"
    onnx.save(looping(120), path)
    return path


@pytest.mark.cudnn
def test_compile_prints_hints_and_has_them_in_json(unrolled: Path, model: Path) -> None:
    result = fusec("compile", unrolled, "--target", "h200")
    assert "  hint: the model's 2 nodes became 241 ops" in result.stdout
    assert "scan (240 launches: its loop is unrolled, because its body has cumulate)" in result.stdout
    found = json.loads(fusec("compile", unrolled, "--target", "h200", "--json").stdout)["hints"]
    assert [hint["kind"] for hint in found] == ["unrolled", "launches"]
    assert all(f"  hint: {hint['text']}\n" in result.stdout for hint in found)
    assert "hint:" not in fusec("compile", unrolled, "-q", "--target", "h200").stdout
    assert json.loads(fusec("compile", model, *SHAPE, "--json").stdout)["hints"] == []


@pytest.mark.cudnn
@pytest.mark.parametrize("command", ["run", "bench"])
def test_other_commands_have_the_same_hints(command: str, unrolled: Path) -> None:
    result = fusec(command, unrolled, "--target", "h200")
    found = json.loads(fusec(command, unrolled, "--target", "h200", "--json").stdout)["hints"]
    assert [hint["kind"] for hint in found] == ["unrolled", "launches"]
    assert all(f"  hint: {hint['text']}\n" in result.stdout for hint in found)
    assert "hint:" not in fusec(command, unrolled, "-q", "--target", "h200").stdout


@pytest.mark.cudnn
def test_a_folder_of_models_has_hints_in_json(unrolled: Path) -> None:
    (row,) = json.loads(fusec("run", unrolled.parent, "--target", "h200", "--json").stdout)["models"]
    assert [hint["kind"] for hint in row["hints"]] == ["unrolled", "launches"]


@pytest.mark.filterwarnings("ignore::fusec.errors.ManyLaunchesWarning")
def test_executables_have_hints(unrolled: Path) -> None:
    net = library.compile(str(unrolled), target="h200", simulate=True)
    assert isinstance(net, library.Executable)
    assert net.hints == hints(net.compiled)
    page = net._repr_html_()
    for hint in net.hints:
        assert f"hint: {hint.kind}" in page and html.escape(hint.text) in page


@pytest.mark.cudnn
def test_python_warns_of_a_model_that_becomes_many_launches(unrolled: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fusec"), pytest.warns(ManyLaunchesWarning, match="scan"):
        library.compile(str(unrolled), target="h200", simulate=True)
    assert [record.name for record in caplog.records] == ["fusec.compiler.build_program"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library.compile(looping(20), target="h200", simulate=True)
