"""Measure cold and warm starts of models with many weights: from the call of fusec.compile to the first result.

Usage: python -m benchmarks.compile_time.warm_start [MODEL...], on a machine with a GPU; without one, in simulation. A
model is one of benchmarks/compile_time/models.py, or NAME:BATCH of benchmarks/common/model_zoo.py, which needs torch.
The first process starts with empty caches, and the others (--turns) with those that it filled. `--together 8` also
starts eight processes at the same time, which share empty caches. `--saved` also saves the program of the first process
as a file, which other processes load with its caches. Precision is fp16. Writes benchmarks/results/warm_start.json: the
first process, the median by time of the others and of those that load the file, and the slowest of those that start
together.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.result_files import KEYS, ROOT, compiler_caches, gpu, parser, write_row
from fusec.gpu import device

MODELS = ("resnet50", "encoder", "vgg19")
SAVED = ".fusec"


def child(path: str, tune: str, started: float, save: str = "") -> dict[str, Any]:
    """Compile a model, or load a saved one, and call it once.

    started: the time at which this process was started
    save: where the program is saved afterwards; empty: nowhere
    """
    import numpy as np

    import fusec
    import fusec.driver

    if device.detect() is not None:
        import fusec.gpu.backend  # imports CuPy and cuDNN
    imports_s, begin = time.time() - started, time.perf_counter()
    net = fusec.load(path) if path.endswith(SAVED) else fusec.compile(path, precision="fp16", tune=tune)
    assert isinstance(net, fusec.driver.Executable)
    compile_s = time.perf_counter() - begin
    rng = np.random.default_rng(0)
    got = net.run(None, {each.name: rng.standard_normal(each.shape).astype(each.dtype) for each in net.inputs})
    assert all(np.isfinite(array).all() for array in got), "a result is not finite"
    first_result_s = time.perf_counter() - begin
    if save:
        net.save(save)
    stages = {} if net.spent is None else {name: each.seconds for name, each in net.spent.stages.items()}
    return {
        "imports_s": round(imports_s, 2),
        "compile_s": round(compile_s, 2),
        "first_result_s": round(first_result_s, 2),
        "stages_s": {name: round(seconds, 3) for name, seconds in stages.items() if seconds >= 0.005},
        "launches": net.compiled.program.launches,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device": net.device,
    }


def measure(model: str, tune: str, turns: int, together: int = 0, saved: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a model: cold, warm, and if asked for, of processes that start together or load a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        _write(model, path)
        weights = path.stat().st_size
        file, cache = path.with_suffix(SAVED), Path(folder) / "cache"
        found = _together(path, tune, cache, 1, file if saved else "")
        found += [_together(path, tune, cache, 1)[0] for _ in range(turns)]
        loaded = [_together(file, tune, cache, 1)[0] for _ in range(turns if saved else 0)]
        others = _together(path, tune, Path(folder) / "other", together)
    rows = {"cold": found[0], "warm": _median(found[1:])}
    if loaded:
        rows["saved file"] = _median(loaded)
    if others:
        rows[f"{together} together"] = max(others, key=_first_result_s)
    return [{"model": model, "turn": turn, "tune": tune, "weights_bytes": weights, **row} for turn, row in rows.items()]


def _write(model: str, path: Path) -> None:
    if ":" not in model:
        from benchmarks.compile_time import models

        models.write(model, path)
        return
    from benchmarks.common import model_zoo  # needs torch

    name, _, batch = model.partition(":")
    path.write_bytes(model_zoo.exported(*model_zoo.make(name, int(batch))))


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return sorted(rows, key=_first_result_s)[(len(rows) - 1) // 2]


def _first_result_s(row: dict[str, Any]) -> float:
    return row["first_result_s"]


def _together(path: Path, tune: str, cache: Path, count: int, save: Path | str = "") -> list[dict[str, Any]]:
    """Start processes at the same time, and return what each measured. save: see `child`."""
    environment = {**os.environ, "FUSEC_CACHE": str(cache), **compiler_caches(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the modules of an installed package are compiled
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compile_time.warm_start", "--child", str(path), tune]
    processes: list[subprocess.Popen[str]] = []
    for _ in range(count):
        started = [*command, str(time.time()), str(save)]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(started, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True))
    texts = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, texts, strict=True):
        if process.returncode:
            raise SystemExit(errors)
    return [json.loads(output.splitlines()[-1]) for output, _ in texts]


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5])))
        return 0
    options = parser(__doc__, "warm_start.json")
    options.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {', '.join(MODELS)}")
    options.add_argument("--tune", default="quick", choices=("none", "quick", "full"))
    options.add_argument("--turns", type=int, default=3, help="warm starts of each model")
    options.add_argument("--together", type=int, default=0, help="processes that start at the same time")
    options.add_argument("--saved", action="store_true", help="also load a saved program")
    given = options.parse_args()
    machine = gpu() if device.detect() is not None else {"gpu": "none"}
    for model in given.models or MODELS:
        for row in measure(model, given.tune, given.turns, given.together, given.saved):
            row["cores"] = len(os.sched_getaffinity(0))
            print(row, flush=True)
            write_row(given.output, machine, given.commit, row, KEYS["warm_start.json"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
