"""Measure where the tests' time goes: `python benchmarks/checks/suite_times.py [STAGE...] [-- PYTEST ARGUMENTS]`.

Stages are targets of the Makefile. `check` runs with this file as a plugin of pytest, which writes the seconds of each
test. The cache and the folder for temporary files are new, as on a fresh machine; nothing else should run meanwhile.
benchmarks/results/suite_times.json has the sums by file; `pytest tests/test_docs.py --accept` writes the tables of
docs/tests.md from it.
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

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common.result_files import date_and_commit  # noqa: E402 - found through the line above

RESULTS = ROOT / "benchmarks" / "results" / "suite_times.json"
STAGES = {  # by name: what the Makefile runs
    "lint": "ruff, pyright, import-linter",
    "check": "pytest -n 2",
    "fuzz": "fusec fuzz",
    "examples": "the scripts of examples/",
    "demo": "examples/demo.py",
}
LISTED_S = 2  # of a file that the table lists


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Add a line for the test to the file of this process in the folder FUSEC_SUITE_TIMES."""
    start = time.perf_counter()
    result = yield
    row = {"test": item.nodeid, "seconds": time.perf_counter() - start}
    with (Path(os.environ["FUSEC_SUITE_TIMES"]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    return result


def measured(stage: str, folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a stage and return its wall and CPU seconds. Raises RuntimeError if it fails."""
    installed = [f"{sys.prefix}/.{stamp}" for stamp in ("demo", "test")]  # what make shall not install anew
    command = ["make", f"VENV={sys.prefix}", *(f"--old-file={stamp}" for stamp in installed), stage]
    if stage == "check":
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.checks.suite_times", "-n", "2", *arguments]
    scratch = {"FUSEC_CACHE": folder / "cache", "TMPDIR": folder, "FUSEC_SUITE_TIMES": folder}
    make = {"FUSEC_REQUIRE_CUDNN": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}  # as make sets them
    own = {**scratch, **make, "PYTHONPATH": ROOT}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {k: str(v) for k, v in own.items()}, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: times of a run that fails say little")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": round(cpu, 1), "wall_s": round(time.perf_counter() - start, 1)}


def by_file(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum the times of each file's tests, the slowest file first."""
    files: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        files[row["test"].partition("::")[0]].append(row["seconds"])
    sums = [{"file": name, "tests": len(of), "seconds": round(sum(of), 1)} for name, of in files.items()]
    return sorted(sums, key=lambda row: -row["seconds"])


def tables(results: dict[str, Any]) -> str:
    """Format the results as Markdown."""
    files, named = results["files"], results["machine"]
    listed = [row for row in files if row["seconds"] >= LISTED_S]
    total, most = (sum(row["seconds"] for row in some) for some in (files, listed))
    lines = [
        f"{named['cores']} cores, {named['cpu']}, Python {named['python']}; {results['date']}, "
        f"{results['commit'][:7]}.",
        "",
        "| stage | runs | CPU s | wall s |",
        "|---|---|---:|---:|",
        *(f"| `{s}` | {STAGES[s]} | {t['cpu_s']:.0f} | {t['wall_s']:.0f} |" for s, t in results["stages"].items()),
        "",
        f"{sum(row['tests'] for row in files)} tests take {total:.0f} seconds of the two processes; the {len(listed)} "
        f"files that take {LISTED_S} or more, {most:.0f}; the other {len(files) - len(listed)} the rest.",
        "",
        "| file below tests/ | tests | s |",
        "|---|---:|---:|",
    ]
    lines += [f"| {row['file'].removeprefix('tests/')} | {row['tests']} | {row['seconds']:.1f} |" for row in listed]
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
                held["files"] = by_file([json.loads(line) for line in lines])
    held["stages"] = {stage: held["stages"][stage] for stage in STAGES if stage in held["stages"]}
    held["machine"] = {"cores": os.cpu_count(), "cpu": processor(), "python": platform.python_version()}
    RESULTS.write_text(json.dumps({**held, **date_and_commit()}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
