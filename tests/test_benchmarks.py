"""Test the benchmark scripts without a GPU: what they compute, what they write, and that fusec has what they import."""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_suite import suite
from onnx_suite.suite import RECORD, Outcome, refusals, unlike_the_record
from test_runtime import executable

import fusec
from benchmarks.checks import fuzz_results, gpu_evidence, model_sample, onnx_suite, quantized_rounding
from benchmarks.common.attempt import TooLongError, within
from benchmarks.common.live_rows import LiveRows
from benchmarks.common.result_files import KEYS, ROOT, merge, parser, write_row
from benchmarks.common.step_pairs import NamedStep, named_steps, step_pairs, table
from benchmarks.kernels import fusion_penalties, kernel_times, leave_one_out, packed_products
from benchmarks.models import ablation
from benchmarks.pages import kernel_table, results_of_quantised, results_of_sample, results_page
from benchmarks.serving import call_overhead, several_gpus
from fusec import frontends
from fusec.compiler import compile_model
from fusec.compiler.load_file import load_artifact
from fusec.diagnostics.step_times import StepTime, Timing, measure
from fusec.errors import FusecError
from fusec.exporters.onnx import to_onnx
from fusec.gpu import device, kernels
from fusec.gpu.cublaslt import algorithms
from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.passes.partition.equivalent_spellings import faster_spellings
from fusec.reference import evaluate
from fusec.runtime import Executable
from fusec.schedule.program import Kind
from fusec.testing.runner import supervisor
from fusec.text import parse

TEXT = """graph "g" (%x: f32[2,8,6,6]{0,2,3,1}) {
  %a = relu(%x)
  %s = softmax(%a) {axis=1}
  return %s
}"""


TEXTS = ("benchmarks", "docs", "examples", "fusec", "tests", ".ci")
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").rglob("*.py") if path.name != "__init__.py")


def test_the_page_names_every_script_and_no_other_is_named_anywhere() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    parts = (
        "_child.py",
        "xla_peer.py",
        "jax_graph.py",
        "torch_training_steps.py",
        "load_client.py",
        "leave_one_out.py",
    )
    for script in SCRIPTS:
        folder = script.parent.name
        own = str(script.relative_to(ROOT / "benchmarks"))
        assert f"({own})" in page or folder in ("common", "pages") or own.endswith(parts), own
    for path in (*ROOT.glob("*.md"), ROOT / "Makefile", *(p for d in TEXTS for p in (ROOT / d).rglob("*"))):
        if path.suffix in (".py", ".md", ".cuh", ""):
            text = path.read_text() if path.is_file() else ""
            for name in re.findall(r"\bbenchmarks\.([a-z_]+(?:\.[a-z_]+)?)\b(?!\.json)", text):
                module = ROOT / "benchmarks" / name.replace(".", "/")
                assert module.is_dir() or module.with_suffix(".py").is_file(), f"{path}: benchmarks.{name}"
            for name in re.findall(r"\bbenchmarks/([a-z_/]+\.py)\b", text):
                assert (ROOT / "benchmarks" / name).is_file(), f"{path}: benchmarks/{name}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT / "benchmarks")))
def test_what_a_script_imports_from_fusec_exists(script: Path) -> None:
    """Most scripts need a GPU, so nothing else notices when a module that they import has moved."""
    missing = [name for name in imported_from_fusec(script) if not exists(name)]
    assert not missing


def imported_from_fusec(script: Path) -> Iterator[str]:
    """Yield dotted names of the modules, classes and functions of fusec that a script imports anywhere in its code."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "fusec")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fusec":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        if module and hasattr(importlib.import_module(module), attribute):
            return True
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def test_every_kind_of_call_is_compared_with_the_steps(rng: np.random.Generator) -> None:
    net = executable(TEXT)
    feeds = {"x": rng.standard_normal((2, 8, 6, 6)).astype(np.float32)}
    row = call_overhead.measured(net, feeds, rounds=3, burst=2, each=1)
    assert row["steps"]["median_us"] > 0
    assert set(row["more"]) == {"replay", "queued", "call", "out", "buffers", "buffers, out", "host"}
    for timing in row["more"].values():
        assert timing["low_us"] <= timing["median_us"] <= timing["high_us"]
    assert call_overhead.stream_times(net) == {"lanes": 1, "declined": ""}  # the simulator runs steps in order only


def test_times_in_order_and_in_parallel_have_separate_rows() -> None:
    class Captured:
        def __init__(self, lanes: int, other_us: float, this_us: float) -> None:
            self.recorded = (lanes, other_us, "", this_us)

    parallel = call_overhead.stream_times(Captured(3, 20.0, 10.0))  # type: ignore[arg-type]  # it has all that is used
    ordered = call_overhead.stream_times(Captured(1, 20.0, 10.0))  # type: ignore[arg-type]
    assert (parallel["in_order_us"], parallel["side_by_side_us"]) == (20.0, 10.0)
    assert (ordered["in_order_us"], ordered["side_by_side_us"]) == (10.0, 20.0)


def test_only_families_that_run_a_step_are_left_out() -> None:
    net = executable(TEXT)
    steps = [step for step in net.compiled.program.steps if step.kind is Kind.KERNEL]
    figures = net.compiled.figures
    used = leave_one_out.used_families(steps, figures)
    assert used["row_reduction"] == 1 and "depthwise" not in used
    for name in used:
        with leave_one_out.left_out(name):
            assert name not in leave_one_out.used_families(steps, figures)
    assert leave_one_out.used_families(steps, figures) == used, "all families are back"


def test_families_of_narrow_types_are_left_out_too() -> None:
    """The kernels of types below 16 bits are looked up in a list of their own."""
    net = executable('graph "g" (%x: i4[4,64]) {\n  %y = cast(%x) {to=f32}\n  return %y\n}')
    steps, figures = net.compiled.program.steps, net.compiled.figures
    assert leave_one_out.used_families(steps, figures) == {"pointwise": 1}
    with leave_one_out.left_out("pointwise"):
        assert "pointwise" not in leave_one_out.used_families(steps, figures)


def test_families_that_compete_with_cudnn_are_listed_without_a_gpu() -> None:
    net = executable(
        'graph "g" (%x: f16[4,16,8,8], %s: f32[16]) {\n  %y, %m, %i = batch_norm_train(%x, %s, %s)\n  return %y\n}'
    )
    assert [step.kind for step in net.compiled.program.steps] == [Kind.CUDNN]
    case = SimpleNamespace(compile=lambda **_: net)
    assert leave_one_out.list_families(case)["batch_norm"] == 1  # type: ignore[arg-type]  # it has all that is used


def test_a_choice_is_compiled_both_ways_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def compiled(**options: object) -> Executable:
        asked.append(options["disable"])
        return executable(TEXT)

    monkeypatch.setattr(ablation, "_prepared", lambda *_: SimpleNamespace(compile=compiled))
    ablation.dry("relu_mask_bits", "resnet50", 32, ablation.TRAINING)
    assert asked == [("relu_mask_bits",), ()]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("without relu_mask_bits resnet50:32 training: {'cudnn': 1, 'kernel': 2}, ")
    assert second.startswith("with relu_mask_bits")


class _Program:
    """A compiled model whose run takes a given time."""

    def __init__(self, executable: Executable, ms: float, results: object = None):
        self.compiled, self.kernels = executable.compiled, set(executable.compiled.program.steps)
        self.program, self.results, self.ms = self, results, ms

    def span(self, count: int) -> float:
        return self.ms


def test_each_family_is_timed_against_the_whole_and_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, said = executable(TEXT), list[str]()
    rows: list[dict[str, Any]] = []
    attempt = SimpleNamespace(keep=lambda row: rows.append(copy.deepcopy(row)), say=said.append)
    timing = SimpleNamespace(
        free_memory=lambda: None,
        relative_l2=lambda got, want: 0.0 if got == want else 1.0,
        timed=lambda _, spans: {name: {"median_ms": span(1)} for name, span in spans.items()},
    )
    monkeypatch.setitem(sys.modules, "benchmarks.common.torch_timing", timing)
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    names = {family.__name__ for family in kernels.FAMILIES}

    def compiled() -> _Program:
        (Path(os.environ["FUSEC_CACHE"]) / "plans").mkdir(parents=True)
        missing = names - {family.__name__ for family in kernels.FAMILIES}
        if "pool_forward" in missing:
            raise FusecError("needs a pool")
        return _Program(net, 2.0 if "row_reduction" not in missing else 3.0)

    case = SimpleNamespace(compile=compiled, start=lambda made: made)
    row: dict[str, Any] = {"model": "m", "batch": 1, "form": "int8", "without": {}}
    leave_one_out.measure(case, row, ["row_reduction"], attempt)  # type: ignore[arg-type]  # they have all that is used
    assert list(row["without"]) == ["row_reduction"] and row["without"]["row_reduction"]["worth"] == 0.5
    assert rows == [row] and "m int8 b1: row_reduction +50.0%" in said[-1]
    monkeypatch.setattr(leave_one_out, "used_families", lambda *_: {"pointwise": 1, "pool_forward": 2})
    row["without"] = {}
    leave_one_out.measure(case, row, (), attempt)  # type: ignore[arg-type]
    assert list(rows[1]["without"]) == ["pointwise"] and list(rows[2]["without"]) == ["pointwise", "pool_forward"]
    assert rows[1]["without"]["pointwise"]["worth"] == 0.0
    assert rows[2]["without"]["pool_forward"] == {"steps": 2, "failed": "needs a pool"}
    case.start = lambda made: _Program(net, 1.0, results=len(said))
    with pytest.raises(RuntimeError, match="m int8 b1 without pointwise gives other results"):
        leave_one_out.measure(case, row, (), attempt)  # type: ignore[arg-type]


def test_the_table_names_the_model_that_loses_most_or_needs_a_family() -> None:
    small: dict[str, Any] = {"model": "m", "batch": 1, "without": {"a": {"worth": 0.5}, "b": {"worth": 0.1}}}
    other: dict[str, Any] = {"model": "n", "batch": 2, "form": "int8", "layers": 2, "without": {"a": {"worth": 0.75}}}
    assert kernel_table.worth([small, other], "a") == "+75.0% (n int8 b2, 2 layers)"
    assert kernel_table.worth([small, other], "b") == "+10.0% (m b1)"
    other["without"] = {"a": {"failed": "no kernel"}}
    assert kernel_table.worth([small, other], "a") == "needed (n int8 b2, 2 layers)"


def test_figures_of_some_families_are_added_to_those_of_a_row(tmp_path: Path) -> None:
    there, here = tmp_path / "there" / "leave_one_out.json", tmp_path / "leave_one_out.json"
    there.parent.mkdir()
    key = KEYS["leave_one_out.json"]
    for form, worth in (("fp16", 1), ("int8", 2)):
        row = {"model": "m", "batch": 1, "form": form, "without": {"a": worth, "b": worth}}
        write_row(here, {"gpu": "A"}, "c1", row, key)
        write_row(there, {"gpu": "A"}, "c2", row | {"without": {"b": 3}, "part": form == "int8"}, key)
    merge(there, tmp_path)
    rows = json.loads(here.read_text())["rows"]
    assert [row["without"] for row in rows] == [{"b": 3}, {"a": 2, "b": 3}]


def test_a_result_file_has_one_row_for_each_case_and_one_machine(tmp_path: Path) -> None:
    path, key = tmp_path / "rows.json", ("model", "batch")

    def rows() -> list[tuple[str, int, int, str]]:
        return [(row["model"], row["batch"], row["us"], row["commit"]) for row in json.loads(path.read_text())["rows"]]

    write_row(path, {"gpu": "A"}, "c1", {"model": "m", "batch": 1, "us": 1}, key)
    write_row(path, {"gpu": "A"}, "c1", {"model": "m", "batch": 2, "us": 2}, key)
    write_row(path, {"gpu": "A"}, "c2", {"model": "m", "batch": 1, "us": 3}, key)
    assert rows() == [("m", 1, 3, "c2"), ("m", 2, 2, "c1")]
    write_row(path, {"gpu": "B"}, "c3", {"model": "m", "batch": 2, "us": 4}, key)
    assert rows() == [("m", 2, 4, "c3")]


def test_steps_of_two_forms_are_paired_by_their_operators() -> None:
    def step(us: float, *operators: str) -> NamedStep:
        return NamedStep(frozenset(operators), StepTime(0, "conv", "cudnn", Timing.of([us]), us / 2))

    int8 = [step(30.0, "a"), step(20.0, "b"), step(1.0), step(4.0, "c")]
    fp16 = [step(10.0, "c"), step(31.0, "b", "a"), step(2.0, "pool")]
    pairs = step_pairs(int8, fp16)
    found = [([s.us for s in pair.first], [s.us for s in pair.second]) for pair in pairs]
    assert found == [([30.0, 20.0], [31.0]), ([1.0], []), ([], [2.0]), ([4.0], [10.0])]
    assert pairs[0].to_json("int8", "fp16")["operators"] == ["a", "b"]
    lines = table(pairs, "int8", "fp16", 1).splitlines()
    assert len(lines) == 3 and lines[2].split()[:4] == ["55.0", "27.5", "43.0", "21.5"]


@pytest.mark.parametrize("form", packed_products.FORMS)
def test_packed_products_are_paired_with_those_in_fp16(form: str) -> None:
    chain, row = packed_products.Chain.of("1x4096x14336:4:32", small=True), dict[str, Any]()
    data, feeds = chain.model(chain.weights()).SerializeToString(), {"x0": chain.x()}
    net = packed_products.compiled(form, data, row, target="h200", simulate=True)
    assert (row[f"{form}_packed_steps"], row[f"{form}_steps"]) == (0 if form == "fp16" else 2, 2)
    found = [sorted(step.operators) for step in named_steps(net, measure(net, feeds, runs=1))]
    assert found == [["product0"], ["product1"]]


def test_a_quantised_step_is_paired_with_the_float_step_of_the_same_operator() -> None:
    """The product in it was made by a rule, and has no name of its own."""
    b = fusec.Builder()
    w = b.constant(np.random.default_rng(0).standard_normal((32, 32, 3, 3)).astype(np.float32))
    b.output(y=b.conv(b.input("x", (2, 32, 8, 8)), w, padding=1).pointwise("relu"))
    model = to_onnx(b.graph())
    for node in model.graph.node:
        node.name = f"/{node.op_type}"
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 32, 8, 8)).astype(np.float32)}
    sides: list[list[NamedStep]] = []
    for form in (fusec.quantize(model, feeds).model, model):
        net = fusec.compile(form, target="h200", simulate=True, precision="fp16")
        assert isinstance(net, Executable)
        sides.append(named_steps(net, measure(net, feeds, runs=1)))
    pairs = [pair for pair in step_pairs(*sides) if pair.first and pair.second]
    assert [[step.time.kind for step in (*pair.first, *pair.second)] for pair in pairs] == [["cudnn", "cudnn"]]
    assert all("/Conv" in step.operators for step in (*pairs[0].first, *pairs[0].second))


def test_quantised_results_are_listed_once_they_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    time = {"median_ms": 1.0, "low_ms": 0.9, "high_ms": 1.1}
    begun = {"model": "m", "batch": 8, "format": "int8", "times": {"fp16": time}, "date": "d", "commit": "c"}
    seconds, launches = {"int8_cold_s": 3.0, "fp16_cold_s": 2.0}, {"int8_launches": 7, "fp16_launches": 6}
    sides = {"us": 9.0, "limit_us": 2.0, "steps": ["cudnn conv"]}, {"us": 4.0, "limit_us": 2.0, "steps": []}
    pairs = [{"operators": ["a"], "int8": a, "fp16": b} for a, b in (sides, sides[::-1])]
    done = {**begun, **seconds, **launches, "fp16_over_quantised": 0.5, "times": {"fp16": time, "int8": time}}
    packed = {"case": "1x64x32:4:32", "us": {"untuned": 1.0}, "date": "d", "commit": "c"}
    turns = {"times": {}, "us": {"packed": 2.0, "fp16": 5.0, "torch": 6.0}, "share_of_limit": 0.7}
    ratios = {"fp16_over_packed": 2.5, "torch_over_packed": 3.0}

    def section(of: Callable[[], list[str]], *rows: dict[str, Any]) -> list[str]:
        data = {"gpu": "A", "driver": 1, "cudnn": 1, "torch": "2", "rows": list(rows)}
        monkeypatch.setattr(results_of_quantised, "read", lambda name: data)
        return of()

    assert section(results_of_quantised.quantized_models, begun) == []
    text = "\n".join(section(results_of_quantised.quantized_models, begun, {**done, "pairs": pairs}))
    times = "1.000 (0.900 to 1.100)"
    assert f"| m | 8 | int8 | {times} | {times} | 0.50 |  | 7 / 6 | 3.0 / 2.0 |" in text
    assert text.count("µs, limit") == 1 and "`cudnn conv`: 9.0 µs, limit 2.0; in fp16 4.0" in text
    assert section(results_of_quantised.packed_products, packed) == []
    text = "\n".join(section(results_of_quantised.packed_products, {**packed, **turns, **ratios}))
    assert "| 1x64x32 | 4 | 32 | 2.00 | 5.00 | 6.00 | 70% | 2.50 | 3.00 |" in text


def test_a_run_stops_at_its_limit() -> None:
    with pytest.raises(TooLongError, match="not ready after 0 s"), within(0.01):
        time.sleep(5)


GELU = """graph "g" (%x: f16[64,64], %w: f16[64,64]) {
  %a = matmul(%x, %w)
  %y = gelu(%a)
  return %y
}"""


def test_a_choice_is_left_out_within_the_block() -> None:
    with ablation.left_out("concat_in_place") as disabled:
        assert list(disabled) == ["concat_in_place"]
    body = parse(GELU)
    assert [name for name, _ in faster_spellings(body)] == [("gelu_by_tanh",)]
    with ablation.left_out("gelu_by_tanh") as disabled:
        assert not disabled and not list(faster_spellings(body))
    assert [name for name, _ in faster_spellings(body)] == [("gelu_by_tanh",)]
    with ablation.left_out("cublaslt") as disabled:
        assert not disabled and not algorithms.version()
    with pytest.raises(SystemExit, match="no choice 'nonsense' can be left out"), ablation.left_out("nonsense"):
        pass


def test_steps_are_counted_by_library() -> None:
    assert ablation.steps_of(executable(TEXT)) == {"cudnn": 1, "kernel": 2}


def test_default_cases_name_choices_and_tolerances() -> None:
    for item in ablation.CASES:
        choice, _, batch, *precision = item.split(":")
        assert int(batch) and (precision or ["fp16"])[0] in ablation.TOLERANCES
        with ablation.left_out(choice):
            pass


def test_penalties_sum_up_all_layers_and_time_equal_ones_once() -> None:
    """The time of a graph is the number of its calls here. MobileNetV2 has 17 layers, and 10 that differ."""
    timed: list[int] = []

    def times_us(graphs: dict[str, CudnnGraph], footprint_bytes: int) -> dict[str, float]:
        timed.append(len(graphs))
        return {key: float(len(graph.calls)) for key, graph in graphs.items()}

    first, second = fusion_penalties.rows(times_us)
    assert (first["us"], first["without_us"]) == (17 * 3, 17) and timed[:2] == [10, 10]
    assert (second["us"], second["without_us"]) == (4, 4)


def test_rows_of_another_machine_keep_their_commits(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
        for batch in (1, 2):
            if folder is here or batch == 2:
                row = {"model": "m", "batch": batch, "us": folder.name}
                write_row(folder / "calls.json", {"gpu": "A"}, f"c-{folder.name}", row, ("model", "batch"))
    merge(there / "calls.json", here)
    rows = json.loads((here / "calls.json").read_text())["rows"]
    assert [(row["batch"], row["us"], row["commit"]) for row in rows] == [
        (1, "here", "c-here"),
        (2, "there", "c-there"),
    ]


def test_the_prompt_of_a_decoder_stays_where_its_token_alone_was_timed(tmp_path: Path) -> None:
    there, here = tmp_path / "there" / "decoders.json", tmp_path / "here" / "decoders.json"
    case = {"layers": 8, "batch": 1, "bits": 16, "times": {"fusec": {"median_ms": 1}}}
    for path, row in ((here, {**case, "prompt_times": {"fusec": 9}}), (there, case)):
        path.parent.mkdir()
        write_row(path, {"gpu": "A"}, path.parent.name, row, KEYS["decoders.json"])
    merge(there, here.parent)
    (row,) = json.loads(here.read_text())["rows"]
    assert (row["commit"], row["prompt_commit"], row["prompt_times"]) == ("there", "here", {"fusec": 9})


def test_the_table_of_peers_marks_models_with_channels_last_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    time = {"median_ms": 1.0, "low_ms": 0.9, "high_ms": 1.1}
    row: dict[str, Any] = {
        "model": "unet",
        "batch": 8,
        "times": {"fusec": time, "eager": time},
        "best_peer_over_fusec": 1.0,
    }
    row |= {"limit_ms": 0.5, "cold_s": 1, "warm_s": 1, "peak_bytes": {}, "errors": {"fusec": 0.0, "eager": 0.0}}
    row["steps"] = []
    data: dict[str, Any] = {
        "gpu": "A",
        "driver": 1,
        "cudnn": 1,
        "torch": "2",
        "commit": "c",
        "date": "d",
        "rows": [row],
    }
    monkeypatch.setattr(results_page, "read", lambda name: data)
    assert "†" not in "\n".join(results_page.peers())
    data["rows"].append({**row, "model": "resnet50", "inputs": "channels last"})
    text = "\n".join(results_page.peers())
    assert "†: fusec's inputs and outputs are channels last" in text
    assert [line.count("†") for line in text.splitlines() if line.startswith(("| unet", "| resnet50"))][:2] == [0, 1]


def test_the_sample_of_models_names_failures_and_references(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"launches": 3, "steps": 5, "programs": 1, "error": 2e-7, "warnings": []}
    rows = [
        {"from": "timm", "model": "a", "ok": True, "reference": [], **sizes},
        {"from": "timm", "model": "b", "ok": False, "reference": ["top_k"], **sizes},
        {"from": "timm", "model": "c", "ok": False, "failed": "ModelError: x|y"},
    ]
    dated = [row | {"precision": "fp32", "date": "d", "commit": "0123456789"} for row in rows]
    monkeypatch.setattr(results_of_sample, "read", lambda name: {"torch": "2", "target": "h200", "rows": dated})
    text = "\n".join(results_of_sample.model_sample())
    assert "in simulation of h200, without a GPU; torch 2; commit 0123456, d" in text
    assert "1 of 3 models are right in fp32 and leave nothing" in text
    assert text.splitlines()[6:9] == [
        "| timm | a | fp32 | 3 | 5 | 1 | 2e-07 | nothing | none |",
        "| timm | b | fp32 | 3 | 5 | 1 | 2e-07 | `top_k` | none |",
        "| timm | c | fp32 |  |  |  | failed |  | ModelError: x\\|y |",
    ]


def test_the_sample_on_a_gpu_counts_each_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"launches": 3, "steps": 5, "programs": 1, "reference": [], "warnings": [], "from": "timm", "model": "a"}
    rows = [
        {"precision": "fp32", "error": 2e-7, "ok": True, "date": "d", "commit": "0123456789", **sizes},
        {"precision": "fp16", "error": 1e-1, "ok": False, "date": "d", "commit": "0123456789", **sizes},
    ]
    data = {"gpu": "NVIDIA X", "driver": 1, "cudnn": 2, "torch": "2", "rows": rows}
    monkeypatch.setattr(results_of_sample, "read", lambda name: data if name == "model_sample_gpu.json" else {})
    text = "\n".join(results_of_sample.model_sample_gpu())
    assert "run on NVIDIA X, driver API 1, cuDNN 2, torch 2, step by step" in text
    assert "0 of 1 models are right in fp16 and 1 of 1 models are right in fp32 and leave nothing" in text


class _Called:
    """A model that gives a wrong second output from its second call on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.calls += 1
        return x, x * self.calls


class _Tensor:
    """Stand in for a tensor of torch."""

    def numpy(self) -> np.ndarray:
        return np.ones(4, np.float32)


def test_the_sample_compares_each_call() -> None:
    x = _Tensor()
    assert model_sample._errors(_Called(), [x], [x, x], 1) == [0.0, 0.0]
    assert model_sample._errors(_Called(), [x], [x, x], 2) == [0.0, 0.0, 0.0, 1.0]


def test_the_sample_refuses_a_model_whose_output_is_constant() -> None:
    varied = np.arange(6, dtype=np.float32).reshape(2, 3)
    model_sample.refuse_constants([varied, np.ones(1, np.float32), np.ones((0, 3), np.float32)])
    with pytest.raises(ValueError, match=r"each element of output 1 of the model is 0\.0"):
        model_sample.refuse_constants([varied, np.zeros_like(varied)])


def test_small_errors_are_not_printed_as_zeros(capsys: pytest.CaptureFixture[str]) -> None:
    LiveRows(None, "", {}, ())("ok", {}, error=8.7e-07, none=0.0, ms=12.345678)
    assert "{'error': 8.7e-07, 'none': 0.0, 'ms': 12.3457}" in capsys.readouterr().out


def test_slices_of_the_sample_hold_each_model_once() -> None:
    models = {"timm": [f"a{i}" for i in range(7)], "torchvision": ["b0", "b1"]}
    whole = [(source, name) for source, names in models.items() for name in names]
    assert model_sample.chosen(models, []) == whole
    slices = [model_sample.chosen(models, [], model_sample.part_of_all(f"{i}/4")) for i in range(1, 5)]
    assert sorted(chain(*slices)) == whole
    assert all(2 <= len(part) <= 3 for part in slices)
    assert model_sample.chosen(models, ["b1", "a3", "a0"], (2, 2)) == [("timm", "a3")]
    with pytest.raises(SystemExit, match="no model c"):
        model_sample.chosen(models, ["a0", "c"])
    for wrong in ("0/4", "5/4", "2", "-1/4", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no slice"):
            model_sample.part_of_all(wrong)


def test_the_table_of_peers_names_the_best_peer_and_the_worst_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(model: str, **ms: float) -> dict[str, Any]:
        times = {who: {"median_ms": t, "low_ms": t, "high_ms": t} for who, t in {"fusec": 1.0, **ms}.items()}
        steps = [{"step": f"reshape+conv{i % 4}", "kind": "cudnn", "us": 10.0 + i, "limit_us": 10.0} for i in range(5)]
        found = {"model": model, "batch": 8, "times": times, "best_peer_over_fusec": min(ms.values()), "steps": steps}
        return found | {"limit_ms": 0.5, "cold_s": 1, "warm_s": 1, "peak_bytes": {}, "errors": {"fusec": 0.0}}

    rows = [row("a", eager=3.0, xla=2.0) | {"xla": {"jax": "0.11.2"}}, row("b", eager=1.5)]
    data = {"gpu": "A", "driver": 1, "cudnn": 1, "torch": "2", "commit": "c", "date": "d", "rows": rows}
    monkeypatch.setattr(results_page, "read", lambda name: data)
    text = "\n".join(results_page.peers())
    assert "XLA (JAX 0.11.2)" in text
    first, second, steps, _ = [line.split(" | ") for line in text.splitlines() if line.startswith(("| a", "| b"))]
    assert first[3:6] == ["3.000 (3.000 to 3.000)", "2.000 (2.000 to 2.000)", "2.00 (XLA)"]
    assert second[4:6] == ["not run", "1.50 (torch eager)"]
    worst = ["`conv0` × 2, cudnn: 24.0, limit 20.0", "`conv3`, cudnn: 13.0, limit 10.0"]
    assert steps[2:4] == worst


def test_a_peer_that_a_new_row_lacks_keeps_its_time_with_its_commit(tmp_path: Path) -> None:
    machine = {"gpu": "A"}
    before = {
        "model": "m",
        "batch": 1,
        "commit": "old",
        "times": {"fusec": {"median_ms": 2}, "compile": {"median_ms": 3}},
    }
    old = {"date": "d", "commit": "old", **machine, "note": "kept", "rows": [before]}
    times = {"fusec": {"median_ms": 1}, "xla": {"median_ms": 2}}
    new = {"date": "e", "commit": "new", **machine, "rows": [{"model": "m", "batch": 1, "times": times}]}
    for folder, data in (("here", old), ("there", new)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "peers.json").write_text(json.dumps(data))
    merge(tmp_path / "there" / "peers.json", tmp_path / "here")
    merged = json.loads((tmp_path / "here" / "peers.json").read_text())
    (row,) = merged.pop("rows")
    assert merged == {key: value for key, value in old.items() if key != "rows"}
    assert (row["commit"], row["times"]) == ("new", times)
    assert row["elsewhere"] == {"compile": {"median_ms": 3, "commit": "old"}}


def test_times_of_kernels_and_of_models_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    monkeypatch.setattr(kernel_times, "time_kernels", lambda names, output, commit: written.append(output))
    monkeypatch.setattr(leave_one_out, "main", lambda names, settings, output, commit: written.append(output))
    for name, options in (("kernel_times.json", []), ("leave_one_out.json", ["--leave-one-out"])):
        monkeypatch.setattr(sys, "argv", ["kernel_times", *options, "--output", str(tmp_path / name)])
        kernel_times.main()
    assert [path.name for path in written] == ["kernel_times.json", "leave_one_out.json"]


def test_a_model_timed_without_peers_keeps_the_row_with_them(tmp_path: Path) -> None:
    here, there = tmp_path / "here" / "peers.json", tmp_path / "there" / "peers.json"
    case: dict[str, Any] = {"model": "m", "batch": 1}
    both = {"fusec": {"median_ms": 2.0}, "xla": {"median_ms": 3.0}}
    old = {**case, "commit": "old", "date": "d", "times": both}
    new = {**case, "commit": "new", "date": "e", "times": {"fusec": {"median_ms": 1.9}}}
    for path, row in ((here, old), (there, new)):
        path.parent.mkdir()
        path.write_text(json.dumps({"gpu": "A", "rows": [row]}))
    merge(there, here.parent)
    again = {"median_ms": 1.9, "commit": "new"}
    assert json.loads(here.read_text())["rows"] == [{**old, "again": again}]
    later = {"median_ms": 1.8, "commit": "later"}
    there.write_text(
        json.dumps({"gpu": "A", "rows": [{**new, "commit": "later", "times": {"fusec": {"median_ms": 1.8}}}]})
    )
    merge(there, here.parent)
    assert json.loads(here.read_text())["rows"] == [{**old, "again": later}]
    assert results_page._again({"again": later}) == "; 1.800 at later"


def test_the_onnx_suite_counts_each_case_once() -> None:
    found = {
        ("Node", "test_add"): Outcome(),
        ("Node", "test_bernoulli"): Outcome(refused=refusals(RECORD.read_text())["test_bernoulli"]),
        ("Node", "test_abs"): Outcome(failed="AssertionError: 1 is not 2"),
        ("Simple", "test_shrink"): Outcome(refused="why not"),
    }
    row = onnx_suite.row(found, "cpu")
    assert row["families"]["Node"] == {"cases": 3, "refused": 1, "failed": 1}
    assert row["wrong"] == ["test_abs: AssertionError: 1 is not 2", "test_shrink: why not"]
    *_, line = onnx_suite.table([{**row, "target": "h200", "cudnn": 92200, "commit": "0123456789"}]).splitlines()
    assert line == "| simulation (h200) | 92200 | 4 | 1 | 2 | 1 | 0123456 |"


def test_the_onnx_suite_knows_the_types_that_only_a_gpu_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ("Node", "test_cast_FLOAT_to_FLOAT4E2M1")
    monkeypatch.setattr(suite, "RECORD", tmp_path / "record.txt")
    suite.RECORD.write_text(suite.record({case: Outcome(simulated=True)}))
    refused = Outcome(refused="%y: f4e2m1 runs in simulation only, not on a GPU")
    assert unlike_the_record({case: refused}, "cuda") == [] == unlike_the_record({case: Outcome()}, "cpu")
    assert unlike_the_record({case: refused}, "cpu") == [f"{case[1]}: {refused.refused}"]
    passes = "passes, and the record lists it as refused"
    assert unlike_the_record({case: Outcome()}, "cuda") == [f"{case[1]}: {passes}"]
    (line,) = unlike_the_record({case: Outcome(refused="no memory")}, "cuda")
    assert line.startswith(f"{case[1]}: refused with 'no memory', not ")


def test_fuzzing_results_add_up_runs_and_count_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data: dict[str, Any] = {"seed": 1, "target": "h200", "workers": 2, "seconds": 3.0, "examples": 4, "nodes": 5}
    data["properties"] = {"device_agrees": {"runs": 4, "skips": 1, "failures": 1, "seconds": 2.0, "ms": 500.0}}
    data |= {"findings": [{}], "doubts": [], "coverage": {"kernels": {"attention": 50, "rows": 9}}}
    (tmp_path / "first.json").write_text(json.dumps(data))
    (tmp_path / "second.json").write_text(
        json.dumps({**data, "seed": 2, "seconds": 4.0, "coverage": {"kernels": {"attention": 7}}})
    )
    older = {**data, "name": "older", "commit": "a", "findings": 0, "doubts": 0, "open": "0", "properties": {}}
    results = tmp_path / "fuzz.json"
    results.write_text(json.dumps([older]))
    monkeypatch.setattr(fuzz_results, "RESULTS", results)
    files = [str(tmp_path / "first.json"), str(tmp_path / "second.json")]
    monkeypatch.setattr(fuzz_results.sys, "argv", ["fuzz_results.py", "--add", "kernels", "b", "0", *files])
    fuzz_results.main()
    row = json.loads(results.read_text())[1]
    assert row["kernels"] == {"attention": 57, "rows": 9}
    assert row["properties"] == {
        "device_agrees": {"runs": 8, "skips": 2, "failures": 2, "seconds": 4.0, "ms": 500.0},
    }
    assert [row[key] for key in ("seed", "workers", "seconds", "examples", "findings")] == [1, 4, 4.0, 8, 2]
    _, old, new = capsys.readouterr().out.split("\n## ")
    assert "kernels run" not in old
    assert new.endswith(
        "\n| kernel family | kernels run on the device |\n|---|---:|\n| `attention` | 57 |\n| `rows` | 9 |\n"
    )


def test_scripts_refuse_a_result_file_of_another_name(capsys: pytest.CaptureFixture[str]) -> None:
    given = parser(None, "peers.json").parse_args(["--output", "out/peers.json"])
    assert given.output == Path("out/peers.json")
    with pytest.raises(SystemExit):
        parser(None, "peers.json").parse_args(["--output", "out/mine.json"])
    assert "the file must be called peers.json" in capsys.readouterr().err


def evidence(folder: Path) -> gpu_evidence.Machine:
    return gpu_evidence.Machine(folder, gpus=2, cores=8, seed=0, commit="c")


def test_evidence_reads_its_phases() -> None:
    assert gpu_evidence.phases(["fuzz:20", "suite,tests:1.5"]) == [(["fuzz"], 20.0), (["suite", "tests"], 1.5)]
    with pytest.raises(ValueError, match="'fuz' is no phase: fuzz, suite"):
        gpu_evidence.phases(["fuz:20"])


def test_evidence_gives_each_gpu_tests_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[list[str]] = []
    for number in range(3):
        items = [SimpleNamespace(nodeid=f"tests/test_{i}.py") for i in range(40)]
        dropped: list[Any] = []
        config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items, to=dropped: to.extend(items)))
        monkeypatch.setenv(gpu_evidence.SHARD, f"{number}/3")
        gpu_evidence.pytest_collection_modifyitems(config, items)
        assert len(items) + len(dropped) == 40
        shares.append([item.nodeid for item in items])
    assert sorted(chain(*shares)) == sorted(f"tests/test_{i}.py" for i in range(40)) and all(shares)


def test_evidence_runs_all_tests_that_need_a_gpu() -> None:
    """onnx's suite is a phase of its own."""
    marked = [p.relative_to(ROOT / "tests") for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text()]
    folders = {path.parts[0] for path in marked} - {"onnx_suite", Path(__file__).name}
    assert folders <= set(gpu_evidence.FOLDERS)


def test_evidence_leaves_a_fuzzer_time_to_report() -> None:
    assert supervisor.STOP_S + 5 <= gpu_evidence.GRACE_S


def test_evidence_stops_what_runs_too_long(tmp_path: Path) -> None:
    machine = evidence(tmp_path)
    show = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['MORE'])"
    assert machine.run("short", 1, ["-c", show], 60, MORE="x") == 0
    assert (tmp_path / "short.out").read_text() == "1 x\n"
    assert machine.run("long", None, ["-c", "import time; time.sleep(60)"], 1) is None


@pytest.mark.parametrize(
    ("report", "line", "failed"),
    [
        ({"examples": 3, "findings": [], "doubts": []}, "device0: 3 graphs, 0 findings and doubts", False),
        ({"examples": 3, "findings": [], "doubts": [{"message": "y differs"}]}, "    y differs", True),
        (None, "device0: no report, see device0.log", True),
    ],
)
def test_evidence_fails_with_a_finding_or_without_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Any, line: str, failed: bool
) -> None:
    machine = evidence(tmp_path)

    def run(self: Any, name: str, gpu: int | None, command: Sequence[str], seconds: float) -> int:
        assert (name, gpu, seconds) == ("device0", 0, 30.0 + gpu_evidence.GRACE_S) and command[:4] == (
            "-m",
            "fusec",
            "fuzz",
            "--json",
        )
        (tmp_path / f"{name}.out").write_text("" if report is None else json.dumps(report))
        return 0

    monkeypatch.setattr(gpu_evidence.Machine, "run", run)
    machine.fuzz("device0", 0, 2, 30.0, "--device")
    assert machine.lines[-1] == line and machine.failed == failed


def tiny_dynamic(path: Path) -> None:
    """Write a model whose first dim is open."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 8]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@pytest.mark.cudnn
def test_the_process_of_a_case_of_shapes_prints_a_row_for_each_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In simulation, and without the call that wakes the GPU."""
    monkeypatch.setattr(pytest.importorskip("cupy"), "zeros", lambda size: None)
    from benchmarks.compile_time import new_shapes_child

    for name in ("read_model", "build_program"):  # which the process replaces
        monkeypatch.setattr(compile_model, name, getattr(compile_model, name))
    monkeypatch.setenv("FUSEC_DEVICE", "none")
    device._first_gpu.cache_clear()
    tiny_dynamic(tmp_path / "m.onnx")
    arrays: dict[str, Any] = {f"{name}{n}": np.full((n, 8), n, np.float32) for n in (2, 3) for name in "xy"}
    np.savez(tmp_path / "m.npz", **arrays)
    options = [json.dumps(option) for option in ("none", "size", [[2], [3]], [3], 0.0)]
    new_shapes_child.main([str(tmp_path / "m.onnx"), str(tmp_path / "m.npz"), *options])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["size"], row["error"]) for row in rows] == [([2], 0.0), ([3], 0.0)]
    assert all(0 < row["program_s"] <= row["first_s"] for row in rows)


@pytest.mark.parametrize("rounding", ["half to even", "half away from zero", "to zero"])
@pytest.mark.parametrize("limit", ["saturates", "wraps"])
def test_conversions_to_int8_are_named(rounding: str, limit: str) -> None:
    case = quantized_rounding.image_case("a convolution", DType.I8)
    exact = np.where(np.isfinite(case.expected["FMA"]), case.expected["FMA"], 0)
    result = quantized_rounding.LIMITS[limit](quantized_rounding.ROUNDING[rounding](exact)).astype(np.int8)
    (line,) = [x for x in quantized_rounding.explain(case, DType.I8, result) if x.startswith("FMA")]
    names = [part.split(": ")[-1] for part in line.split("; ")]
    assert rounding in names[0].split(" = ") and rounding in names[1].split(" = ")
    assert (limit in names[2].split(" = ")) == (limit == "saturates" or rounding == "half to even")


@pytest.mark.filterwarnings("ignore")  # those of Dask's own threads
def test_scale_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(several_gpus.sys, "argv", ["several_gpus", "--dry", "pool", "bytes"])
    assert several_gpus.main() == 0
    told = capsys.readouterr().out
    assert told.count("'over_one'") == told.count("'shared_over_one'") == 2


def test_a_part_of_scale_that_fails_or_takes_too_long_costs_no_other_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_part(name: str, *_: object) -> bool:
        if name == "pool":
            raise ValueError("no such thing")
        threading.Event().wait(60 if name == "train" else 0)
        return True

    monkeypatch.setattr(several_gpus, "run_part", run_part)
    monkeypatch.setattr(several_gpus.sys, "argv", ["several_gpus", "--dry", "--part-seconds", "0.2"])
    monkeypatch.setattr(several_gpus, "GRACE_S", 0.1)
    assert several_gpus.main() == 1
    told = capsys.readouterr().out.splitlines()
    assert ["no such thing" in told[1], "not ready after 0 s" in told[3]] == [True, True]
    assert [line.split(maxsplit=2)[2] for line in told if "'ok': True" in line] == [
        f"{name}: {{'ok': True}}" for name in ("prepare", "bytes", "overlap", "dask")
    ]


def test_the_model_of_scale_takes_batches_in_fp16(tmp_path: Path) -> None:
    graph = frontends.load(str(several_gpus.inference_model(tmp_path, several_gpus.Sizes(["cuda:0"], batch=2))), None)
    assert [str(v.type) for v in (*graph.inputs, *graph.outputs)] == ["f16[2,3,224,224]", "f32[2,1000]"]


def test_models_with_many_weights_are_valid_and_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.compile_time import models

    monkeypatch.setattr(models, "SIDE", 64)
    rng = np.random.default_rng(0)
    for made in (models.products(2), models.quantised_products(2), models.encoder(1, hidden=64, heads=2, length=8)):
        onnx.checker.check_model(made)
        graph = frontends.load(made.SerializeToString())
        (x,) = graph.inputs
        (y,) = evaluate(graph, {x.name: rng.standard_normal(x.type.shape).astype(np.float32)}).values()
        assert y.shape == x.type.shape
        assert np.isfinite(y).all()
        assert y.std() > 0.01


def test_starts_are_listed_with_their_longest_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {"the model is read": 0.4, "passes and partitions": 0.3, "plans are built": 2.0, "a": 0.1, "b": 0.01}
    row = {"model": "encoder", "turn": "cold", "weights_bytes": 340e6, "compile_s": 3.0, "first_result_s": 3.5}
    row |= {"imports_s": 0.7, "peak_bytes": 1.5e9, "stages_s": stages, "date": "2026-11-26", "commit": "0" * 40}
    data = {"gpu": "NVIDIA H200", "driver": 13000, "cudnn": 91900, "rows": [row]}
    monkeypatch.setattr(results_page, "read", lambda name: data)
    longest = "plans are built 2.00, the model is read 0.40, passes and partitions 0.30, a 0.10"
    cells = ["encoder", "340", "cold", "3.0", "3.5", longest, "0.7", "1.50", "2026-11-26 0000000000"]
    assert f"| {' | '.join(cells)} |" in results_page.warm_start()


def test_the_slowest_of_the_processes_that_start_together_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.compile_time import warm_start

    asked: list[tuple[str, int]] = []
    seconds = iter([9.0, 2.0, 3.0, 1.0, 20.0, 70.0, 60.0])

    def started(path: Path, tune: str, cache: Path, count: int, save: str = "") -> list[dict[str, Any]]:
        asked.append((cache.name, count))
        return [{"first_result_s": next(seconds)} for _ in range(count)]

    monkeypatch.setattr(warm_start, "_together", started)
    monkeypatch.setattr(warm_start, "_write", lambda model, path: path.write_bytes(b"12"))
    rows = warm_start.measure("m", "quick", 3, 3)
    assert [(row["turn"], row["first_result_s"]) for row in rows] == [("cold", 9), ("warm", 2), ("3 together", 70)]
    assert asked == [*[("cache", 1)] * 4, ("other", 3)], "those that start together have empty caches"


def test_a_saved_program_is_loaded_by_the_next_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.compile_time import warm_start

    asked: list[tuple[str, str]] = []
    seconds = iter([9.0, 2.0, 3.0, 1.0, 0.5, 0.7, 0.6])

    def started(path: Path, tune: str, cache: Path, count: int, save: Path | str = "") -> list[dict[str, Any]]:
        if count:
            asked.append((path.name, Path(save).name))
        return [{"first_result_s": next(seconds)} for _ in range(count)]

    monkeypatch.setattr(warm_start, "_together", started)
    monkeypatch.setattr(warm_start, "_write", lambda model, path: path.write_bytes(b"12"))
    rows = warm_start.measure("m", "quick", 3, saved=True)
    assert [(row["turn"], row["first_result_s"]) for row in rows] == [("cold", 9), ("warm", 2), ("saved file", 0.6)]
    assert asked == [("model.onnx", "model.fusec"), *[("model.onnx", "")] * 3, *[("model.fusec", "")] * 3]


def test_a_file_for_first_results_is_made_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.compile_time import first_result, models

    monkeypatch.setattr(models, "SIDE", 64)
    monkeypatch.setattr(first_result, "model", lambda: (models.products(1).SerializeToString(), "x", None, None))
    monkeypatch.setattr(device, "detect", lambda: None)
    first_result.make(tmp_path, "h200", pack=False)
    artifact = load_artifact(tmp_path / first_result.FILE, "h200", simulate=True)
    assert artifact.compiled.options.precision == "fp16"
    assert any(entries for entries in artifact.plans.values())
