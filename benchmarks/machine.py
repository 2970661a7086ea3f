"""What a result file says of where and of what it was measured."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def made(commit: str = "") -> dict[str, str]:
    """Today, and the commit; it is asked of git where it is not given, as on a machine without the history."""
    if not commit:
        git = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(git, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return {"date": dt.datetime.now(dt.UTC).date().isoformat(), "commit": commit}


def device() -> dict[str, Any]:
    """The GPU at hand and the libraries that drive it."""
    import cudnn
    import cupy

    return {
        "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cudnn": cudnn.backend_version(),
    }


def gpu() -> dict[str, Any]:
    """The same, and torch, which others are measured with."""
    import torch

    return {**device(), "torch": torch.__version__}


# What tells the rows of a result file apart, where cases can be measured one by one.
KEYS = {
    "calls.json": ("model", "batch"),
    "choices.json": ("choice", "model", "batch", "precision"),
    "digits.json": ("model", "where"),
    "first_result.json": ("from", "trusted", "tune", "turn"),
    "leave_one_out.json": ("model", "batch"),
    "onnx_suite.json": ("device",),
    "penalties.json": ("penalty",),
}


def keep(path: Path, machine: Mapping[str, Any], commit: str, row: Mapping[str, Any], key: Sequence[str]) -> None:
    """Put a row into a result file, in the place of one that says the same of the same case, with its day and commit.
    A file is about one machine: rows of another GPU or other libraries are dropped."""
    before = json.loads(path.read_text()) if path.exists() else {}
    rows = before.pop("rows", []) if {k: v for k, v in before.items() if k != "rows"} == dict(machine) else []

    def case(one: Mapping[str, Any]) -> list[Any]:
        return [one.get(name) for name in key]

    new = {**made(commit), **row} if "commit" in row else {**row, **made(commit)}
    places = [case(one) for one in rows]
    if case(row) in places:
        rows[places.index(case(row))] = new
    else:
        rows.append(new)
    path.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")


def bring(file: Path, results: Path = RESULTS) -> None:
    """Put rows measured on another machine, under their own commits, into the result file of that name."""
    data = json.loads(file.read_text())
    for row in data.pop("rows"):
        keep(results / file.name, data, row["commit"], row, KEYS[file.name])


if __name__ == "__main__":  # python -m benchmarks.machine FILE...: what was brought back
    for name in sys.argv[1:]:
        bring(Path(name))
