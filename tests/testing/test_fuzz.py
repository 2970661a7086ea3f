"""Test the fuzzer: it finds, shrinks and saves planted faults, continues after crashes, and resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusec.errors import FusecError, TargetError
from fusec.testing import fuzz as module
from fusec.testing.finding_folder import load
from fusec.testing.fuzz import fuzz
from fusec.testing.runner import crash_shrink, supervisor
from fusec.testing.runner.database import State
from fusec.testing.runner.report import FuzzReport

PLANTED = Path(__file__).with_name("planted.py")
Run = Callable[..., FuzzReport]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the fuzzer with one worker on sequences of pointwise ops, in its own folders; options change that."""

    def call(*names: str, **options: Any) -> FuzzReport:
        settled: dict[str, Any] = {
            "workers": 1,
            "database": tmp_path / "database",
            "findings": tmp_path / "findings",
            "shrink_s": 5.0,
        }
        settled |= {"graphs": f"{PLANTED}:sequences", "examples": 60}
        return fuzz([f"{PLANTED}:{name}" for name in names], **{**settled, **options})

    return call


def notes(path: Path) -> set[str]:
    return {line.split()[1] for line in path.read_text().splitlines()}


def test_report_of_a_run_without_findings(run: Run) -> None:
    seen: list[int] = []
    report = run("holds", progress=lambda r: seen.append(r.examples))
    assert report.ok
    assert (report.examples, report.findings, report.doubts, report.interrupted) == (60, [], [], False)
    assert report.properties[f"{PLANTED}:holds"].runs == 60
    assert report.nodes > 60
    assert report.coverage.sections["ops"]["relu"] > 0
    assert seen[-1] == 60
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


@pytest.mark.slow
def test_examples_depend_on_the_seed_and_a_second_run_continues(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def graphs(name: str, **options: Any) -> set[str]:
        monkeypatch.setenv("FUSEC_NOTES", str(tmp_path / name))
        run("noted", graphs="fusec.testing.strategies:graphs", examples=30, **options)
        return notes(tmp_path / name)

    first = graphs("first", seed=7)
    assert len(first) > 25
    assert graphs("again", seed=7, database=tmp_path / "other") == first
    assert graphs("two workers", seed=7, database=tmp_path / "third", workers=2) == first  # of two chunks
    second = graphs("second", seed=7)
    assert len(second - first) > 25, "the database was not asked"
    assert graphs("forgotten", seed=7, fresh=True) == first
    assert graphs("other seed", seed=8) != first


def test_finding_is_shrunk_saved_replayed_and_dropped_when_fixed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEC_FIXED", str(tmp_path / "fixed"))
    report = run("no_relu_and_mul", "holds")
    assert not report.ok
    (found,) = report.findings
    assert found.ops == {"relu": 1, "mul": 1}
    assert found.count == report.properties[f"{PLANTED}:no_relu_and_mul"].failures > 1
    assert report.properties[f"{PLANTED}:holds"].failures == 0
    assert report.examples == 60
    folder = Path(found.folder)
    assert folder.parent == tmp_path / "findings"
    assert not list(folder.parent.glob(".*"))
    saved = load(folder)
    assert len(saved.graph) == 2
    assert len(saved.graph.outputs) == 1
    assert saved.case.precision == "fp32"
    assert saved.origin["seed"] == 0

    again = run("no_relu_and_mul", examples=5)
    assert [f.old for f in again.findings][:1] == [True]
    assert len(again.findings) == 1
    (tmp_path / "fixed").touch()
    fixed = run("no_relu_and_mul", examples=5)
    assert fixed.ok
    assert fixed.fixed == [folder.name]
    assert run("no_relu_and_mul", examples=5).fixed == []


@pytest.mark.slow
def test_two_faults_of_one_property_are_two_findings(run: Run) -> None:
    report = run("two_faults", examples=150)
    assert sorted(map(str, (f.ops for f in report.findings))) == ["{'sub': 1}", "{'tanh': 1}"]


def test_exception_of_a_property_is_a_finding(run: Run) -> None:
    (found,) = run("raises", max_findings=1).findings
    assert found.how == "error"
    assert found.ops == {"relu": 1}
    assert "no such target" in found.message
    assert load(Path(found.folder)).failure.where == "targets/target.py:load"


def test_doubts_are_no_findings(run: Run) -> None:
    report = run("doubtful")
    assert report.ok
    (doubt,) = report.doubts
    assert doubt.doubt
    assert Path(doubt.folder).name.startswith("doubt-")


@pytest.mark.slow
def test_crash_is_a_finding_and_the_run_continues(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CRASHES", 1)
    monkeypatch.setattr(supervisor, "DEATHS", 2)
    report = run("dies", "holds", examples=40, graphs=f"{PLANTED}:short_sequences")
    (found,) = report.findings
    assert found.how == "died"
    assert "SIGSEGV" in found.message
    assert found.ops == {"tanh": 1, "add": 1}
    assert report.examples == 40
    assert "2 times" in report.left_out[f"{PLANTED}:dies"]
    assert report.properties[f"{PLANTED}:holds"].runs > 0
    assert report.properties[f"{PLANTED}:dies"].failures == 2, "a new worker runs what was left out"
    again = run("dies", examples=1, graphs=f"{PLANTED}:short_sequences")
    assert [f.old for f in again.findings] == [True]


@pytest.mark.slow
def test_a_hang_is_a_finding(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_shrink, "SECONDS", 2.0)
    monkeypatch.setattr(supervisor, "DEATHS", 1)
    report = run("hangs", hang_s=1.0, examples=10, max_findings=1)
    (found,) = report.findings
    assert found.how == "hung"
    assert "in hangs" in load(Path(found.folder)).failure.traceback, "where it hangs is not said"


def test_time_and_max_findings_end_a_run(run: Run) -> None:
    start = time.monotonic()
    report = run("slow", examples=None, time=5.0)  # a worker needs seconds to start on a busy machine
    assert 0 < report.examples < 300
    assert time.monotonic() - start < 15
    assert run("two_faults", examples=500, max_findings=1).examples < 500


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"properties": ["nothing"]}, "no property is named 'nothing'"),
        ({"properties": [f"{PLANTED}:nothing"]}, "has no 'nothing'"),
        ({"properties": [f"{PLANTED}:three"]}, "takes a graph, or a graph and a case, not 3"),
        ({"properties": ["none.py:f"]}, "none.py: No such file"),
        ({"examples": 0}, "examples must be more than 0"),
        ({"target": "b17"}, "b17"),
        ({"graphs": "os:system"}, "os:system: calling it for a strategy raised TypeError"),
        ({"graphs": "os:sep"}, "os:sep is no Hypothesis strategy, and no function that returns one"),
        ({"cases": "os:getcwd"}, "os:getcwd is no Hypothesis strategy"),
    ],
)
def test_errors_name_bad_arguments(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"properties": [f"{PLANTED}:holds"], "database": tmp_path}
    with pytest.raises(FusecError, match=words):
        fuzz(**{**given, **options})


def test_device_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.gpu, "detect", lambda: None)
    monkeypatch.setattr(module.gpu, "is_present", lambda target: False)
    with pytest.raises(TargetError, match="needs a GPU of the model h200"):
        fuzz([f"{PLANTED}:holds"], device=True, database=tmp_path)


def test_error_says_how_to_install_hypothesis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FusecError, match=r"pip install 'fusec\[fuzz\]'"):
        fuzz(database=tmp_path)


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """The parent is killed, so it cannot end them itself."""
    log = tmp_path / "notes"
    program = (
        f"from fusec.testing.fuzz import fuzz\n"
        f"fuzz([{str(PLANTED) + ':noted'!r}, {str(PLANTED) + ':slow'!r}], time=60, workers=2,"
        f" database={str(tmp_path / 'db')!r}, findings={str(tmp_path / 'found')!r})"
    )
    with subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "FUSEC_NOTES": str(log)}) as parent:
        wait_for(lambda: log.exists() and len(pids(log)) == 2)
        parent.kill()
    wait_for(lambda: not any(map(is_running, pids(log))))
    state = State(tmp_path / "db")
    key = state._do(lambda db: db.execute("SELECT run FROM chunks").fetchone()[0])
    assert {state.claim(key), state.claim(key)} == {0, 1}, "what was under way is not handed out again"


def test_ctrl_c_prints_a_summary(tmp_path: Path) -> None:
    log = tmp_path / "notes"
    options = ["--time", "60s", "--workers", "1", "--database", str(tmp_path / "db"), "--seed", "3"]
    names = [arg for name in ("noted", "slow") for arg in ("--property", f"{PLANTED}:{name}")]
    # a job in the background starts with interrupts ignored
    start = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from fusec.cli import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", start, "fuzz", *options, *names],
        cwd=tmp_path,
        env={**os.environ, "FUSEC_NOTES": str(log)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 40)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "seed 3" in out
    assert "0 findings, 0 doubts" in out
    assert "interrupted" in err
    wait_for(lambda: not any(map(is_running, pids(log))))


def pids(log: Path) -> set[int]:
    return {int(line.split()[0]) for line in log.read_text().splitlines() if " " in line}


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)
