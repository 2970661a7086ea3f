"""Measure where the tests' time goes: `python benchmarks/suite_times.py [STAGE...] [-- PYTEST ARGUMENTS]`.

Stages are targets of the Makefile. `check` is run under this file as a plugin of pytest, which writes each test's CPU
seconds, those of its child processes included: a busy machine changes them less than it changes wall time. The cache
and the folder for temporary files are new, as on a fresh machine. benchmarks/results/suite_times.json has the sums by
file; `pytest tests/test_benchmarks.py --accept` writes the tables of docs/tests.md from it.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.machine import date_and_commit  # noqa: E402 - found through the line above

RESULTS = ROOT / "benchmarks" / "results" / "suite_times.json"
STAGES = {  # by name: what the Makefile runs
    "lint": "ruff, pyright, import-linter",
    "check": "pytest -n 2",
    "fuzz": "fusec fuzz",
    "examples": "the scripts of examples/",
    "demo": "examples/demo.py",
}
SLOWEST = 25  # tests that are listed
TICK = os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """CPU seconds of this process, of the children it waited for, and of those that live, with their children."""
    total, folders = sum(os.times()[:4]), [Path(f"/proc/{os.getpid()}")]
    while folders:
        folder = folders.pop()
        try:
            tasks = [(task / "children").read_text().split() for task in (folder / "task").iterdir()]
            for pid in (pid for task in tasks for pid in task):
                folders.append(Path(f"/proc/{pid}"))
                fields = (folders[-1] / "stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / TICK
        except OSError:  # it ended meanwhile, and its parent has its times
            continue
    return total


class Meter:
    """CPU seconds since the last reading, which takes a millisecond: one reading a test is enough."""

    def __init__(self) -> None:
        self.last = cpu_s()

    def read(self) -> float:
        """Return the seconds since the last reading; none if a child's are lost, because nobody waited for it."""
        before, self.last = self.last, cpu_s()
        return max(0.0, self.last - before)


METER = Meter()


def pytest_collection_finish() -> None:
    METER.read()  # what collecting took belongs to no test


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Add a line for the test to the file of this process in the folder FUSEC_SUITE_TIMES."""
    wall = time.perf_counter()
    result = yield
    row = {"test": item.nodeid, "cpu_s": METER.read(), "wall_s": time.perf_counter() - wall}
    with (Path(os.environ["FUSEC_SUITE_TIMES"]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    return result


def measured(stage: str, folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a stage and return its wall and CPU seconds. Raises RuntimeError if it fails."""
    installed = [f"{sys.prefix}/.{stamp}" for stamp in ("demo", "test")]  # what make shall not install anew
    command = ["make", f"VENV={sys.prefix}", *(f"--old-file={stamp}" for stamp in installed), stage]
    if stage == "check":
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.suite_times", "-n", "2", *arguments]
    scratch = {"FUSEC_CACHE": folder / "cache", "TMPDIR": folder, "FUSEC_SUITE_TIMES": folder}
    own = {**scratch, "FUSEC_REQUIRE_CUDNN": "1", "PYTHONPATH": ROOT}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {k: str(v) for k, v in own.items()}, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: times of a run that fails say little")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": round(cpu, 1), "wall_s": round(time.perf_counter() - start, 1)}


def by_file(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum the times of each file's tests, the most CPU time first."""
    files: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        files[row["test"].partition("::")[0]].append(row)
    sums = [
        {"file": name, "tests": len(of), **{key: round(sum(r[key] for r in of), 1) for key in ("cpu_s", "wall_s")}}
        for name, of in files.items()
    ]
    return sorted(sums, key=lambda row: -row["cpu_s"])


def tables(results: dict[str, Any]) -> str:
    """Format the results as Markdown."""
    files, named = results["files"], results["machine"]
    listed = [row for row in files if row["cpu_s"] >= 2]
    rest = [row for row in files if row["cpu_s"] < 2]
    cpu = sum(row["cpu_s"] for row in files)
    lines = [
        f"{named['cores']} cores, {named['cpu']}, Python {named['python']}; {results['date']}, "
        f"{results['commit'][:7]}.",
        "",
        "| stage | runs | CPU s | wall s |",
        "|---|---|---:|---:|",
        *(f"| `{s}` | {STAGES[s]} | {t['cpu_s']:.0f} | {t['wall_s']:.0f} |" for s, t in results["stages"].items()),
        "",
        f"{sum(row['tests'] for row in files)} tests take {cpu:.0f} CPU seconds; the {len(listed)} files that take two "
        f"or more, {sum(row['cpu_s'] for row in listed):.0f}, the other {len(rest)} the rest.",
        "",
        "| file below tests/ | tests | CPU s | wall s |",
        "|---|---:|---:|---:|",
    ]
    for row in listed:
        name = row["file"].removeprefix("tests/")
        lines.append(f"| {name} | {row['tests']} | {row['cpu_s']:.1f} | {row['wall_s']:.1f} |")
    lines += ["", f"The {len(results['slowest'])} slowest tests:", "", "| test | CPU s |", "|---|---:|"]
    lines += [f"| `{row['test'].removeprefix('tests/')}` | {row['cpu_s']:.1f} |" for row in results["slowest"]]
    return "\n".join(lines)


def processor() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def main(arguments: Sequence[str]) -> None:
    """Measure stages, all if none is named, and write the results."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    stages, passed = arguments[:place] or list(STAGES), arguments[place + 1 :]
    held = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"stages": {}}
    for stage in stages:
        with tempfile.TemporaryDirectory() as scratch:
            held["stages"][stage] = measured(stage, Path(scratch), passed)
            if stage == "check":
                lines = [line for path in Path(scratch).glob("*.jsonl") for line in path.read_text().splitlines()]
                rows = sorted(map(json.loads, lines), key=lambda row: -row["cpu_s"])
                held["files"] = by_file(rows)
                held["slowest"] = [{"test": r["test"], "cpu_s": round(r["cpu_s"], 1)} for r in rows[:SLOWEST]]
    held["stages"] = {stage: held["stages"][stage] for stage in STAGES if stage in held["stages"]}
    held["machine"] = {"cores": os.cpu_count(), "cpu": processor(), "python": platform.python_version()}
    RESULTS.write_text(json.dumps({**date_and_commit(), **held}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
