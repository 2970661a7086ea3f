"""Test what each command prints and writes, and its exit status when all is well or a check does not hold."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.command import SHAPE, fusec
from helpers import assert_close, one_program

import fusec as library
from fusec.cli.common import colour
from fusec.compiler import compile_model
from fusec.diagnostics import verify as verifying
from fusec.diagnostics.text_table import bytes_text
from fusec.plans.plan_filter import PlanFilter

pytestmark = pytest.mark.cudnn


def test_compile_prints_a_summary_and_writes_it(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    result = fusec("compile", model, *SHAPE, "--target", "a100", "--precision", "fp16", "-o", path)
    assert result.exit_code == 0
    assert "a100 in fp16" in result.stdout
    assert "input  x: float32 [1, 8, 8, 8]" in result.stdout
    summary = json.loads(path.read_text())
    assert summary["inputs"] == [{"name": "x", "dtype": "float32", "shape": [1, 8, 8, 8]}]
    assert summary["totals"]["cudnn"] >= 2
    assert summary["totals"]["kernels"] >= 1
    assert not list(tmp_path.glob(".*")), "the temporary file stayed"


def test_compile_json_says_the_same(model: Path) -> None:
    result = fusec("compile", model, *SHAPE, "--json", "--disable", "fold_batchnorm")
    summary = json.loads(result.stdout)
    assert (summary["target"], summary["disabled"]) == ("h200", ["fold_batchnorm"])


def test_deterministic_is_the_same_for_all_commands(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.onnx"
    compiled = fusec("compile", model, *SHAPE, "--json", "--deterministic", "--disable", "cse")
    assert json.loads(compiled.stdout)["disabled"] == ["cse", "unordered_sums"]
    for command in (("run",), ("bench", "--runs", 1), ("verify",), ("explain",), ("convert", "-o", out)):
        asked: list[bool] = []
        with pytest.MonkeyPatch.context() as patch:
            build = compile_model.build_program

            def seen(*args: Any, _build: Any = build, _asked: list[bool] = asked, **options: Any) -> Any:
                made = _build(*args, **options)
                _asked.append(made.options.deterministic)
                return made

            patch.setattr(compile_model, "build_program", seen)
            assert fusec(*command, model, *SHAPE, "--deterministic").exit_code == 0
        assert asked == [True], command


def test_the_filter_of_plans_is_the_same_for_all_commands(model: Path, tmp_path: Path) -> None:
    lock, file = tmp_path / "fusec.lock", tmp_path / "tiny.fusec"
    options = ("--heuristics", "b,A", "--engines", "-0,-11", "--workspace-limit", "64M")
    wanted = PlanFilter(("B", "A"), (), (0, 11), 64 << 20)
    others = (("run",), ("bench", "--runs", 1), ("explain",), ("lock", "-o", lock))
    for command in (("compile",), ("compile", "-o", file), *others):
        asked: list[PlanFilter] = []
        with pytest.MonkeyPatch.context() as patch:
            build = compile_model.build_program

            def seen(*args: Any, _build: Any = build, _asked: list[PlanFilter] = asked, **options: Any) -> Any:
                made = _build(*args, **options)
                _asked.append(made.options.plan_filter)
                return made

            patch.setattr(compile_model, "build_program", seen)
            result = fusec(*command, model, *SHAPE, *options)
            assert result.exit_code == 0, result.stderr
        assert asked == [wanted], command
    assert fusec("run", file).exit_code == 0
    for late in (options[:2], options[2:4], options[4:]):
        result = fusec("run", file, *late)
        assert (result.exit_code, f"is compiled already: {late[0]} comes too late" in result.stderr) == (2, True)
    for wrong, words in (
        (("--workspace-limit", "64 MB"), "64 MB: a size is a number of bytes, or as in 512K, 64M or 1G"),
        (("--engines", "0,-1"), "engines names some to insist on and some to leave out"),
        (("--heuristics", "C"), "heuristics is one or several of A, B, fallback, not 'C'"),
    ):
        result = fusec("compile", model, *SHAPE, *wrong)
        assert (result.exit_code, words in result.stderr) == (2, True), result.stderr


def test_channels_last_is_the_same_for_all_commands(model: Path, tmp_path: Path) -> None:
    lock, file = tmp_path / "fusec.lock", tmp_path / "tiny.fusec"
    commands = (
        *(("compile",), ("compile", "-o", file), ("run",), ("bench", "--runs", 1), ("verify",), ("explain",)),
        *(("lock", "-o", lock), ("lock", "diff", lock), ("repro", "--partition", 0, "-o", tmp_path / "repro")),
        ("convert", "-o", tmp_path / "net.onnx"),
    )
    for command in commands:
        asked: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            build = compile_model.build_program

            def seen(*args: Any, _build: Any = build, _asked: list[Any] = asked, **options: Any) -> Any:
                made = _build(*args, **options)
                _asked.append([v.type.order for v in (*made.graph.inputs, *made.graph.outputs)])
                return made

            patch.setattr(compile_model, "build_program", seen)
            result = fusec(*command, model, *SHAPE, "--channels-last")
            assert result.exit_code == 0, result.stderr
        assert asked == [[(0, 2, 3, 1)] * 2], command
    assert fusec("run", file).exit_code == 0
    late = fusec("run", file, "--channels-last")
    assert (late.exit_code, "is compiled already: --channels-last comes too late" in late.stderr) == (2, True)


def test_compile_says_what_lies_channels_last(model: Path) -> None:
    command = ("compile", model, *SHAPE, "--channels-last")
    assert "input  x: float32 [1, 8, 8, 8], channels last\n" in fusec(*command).stdout
    summary = json.loads(fusec(*command, "--json").stdout)
    assert [spec["order"] for spec in (*summary["inputs"], *summary["outputs"])] == [[0, 2, 3, 1]] * 2


def test_rounding_as_in_the_model_keeps_nothing_wide(model: Path) -> None:
    edges: dict[str, list[str]] = {}
    for rounding in ("fused", "source"):
        result = fusec("explain", model, *SHAPE, "--precision", "fp16", "--rounding", rounding, "--json")
        assert result.exit_code == 0
        (target,) = json.loads(result.stdout)["targets"]
        edges[rounding] = [edge["kept"] for step in target["steps"] for edge in step["edges"]]
    assert "fp32" in edges["fused"]
    assert "fp32" not in edges["source"]
    wrong = fusec("compile", model, *SHAPE, "--rounding", "none")
    assert (wrong.exit_code, "rounding is one of fused, source, fastest, not 'none'" in wrong.stderr) == (2, True)


def test_compile_keeps_the_mode_of_the_file_and_the_link_to_it(model: Path, tmp_path: Path) -> None:
    path, link = tmp_path / "s.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    assert fusec("compile", model, *SHAPE, "-o", link).exit_code == 0
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert json.loads(path.read_text())["target"] == "h200"


def test_run_on_given_input_writes_what_the_library_computes(
    model: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((1, 8, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    path = tmp_path / "y.npz"
    result = fusec("run", model, *SHAPE, "--input", f"x={tmp_path / 'x.npy'}", "--output", path)
    assert result.exit_code == 0
    want = library.compile(model, target="h200", shapes={"x": (1, 8, 8, 8)})(x)
    with np.load(path, allow_pickle=False) as archive:
        assert archive.files == ["y"]
        assert_close(archive["y"], want, 0.0)
    assert f"y: float32 [1, 16, 8, 8] mean {want.astype(np.float64).mean():.6g}" in result.stdout
    assert "ran in simulation in" in result.stdout


def test_run_seeds_its_random_inputs(model: Path) -> None:
    first, again, other = (json.loads(fusec("run", model, *SHAPE, "--json", "--seed", s).stdout) for s in (3, 3, 4))
    assert first["outputs"] == again["outputs"]
    assert first["outputs"] != other["outputs"]
    assert first["device"] == "simulated"


def test_run_compares_with_onnxruntime(model: Path) -> None:
    result = fusec("run", model, *SHAPE, "--compare", "onnxruntime", "--json")
    (row,) = json.loads(result.stdout)["outputs"]
    assert result.exit_code == 0
    assert row["error"] < 1e-5


def test_run_fails_beyond_the_tolerance(model: Path) -> None:
    result = fusec("run", model, *SHAPE, "--compare", "onnxruntime", "--precision", "bf16", "--tolerance", "1e-6")
    assert result.exit_code == 1
    assert "y: float32" in result.stdout
    assert "differs from onnxruntime by more than 1e-06: y " in result.stderr


def test_run_fails_on_nan(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.full((1, 8, 8, 8), np.nan, np.float32))
    result = fusec("run", model, *SHAPE, "--input", f"x={tmp_path / 'x.npy'}", "--compare", "onnxruntime", "--json")
    assert result.exit_code == 1
    (row,) = json.loads(result.stdout)["outputs"]
    assert (row["mean"], row["error"]) == (None, None), "JSON has no NaN"


def test_explain_shows_steps_and_reasons(model: Path) -> None:
    result = fusec("explain", model, *SHAPE, "--target", "h200")
    assert result.exit_code == 0
    assert "conv+bias+relu" in result.stdout
    assert "cuDNN has no pointwise mode for it" in result.stdout


def test_explain_several_targets(model: Path) -> None:
    args = ("explain", model, *SHAPE, "--target", "t4,h200,t4")
    table = fusec(*args).stdout
    assert table.splitlines()[0].split() == ["t4", "h200"]
    assert table.count("cuDNN has no pointwise mode for it") == 2
    data = json.loads(fusec(*args, "--json").stdout)
    assert [t["target"] for t in data["targets"]] == ["t4", "h200"]
    assert data["targets"][0]["steps"][0]["ops"] == "conv+bias+relu"


def test_must_fuse_holds(model: Path) -> None:
    result = fusec("explain", model, *SHAPE, "--target", "t4,h200", "--must-fuse", "conv*+relu", "--no-cores", "--json")
    assert result.exit_code == 0
    checks = json.loads(result.stdout)["must_fuse"]
    assert [(c["target"], c["pattern"], c["ok"]) for c in checks] == [
        ("t4", "conv*+relu", True),
        ("h200", "conv*+relu", True),
    ]


def test_must_fuse_names_target_pattern_and_miss(model: Path) -> None:
    args = ("--must-fuse", "conv*+relu", "--must-fuse", "relu+sign")
    result = fusec("explain", model, *SHAPE, "--target", "t4,h200", *args)
    assert result.exit_code == 1
    assert "t4: 1 of 1 places that match 'relu+sign'" in result.stderr
    assert "h200: 1 of 1 places that match 'relu+sign'" in result.stderr
    assert "(act, sign) runs as" in result.stderr
    assert "conv*+relu" not in result.stderr
    assert "run the same way on all" in result.stdout, "the table is printed all the same"


def test_no_cores_asks_for_none(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusec.diagnostics import explain as explaining

    seen: list[bool] = []
    real = explaining.explain

    def spy(program: object, target: object, judge: object, cores: bool, report: object) -> object:
        seen.append(cores)
        return real(program, target, judge, cores, report)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(explaining, "explain", spy)
    assert fusec("explain", model, *SHAPE, "--no-cores").exit_code == 0
    assert fusec("explain", model, *SHAPE).exit_code == 0
    assert seen == [False, True]


def test_verify(model: Path) -> None:
    result = fusec("verify", model, *SHAPE, "--seed", "5", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["ok"], report["target"]) == (0, True, "h200")
    assert {c["level"] for c in report["checks"]} == {"passes", "body", "lowered"}


def test_verify_fails_where_the_report_does(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = verifying.Report((verifying.Check("lowered", "0 conv", float("nan"), 1e-6),))
    monkeypatch.setattr(verifying, "verify", lambda *args, **named: bad)
    result = fusec("verify", model, *SHAPE)
    assert result.exit_code == 1
    assert "BAD lowered" in result.stdout
    assert "1 of 1 checks failed" in result.stderr


def test_doctor_is_content_with_a_whole_machine() -> None:
    result = fusec("doctor", "--json")
    data = json.loads(result.stdout)
    assert (result.exit_code, data["ok"]) == (0, True)
    assert {"cudnn", "nvrtc", "cudnn answers"} <= {c["name"] for c in data["checks"]}


def test_bench_times_the_whole_and_each_step(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = fusec("bench", model, *SHAPE, "--runs", 3, "--profile", "--trace", trace)
    assert result.exit_code == 0
    assert "simulated by NumPy, so no time of a GPU was measured" in result.stdout
    assert "conv+bias+relu" in result.stdout and "limit us" in result.stdout
    assert "compile time by stage" in result.stdout
    first, *events = json.loads(trace.read_text())["traceEvents"]
    assert first["args"]["name"].startswith("simulated by NumPy")
    assert {"sign", "add"} <= {event["name"] for event in events}
    measured = json.loads(fusec("bench", model, *SHAPE, "--runs", 3, "--json").stdout)
    assert measured["whole"]["runs"] == measured["call"]["runs"] == 3
    assert measured["simulated"] and measured["more"] is None and measured["excess"] is None
    assert {"passes and partitions", "the rest"} <= measured["compile"].keys()
    assert 0 < sum(measured["compile"].values()) <= measured["compile_s"] + 0.01
    assert measured["compile_s"] > 0 and measured["memory_bytes"] >= measured["live_bytes"] > 0


@pytest.mark.parametrize("command", ["run", "bench"])
def test_bad_tuning_options_are_named(model: Path, command: str) -> None:
    result = fusec(command, model, *SHAPE, "--tune", "max")
    assert result.exit_code == 2 and "tune is one of none, quick, full, not 'max'" in result.stderr
    result = fusec(command, model, *SHAPE, "--budget", "soon")
    assert result.exit_code == 2 and "--budget soon: a time is written" in result.stderr


def test_explain_writes_a_file_and_prints_the_totals(model: Path, tmp_path: Path) -> None:
    text, data = tmp_path / "e.txt", tmp_path / "e.json"
    printed = fusec("explain", model, *SHAPE, "--no-cores", "--all").stdout
    written = fusec("explain", model, *SHAPE, "--no-cores", "--all", "-o", text)
    assert text.read_text() == printed
    assert written.stdout.splitlines()[0].startswith("h200: ")
    assert written.stdout.splitlines()[1:] == [f"wrote {text}, {bytes_text(text.stat().st_size)}"]
    as_json = fusec("explain", model, *SHAPE, "--no-cores", "--json", "-o", data)
    assert data.read_text() == as_json.stdout, "stdout has one document alone"
    assert as_json.stderr == ""
    refused = fusec("explain", model, *SHAPE, "-o", tmp_path / "none" / "e.txt")
    assert (refused.exit_code, "there is no folder" in refused.stderr) == (2, True)


def test_a_summary_has_no_steps_and_no_reasons(model: Path) -> None:
    summary = fusec("explain", model, *SHAPE, "--summary").stdout
    assert "4 steps (4 launches)" in summary and "steps  runs as" in summary
    assert "cuDNN has no pointwise mode for it" not in summary
    several = fusec("explain", model, *SHAPE, "--summary", "--target", "t4,h200").stdout
    assert several.splitlines()[0].split() == ["t4", "h200"] and "pointwise mode" not in several


def test_colours_are_for_terminals_that_want_them(model: Path) -> None:
    plain = fusec("explain", model, *SHAPE, "--no-cores").stdout
    assert "\x1b" not in plain, "a pipe has none"
    for name, value, wanted in (("NO_COLOR", "1", False), ("NO_COLOR", "", True), ("TERM", "dumb", False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TERM", "xterm")
            patch.delenv("NO_COLOR", raising=False)
            patch.setenv(name, value)
            patch.setattr("sys.stdout", _Terminal())
            assert colour.wanted() is wanted, (name, value)
    painted = colour.coloured(plain)
    assert "\x1b[32mprecompiled fused\x1b[0m" in painted and "\x1b[33mkernel\x1b[0m" in painted
    assert "\x1b[1mNot in a cuDNN step:\x1b[0m" in painted
    assert re.sub(r"\x1b\[\d+m", "", painted) == plain, "nothing but colours is added"


class _Terminal:
    """A stdout that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert colour.width() == colour.WIDTH
    monkeypatch.setattr("sys.stdout", _Terminal())
    monkeypatch.setenv("COLUMNS", "91")
    assert colour.width() == 91
    monkeypatch.setenv("COLUMNS", "20")
    assert colour.width() == 60


def test_bench_marks_each_step_for_profilers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = pytest.importorskip("cupy.cuda.nvtx")
    ranges: list[str] = []
    monkeypatch.setattr(nvtx, "RangePush", ranges.append)
    monkeypatch.setattr(nvtx, "RangePop", lambda: ranges.append(")"))
    assert fusec("bench", model, *SHAPE, "--runs", 1).exit_code == 0
    assert ranges == [], "only if asked for"
    assert fusec("bench", model, *SHAPE, "--runs", 1, "--nvtx").exit_code == 0
    steps = ["0 cudnn conv+bias+relu", "1 kernel sign", "2 cudnn add", "3 kernel relayout"]
    assert ranges == ["fusec", *(each for step in steps for each in (step, ")")), ")"]


def test_steps_run_one_by_one_and_change_nothing(model: Path, rng: np.random.Generator) -> None:
    executable = one_program(library.compile(model, target="h200", shapes={"x": (1, 8, 8, 8)}, simulate=True))
    with pytest.raises(library.ExecutionError, match="before the first call"):
        executable.run_steps(lambda index: contextlib.nullcontext())
    x = rng.standard_normal((1, 8, 8, 8)).astype(np.float32)
    want, seen = executable(x), list[int]()
    executable.run_steps(lambda index: contextlib.nullcontext(seen.append(index)))
    assert seen == list(range(len(executable.compiled.program.steps)))
    assert_close(executable(x), want, 0.0)
