"""Test commands without cuDNN: fusec's rules or the CPU answer and say so, and the rest is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cli.command import SHAPE, fusec
from helpers import assert_close, one_program
from lowering.lowers_judge import LowersJudge

import fusec as library
from fusec import frontends, lockfile
from fusec.artifacts import fusec_file
from fusec.errors import CudnnNotAskedWarning, TargetError
from fusec.execution import compilation
from fusec.gpu import device
from fusec.gpu.cudnn.legality import oracle
from fusec.gpu.cudnn.without_driver import deviceless
from fusec.gpu.cudnn.worker_processes import worker_process
from fusec.passes.base import Options
from fusec.passes.partition import partition
from fusec.reference import evaluate
from fusec.targets.target import load
from fusec.text import parse

LABEL = "cuDNN was not asked"
WAYS = (deviceless.INSTALL, "--target cpu")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hide the packages, forbid workers, and give an empty cache folder, which is returned."""
    for name in ("cudnn", "cupy", "cupyx", "nvidia"):
        monkeypatch.setitem(sys.modules, name, None)  # which find_spec and import take for missing
    monkeypatch.setattr(deviceless, "library_folders", deviceless.library_folders.__wrapped__)  # without what it found
    monkeypatch.setattr(deviceless, "cudnn_version", lambda: "")  # another test may have loaded the library

    def asked(*args: Any) -> None:
        raise AssertionError("cuDNN was asked")

    monkeypatch.setattr(worker_process.WorkerProcess, "__init__", asked)
    monkeypatch.setattr(oracle.Oracle, "__init__", asked)
    cache = tmp_path / "cache"
    monkeypatch.setenv("FUSEC_CACHE", str(cache))
    return cache


def ran(*args: object) -> str:
    """Return what a command prints that succeeds and writes nothing on stderr."""
    result = fusec(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize("command", ["run", "compile", "explain", "verify", "bench", "convert", "report"])
@pytest.mark.parametrize("target", ["auto", "cpu"])
def test_a_command_works_and_says_that_cudnn_was_not_asked(
    model: Path, tmp_path: Path, bare: Path, command: str, target: str
) -> None:
    written = {"convert": ("-o", tmp_path / "net.onnx"), "report": ("-o", tmp_path / "page.html")}
    more = {"bench": ("--runs", 1), **written}.get(command, ())
    args = (command, model, *SHAPE, "--target", target, *more)
    text = ran(*args)
    assert (LABEL in text) is (target == "auto"), "who names the CPU knows"
    assert all(way in text.replace("\n  ", " ") for way in WAYS) is (target == "auto")
    told = json.loads(ran(*args, "--json"))
    told = told["targets"][0] if command == "explain" else told
    assert told["cudnn_asked"] is False
    assert not (bare / "answers.sqlite").exists(), "an answer of the rules is none of cuDNN's"


def test_results_are_those_of_the_reference(model: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((1, 8, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    ran("run", model, *SHAPE, "--input", f"x={tmp_path / 'x.npy'}", "-o", tmp_path / "y.npz")
    want = evaluate(frontends.load(model, {"x": (1, 8, 8, 8)}), {"x": x})
    assert_close(np.load(tmp_path / "y.npz")["y"], want["y"], 1e-5)


def test_verify_checks_the_lowered_graphs(model: Path) -> None:
    assert {c["level"] for c in json.loads(ran("verify", model, *SHAPE, "--json"))["checks"]} == {
        "passes",
        "body",
        "lowered",
    }


def test_no_step_claims_a_plan(model: Path, tmp_path: Path) -> None:
    (told,) = json.loads(ran("explain", model, *SHAPE, "--json"))["targets"]
    assert [(s["engine"], s["plans"]) for s in told["steps"] if s["kind"] == "cudnn"] == [("proposed", 0)] * 2
    assert [told["totals"][key] for key in ("cudnn", "precompiled", "runtime")] == [2, 0, 0]
    assert "2 steps proposed to cuDNN" in ran("compile", model, *SHAPE)
    assert "steps proposed to cuDNN" in ran("explain", model, *SHAPE, "--target", "t4,h200")
    ran("convert", model, *SHAPE, "-o", tmp_path / "net.onnx")
    net = onnx.load(tmp_path / "net.onnx")
    assert LABEL in {p.key: p.value for p in net.metadata_props}["fusec.note"]
    notes = [{p.key: p.value for p in node.metadata_props} for node in net.graph.node]
    assert {note["fusec.plans"] for note in notes if "fusec.plans" in note} == {"none: cuDNN was not asked"}


@pytest.mark.parametrize(
    "args",
    [
        ("compile", "-o", "net.fusec"),
        ("compile", "-o", "net.fusec", "--target", "t4", "--target", "h200"),
        ("explain", "--must-fuse", "conv*+relu"),
        ("lock", "-o", "net.lock"),
        ("repro", "--partition", 0, "-o", "folder"),
    ],
)
def test_what_would_claim_an_answer_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = fusec(args[0], model, *SHAPE, *args[1:])
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("fusec: error:") and LABEL in line and deviceless.INSTALL in line
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []


def test_a_lock_is_neither_followed_nor_compared(model: Path, tmp_path: Path) -> None:
    lock = tmp_path / "fusec.lock"
    lockfile.write(lock, lockfile.Lock({}, ()))
    for args in (("run", model, "--locked", lock), ("compile", model, "--locked", lock), ("lock", "diff", lock, model)):
        result = fusec(*args, *SHAPE)
        assert (result.exit_code, result.stdout) == (2, "") and LABEL in result.stderr


def test_from_python_there_is_a_warning_and_nothing_is_claimed(model: Path, tmp_path: Path) -> None:
    with pytest.warns(CudnnNotAskedWarning, match=LABEL):
        exe = one_program(library.compile(model, shapes={"x": (1, 8, 8, 8)}))
    assert exe.device == "simulated" and LABEL in str(exe.explain())
    for claim in (lambda: exe.assert_fused("conv*+relu"), lambda: exe.save(tmp_path / "net.fusec"), exe.lock):
        with pytest.raises(TargetError, match=LABEL):
            claim()


def test_rounding_as_the_source_asks_the_rules_too(model: Path) -> None:
    args = ("compile", model, *SHAPE, "--precision", "fp16", "--rounding", "source")
    assert LABEL in ran(*args) and json.loads(ran(*args, "--json"))["cudnn_asked"] is False


def test_a_dynamic_model_asks_the_rules_for_each_size(model: Path) -> None:
    net = library.compile_dynamic(model)
    with pytest.warns(CudnnNotAskedWarning, match=LABEL):
        net.at({"x": (1, 8, 8, 8)})
    x = np.random.default_rng(0).standard_normal((2, 8, 8, 8)).astype(np.float32)
    assert_close(net(x), evaluate(frontends.load(model, {"x": x.shape}), {"x": x})["y"], 1e-5)
    assert not one_program(net.at({"x": x.shape})).compiled.asked


def test_a_gpu_that_cannot_be_used_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_present", lambda target: target.name == "h200")
    monkeypatch.setattr(device, "device_name", lambda: "NVIDIA H200")
    result = fusec("run", model, *SHAPE)
    assert result.exit_code == 2 and all(words in result.stderr for words in ("NVIDIA H200", *WAYS))
    assert LABEL in ran("run", model, *SHAPE, "--target", "t4"), "which is simulated, here and elsewhere"
    ran("run", model, *SHAPE, "--target", "cpu")


def test_a_file_made_where_cudnn_was_asked_runs_and_is_explained(tmp_path: Path) -> None:
    graph, judge, target = (
        parse('graph "g" (%x: f32[4,8]) {\n %y = exp(%x)\n return %y\n}'),
        LowersJudge(),
        load("h200"),
    )
    made = compilation.Compiled(graph, partition(graph, judge, target), target, Options(), judge)
    fusec_file.save(tmp_path / "net.fusec", [made])
    assert LABEL not in ran("run", tmp_path / "net.fusec")
    (told,) = json.loads(ran("explain", tmp_path / "net.fusec", "--json"))["targets"]
    assert (told["cudnn_asked"], told["steps"][0]["engine"]) == (True, "precompiled")


@pytest.mark.parametrize("piece", ["frontend", "library"])
def test_half_of_cudnn_is_an_error_that_names_the_missing_piece(monkeypatch: pytest.MonkeyPatch, piece: str) -> None:
    assert deviceless.is_absent()
    if piece == "frontend":
        monkeypatch.setitem(sys.modules, "cudnn", json)  # any module
    else:
        monkeypatch.setattr(deviceless, "cudnn_version", lambda: "9.19.0")
    assert not deviceless.is_absent()
    with pytest.raises(TargetError, match=r"^libnvrtc-builtins\.so does not load") as caught:
        deviceless.load_nvrtc()
    assert all(way in str(caught.value) for way in WAYS)
