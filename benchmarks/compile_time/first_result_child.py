"""Load or compile the model of `first_result.py` in a process of its own, and print a line of JSON.

Arguments: the `.fusec` or ONNX file, the .npz file with input and expected output, `tune`, the lock file to use or an
empty string, the lock file to write or an empty string, and the time at which the process was started.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import cupy  # noqa: F401  # imported here, so that it counts as an import
import numpy as np

import fusec
import fusec.driver
import fusec.gpu.backend
from fusec.gpu.autotune.plans import plan_bench
from fusec.lockfile import toml_text


def count_plans() -> dict[str, int]:
    """Count the plans that are built from now on, and those that are revived from serialized plans."""
    revive, build = plan_bench.revive, plan_bench.GpuPlanBench.build
    counts = {"revived": 0, "built": 0}

    def revived(blob: Any, handle: Any) -> Any:
        counts["revived"] += 1
        return revive(blob, handle)

    def built(self: Any, graph: Any, offer: Any) -> Any:
        counts["built"] += 1
        return build(self, graph, offer)

    plan_bench.revive, plan_bench.GpuPlanBench.build = revived, built
    return counts


def main(arguments: Sequence[str]) -> None:
    path, answers, tune, lock, write, started = arguments
    arrays = np.load(answers)
    name = arrays["name"].item()
    counts = count_plans()
    imports_s = time.time() - float(started)
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if path.endswith(".fusec"):
            net = fusec.load(path, tune=tune)
        else:
            net = fusec.compile(path, precision="fp16", tune=tune, lock=lock or None)
        load_s = time.perf_counter() - begin
        (got,) = net.run(None, {name: arrays["x"]})
    first_result_s = time.perf_counter() - begin
    for _ in range(3):
        net.run(None, {name: arrays["x"]})
    if write:
        toml_text.write(write, net.lock())
    want = arrays["y"].astype(np.float64)
    whole, _ = net.time_us(15)
    row = {
        "imports_s": imports_s,
        "load_s": load_s,
        "first_result_s": first_result_s,
        "error": float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)),
        **counts,
        "run_us": sorted(whole)[7],
        "device": net.device,
        "warnings": [str(w.message) for w in caught if issubclass(w.category, UserWarning)],
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1:])
