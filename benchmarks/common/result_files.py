"""Record measurements: the options of the scripts, and result files with machine, date and commit.

`python -m benchmarks.common.result_files FILE...` adds rows that were measured on another machine to the result files.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusec.system.atomic_write import written

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

# The keys that identify a row, for result files whose cases are measured one by one.
KEYS = {
    "calls.json": ("model", "batch"),
    "channel_sums.json": ("batch",),
    "compile_time.json": ("case",),
    "choices.json": ("choice", "model", "batch", "precision"),
    "deformable.json": ("case", "precision"),
    "decoders.json": ("layers", "batch", "bits"),
    "detectors.json": ("model", "batch"),
    "digits.json": ("model", "where"),
    "first_result.json": ("from", "trusted", "tune", "turn"),
    "genstats.json": ("batch",),
    "kernel_times.json": ("case",),
    "leave_one_out.json": ("model", "batch", "form"),
    "model_sample.json": ("model", "precision"),
    "model_sample_gpu.json": ("model", "precision"),
    "onnx_suite.json": ("device",),
    "packed_products.json": ("case",),
    "peers.json": ("model", "batch"),
    "penalties.json": ("penalty",),
    "quantized_models.json": ("model", "batch", "format"),
    "recurrent.json": ("case",),
    "quantization.json": ("model", "format", "tool", "where"),
    "scans.json": ("case",),
    "serving.json": ("model", "batch", "rows", "shared_memory"),
    "scale.json": ("case", "model", "batch", "devices"),
    "shapes.json": ("model", "tune", "kernels", "cache", "size"),
    "training.json": ("model", "batch"),
    "warm_start.json": ("model", "turn", "tune"),
}


def parser(description: str | None, output: str, budget: bool = False) -> argparse.ArgumentParser:
    """Make a parser with the options that all scripts with a result file share.

    output: name of the result file.
    budget: the script times plans, and takes a limit for that.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def result_file(text: str) -> Path:
        """Refuse another name, because the name says what identifies a row."""
        if (path := Path(text)).name != output:
            raise argparse.ArgumentTypeError(f"the file must be called {output}")
        return path

    made.add_argument("--output", type=result_file, default=RESULTS / output, help="result file, in any folder")
    made.add_argument("--commit", default="", help="the measured commit; git is asked if it is not given")
    if budget:
        made.add_argument("--budget", type=float, default=float("inf"), help="seconds to time plans, per compilation")
    return made


def compiler_caches(cache: Path) -> dict[str, str]:
    """Return the environment in which CuPy and the driver cache what they compile in a folder, empty at first.

    Plans of cuDNN that hold PTX take several times as long to build where the driver's cache lacks them.
    """
    return {"CUPY_CACHE_DIR": str(cache / "cupy"), "CUDA_CACHE_PATH": str(cache / "driver")}


def date_and_commit(commit: str = "") -> dict[str, str]:
    """Return today's date and the commit.

    commit: on a machine without the git history; git is asked if it is empty.
    """
    if not commit:
        git = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(git, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return {"date": dt.datetime.now(dt.UTC).date().isoformat(), "commit": commit}


def gpu() -> dict[str, Any]:
    """Name this machine's GPU, and the versions of its driver and of cuDNN."""
    import cudnn
    import cupy

    return {
        "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cudnn": cudnn.backend_version(),
    }


def gpu_and_torch() -> dict[str, Any]:
    """Name the GPU and the libraries where torch is measured, too."""
    import torch

    return {**gpu(), "torch": torch.__version__}


def write(path: Path, data: Any) -> None:
    """Write a result file. A run that is killed leaves the file as it was before."""
    with written(path.resolve(), durable=False) as file:
        file.write((json.dumps(data, indent=1) + "\n").encode())


def write_row(path: Path, machine: Mapping[str, Any], commit: str, row: Mapping[str, Any], key: Sequence[str]) -> None:
    """Add a row to a result file, with date and commit. It replaces the row of the same case.

    All rows of a file are of one machine: rows of another GPU or of other libraries are dropped.
    machine: the GPU and the libraries, which the file names once.
    row: one that was brought from another machine has its date and commit already.
    key: the names whose values identify a case.
    """
    before = json.loads(path.read_text()) if path.exists() else {}
    rows = before.pop("rows", [])
    if any(before.get(name) != value for name, value in machine.items()):
        before, rows = {}, []

    def case(one: Mapping[str, Any]) -> list[Any]:
        return [one.get(name) for name in key]

    new = {**date_and_commit(commit), **row} if "commit" in row else {**row, **date_and_commit(commit)}
    cases = [case(one) for one in rows]
    if case(row) in cases:
        rows[cases.index(case(row))] = new
    else:
        rows.append(new)
    write(path, {**before, **machine, "rows": rows})


def earlier_row(path: Path, row: Mapping[str, Any], key: Sequence[str]) -> dict[str, Any]:
    """Return the row of a result file that has the same case; empty if there is none."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return next((old for old in rows if all(old.get(name) == row.get(name) for name in key)), {})


def merge(file: Path, results: Path = RESULTS) -> None:
    """Add rows measured on another machine to the result file of the same name; they keep their commits.

    A row of benchmarks/kernels/leave_one_out.py that is a part has some families; the others keep their figures. A
    decoder's prompt does so where its token alone was timed. A model that was timed without its peers keeps the row
    of the run with them, which names the new time, too.
    """
    data = json.loads(file.read_text())
    of_all = {name: data.pop(name) for name in ("date", "commit") if name in data}  # of rows of one run
    key, path = KEYS[file.name], results / file.name
    for row in data.pop("rows"):
        found = earlier_row(path, row, key)
        new = {**of_all, **row, **(_elsewhere(found, row) if found and "times" in row else {})}
        commit = new["commit"]
        if found and row.get("part"):
            new["without"] = found["without"] | row["without"]
        if "prompt_times" in found and "prompt_times" not in row:  # of a decoder whose token alone was timed
            prompt = {name: value for name, value in found.items() if name.startswith("prompt_")}
            new = {"prompt_commit": found["commit"], **prompt, **new}
        if file.name == "peers.json" and found and [*row["times"]] == ["fusec"] != [*found["times"]]:
            new = {**found, "again": {**row["times"]["fusec"], "commit": commit}}
        write_row(path, data, commit, new, key)


def _elsewhere(before: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return times and commits of the row before, for contenders that a row of benchmarks/models/peers.py lacks."""
    found = {who: {**time, "commit": before["commit"]} for who, time in before["times"].items()}
    lacking = {who: time for who, time in (before.get("elsewhere", {}) | found).items() if who not in row["times"]}
    return {"elsewhere": lacking} if lacking else {}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        merge(Path(name))
