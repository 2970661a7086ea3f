"""Plant each mutant in a copy of the package and let the fuzzer look for it, with its default budget, or some tests."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from mutation.mutants import MUTANTS, Mutant
from mutation.tested import TESTED

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fusec"
ALL = (*MUTANTS, *TESTED)
NEEDED = ("tests", "examples", "benchmarks", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")  # what tests read
CACHE = "failed"  # pytest writes there which tests failed
BUDGET = 2000  # examples: the default of `fusec fuzz`

# As `fusec fuzz` with --max-findings 1 --workers 1.
HUNT = """
import json, sys
import fusec
from fusec.testing.fuzz import fuzz

folder, examples, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if not fusec.__file__.startswith(folder + "/"):
    sys.exit(f"{fusec.__file__} is not the copy in {folder}")
report = fuzz(
    examples=examples, seed=seed, workers=1, max_findings=1,
    fresh=True, database=folder + "/database", findings=f"{folder}/findings-{seed}",
)
print(json.dumps(report.to_json()))
"""


_COMPILED = shutil.ignore_patterns("__pycache__")


def copied(package: Path, folder: Path, others: Sequence[str] = ()) -> Path:
    """A copy of the package in `folder`, and of other files next to it."""
    for name in others:
        source = package.parent / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=_COMPILED)
        else:
            shutil.copy(source, folder / name)
    return shutil.copytree(package, folder / "fusec", ignore=_COMPILED)


def planted(mutant: Mutant, folder: Path, package: Path = PACKAGE, others: Sequence[str] = ()) -> Path:
    """A copy of the package in `folder` with the fault in it; ValueError if it does not fit any more."""
    copy = copied(package, folder, others)
    file = copy / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} holds the text to replace {text.count(mutant.old)} times")
    file.write_text(text.replace(mutant.old, mutant.new))
    return copy


def digest(mutant: Mutant) -> str:
    """Return a digest by which a result names its fault."""
    return hashlib.sha256(repr((mutant.file, mutant.old, mutant.new)).encode()).hexdigest()[:12]


def hunt(mutant: Mutant | None, examples: int = BUDGET, seed: int = 0, package: Path = PACKAGE) -> dict[str, Any]:
    """Fuzz the planted package until the first finding: what was found, by what, after how many graphs.

    A finding that the package fails without the fault, too, does not count: the hunt goes on with another seed
    for what is left of the budget. Without a mutant: what is found in the package as it is.
    """
    if mutant is not None and mutant.tests:
        return _tested(mutant, package)
    start, row = time.perf_counter(), _row(mutant)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        if mutant is None:
            copied(package, folder)
        else:
            planted(mutant, folder, package)
        while row["examples"] < examples:
            done = _python(folder, "-c", HUNT, str(folder), str(examples - row["examples"]), str(seed))
            if done.returncode:
                row["error"] = done.stderr.strip()[-400:]
                break
            report = json.loads(done.stdout)
            row["examples"] += report["examples"]
            found = next(iter(report["findings"]), None)
            if found is None:
                break
            of = {"property": found["property"], "ops": sum(found["ops"].values()), "message": found["message"][:200]}
            if mutant is not None and not _fails(Path(found["folder"]), package):
                row |= {"caught": True, **of}
                break
            row["not_of_it"].append(of)
            seed += 1
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def _row(mutant: Mutant | None) -> dict[str, Any]:
    row = {"name": "none", "area": "", "why": "nothing is planted"}
    if mutant is not None:
        row = {"name": mutant.name, "area": mutant.area, "why": mutant.why, "digest": digest(mutant)}
    return {**row, "caught": False, "examples": 0, "not_of_it": []}


def _tested(mutant: Mutant, package: Path) -> dict[str, Any]:
    """Run a mutant's tests until the first that fails and, without the fault, passes."""
    start, row = time.perf_counter(), _row(mutant)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        file = planted(mutant, folder, package, NEEDED) / mutant.file
        planted_text, held = file.read_text(), folder / CACHE / "v" / "cache" / "lastfailed"
        while True:
            known = [f"--deselect={of['property']}" for of in row["not_of_it"]]
            done = _pytest(folder, *known, *(f"tests/{name}" for name in mutant.tests))
            row["examples"] = sum(map(int, re.findall(r"(\d+) (?:passed|failed)", done.stdout)))
            failed = next(iter(json.loads(held.read_text())), "") if held.exists() else ""
            if done.returncode not in (0, 1) or bool(done.returncode) != bool(failed):
                row["error"] = (done.stderr or done.stdout).strip()[-400:]
            if done.returncode != 1 or not failed:
                break
            of = {"property": failed, "ops": 0, "message": _reason(done.stdout)}
            shutil.copy(package / mutant.file, file)
            if _pytest(folder, failed).returncode == 0:
                row |= {"caught": True, **of}
                break
            row["not_of_it"].append(of)
            file.write_text(planted_text)
            held.unlink(missing_ok=True)
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def _pytest(folder: Path, *what: str) -> subprocess.CompletedProcess[str]:
    options = ("-x", "-q", "-n", "0", "--tb", "line", "-o", f"cache_dir={folder / CACHE}")
    return _python(folder, "-m", "pytest", *options, *what)


def _reason(output: str) -> str:
    """Return pytest's line about a failure, without the folder it ran in."""
    line = next((line for line in output.splitlines() if re.match(r"(E  |/.*:\d+: )", line)), "")
    return re.sub(r"^(E +|/.*:\d+: )", "", line).strip()[:200]


def _fails(finding: Path, package: Path) -> bool:
    """Tell if a finding is one of the package without the fault."""
    done = _python(package.parent, "-m", "fusec", "fuzz", "replay", str(finding), "--json")
    return bool(json.loads(done.stdout)["failing"])


def _python(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where `fusec` is the package in `place`."""
    path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=place)


def hunt_all(
    mutants: Sequence[Mutant | None] = ALL,
    workers: int = 2,
    examples: int = BUDGET,
    tell: Callable[[dict[str, Any]], None] = lambda row: None,
) -> None:
    """Hunt each, all in the package as it is now; `tell` hears of each when it is known."""
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(workers) as pool:
        package = copied(PACKAGE, Path(scratch).resolve(), NEEDED)  # edits during the run do not count
        futures = [pool.submit(hunt, mutant, examples, 0, package) for mutant in mutants]
        for future in as_completed(futures):
            tell(future.result())
