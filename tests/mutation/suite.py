"""Plant each mutant in a copy of the package and let the fuzzer look for it, with its default budget."""

from __future__ import annotations

import json
import os
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

PACKAGE = Path(__file__).parents[2] / "fusec"
BUDGET = 2000  # examples: the default of `fusec fuzz`


def planted(mutant: Mutant, folder: Path) -> Path:
    """A copy of the package in `folder` with the fault in it; ValueError if it does not fit any more."""
    copy = folder / "fusec"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} holds the text to replace {text.count(mutant.old)} times")
    file.write_text(text.replace(mutant.old, mutant.new))
    return copy


def hunt(mutant: Mutant, examples: int = BUDGET, seed: int = 0) -> dict[str, Any]:
    """Fuzz the planted package until the first finding: what was found, by what, after how many graphs."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        planted(mutant, folder)
        command = [sys.executable, "-W", "ignore", "-m", "fusec", "fuzz", "--examples", str(examples)]
        command += ["--seed", str(seed), "--max-findings", "1", "--workers", "1", "--fresh", "--json"]
        command += ["--database", str(folder / "database"), "--findings", str(folder / "findings")]
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    row = {"name": mutant.name, "area": mutant.area, "why": mutant.why, "seconds": time.perf_counter() - start}
    if done.returncode not in (0, 1):
        return {**row, "caught": False, "error": done.stderr.strip()[-400:]}
    report = json.loads(done.stdout)
    found = next(iter(report["findings"]), None)
    row |= {"examples": report["examples"], "caught": found is not None}
    if found is not None:
        row |= {"property": found["property"], "ops": sum(found["ops"].values()), "message": found["message"][:200]}
    return row


def hunt_all(
    mutants: Sequence[Mutant] = MUTANTS,
    workers: int = 2,
    examples: int = BUDGET,
    tell: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """A row for each mutant, in their order; `tell` hears of each when it is known."""
    rows: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(hunt, mutant, examples) for mutant in mutants]
        for future in as_completed(futures):
            row = future.result()
            rows[row["name"]] = row
            tell(row)
    return [rows[m.name] for m in mutants]
