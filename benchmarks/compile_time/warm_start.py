"""Measure cold and warm starts of models with many weights: from the call of fusec.compile to the first result.

Usage: python -m benchmarks.compile_time.warm_start [MODEL...], on a machine with a GPU; without one, in simulation. A
model is one of benchmarks/compile_time/models.py, or NAME:BATCH of benchmarks/common/model_zoo.py, which needs torch.
The first process starts with empty caches, and the others (--turns) with those that it filled. Precision is fp16.
Writes benchmarks/results/warm_start.json: the first process, and the median of the others by their time.
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


def child(path: str, tune: str, started: float) -> dict[str, Any]:
    """Compile a model and call it once. started: the time at which this process was started."""
    import numpy as np

    import fusec
    import fusec.driver

    if device.detect() is not None:
        import fusec.gpu.backend  # imports CuPy and cuDNN
    imports_s, begin = time.time() - started, time.perf_counter()
    net = fusec.compile(path, precision="fp16", tune=tune)
    assert isinstance(net, fusec.driver.Executable)
    compile_s = time.perf_counter() - begin
    rng = np.random.default_rng(0)
    got = net.run(None, {each.name: rng.standard_normal(each.shape).astype(each.dtype) for each in net.inputs})
    assert all(np.isfinite(array).all() for array in got), "a result is not finite"
    first_result_s = time.perf_counter() - begin
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


def measure(model: str, tune: str, turns: int) -> list[dict[str, Any]]:
    """Return the rows of a model: cold and warm."""
    with tempfile.TemporaryDirectory() as folder:
        path, cache = Path(folder) / "model.onnx", Path(folder) / "cache"
        _write(model, path)
        environment = {**os.environ, "FUSEC_CACHE": str(cache), **compiler_caches(cache)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the modules of an installed package are compiled
        found = [_started(path, tune, environment) for _ in range(1 + turns)]
        weights = path.stat().st_size
    warm = sorted(found[1:], key=lambda row: row["first_result_s"])
    rows = {"cold": found[0], "warm": warm[(len(warm) - 1) // 2]}
    return [{"model": model, "turn": turn, "tune": tune, "weights_bytes": weights, **row} for turn, row in rows.items()]


def _write(model: str, path: Path) -> None:
    if ":" not in model:
        from benchmarks.compile_time import models

        models.write(model, path)
        return
    from benchmarks.common import model_zoo  # needs torch

    name, _, batch = model.partition(":")
    path.write_bytes(model_zoo.exported(*model_zoo.make(name, int(batch))))


def _started(path: Path, tune: str, environment: dict[str, str]) -> dict[str, Any]:
    command = ["-m", "benchmarks.compile_time.warm_start", "--child", str(path), tune, str(time.time())]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2], sys.argv[3], float(sys.argv[4]))))
        return 0
    options = parser(__doc__, "warm_start.json")
    options.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {', '.join(MODELS)}")
    options.add_argument("--tune", default="quick", choices=("none", "quick", "full"))
    options.add_argument("--turns", type=int, default=3, help="warm starts of each model")
    given = options.parse_args()
    machine = gpu() if device.detect() is not None else {"gpu": "none"}
    for model in given.models or MODELS:
        for row in measure(model, given.tune, given.turns):
            row["cores"] = os.cpu_count()
            print(row, flush=True)
            write_row(given.output, machine, given.commit, row, KEYS["warm_start.json"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
