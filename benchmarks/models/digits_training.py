"""Measure how long the toy framework trains on handwritten digits, and how accurate its models are.

Usage: python -m benchmarks.models.digits_training [--target cpu|auto] [cnn vit]
`auto` is this machine's GPU. A process of its own trains each model, exports it to ONNX and reloads it. The seconds
include imports and compilation. On a GPU the first run has empty caches of plans and kernels, and a second run uses
what the first one cached. Writes benchmarks/results/digits.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

from benchmarks.common.result_files import KEYS, ROOT, gpu_and_torch, parser, write_row
from examples.toy_framework.train_digits import RECIPES

CHILD = """
import json, sys
from examples.toy_framework.train_digits import train
found, again = train(sys.argv[1], target=sys.argv[2])
print(json.dumps({"accuracy": found, "reloaded": again}))
"""


def trained(model: str, target: str) -> dict[str, float]:
    """Train a model; return its accuracy, and the seconds of the steps, of the whole run, and of a second run."""
    command = [sys.executable, "-c", CHILD, model, target]
    spans: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        caches = {"FUSEC_CACHE": f"{folder}/plans", "CUPY_CACHE_DIR": f"{folder}/kernels"}
        for _ in range(1 if target == "cpu" else 2):
            start = time.perf_counter()
            done = subprocess.run(
                command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **caches}
            )
            spans.append(round(time.perf_counter() - start, 1))
    *epochs, accuracy = done.stdout.splitlines()
    row = {**json.loads(accuracy), "steps_s": float(epochs[-1].split()[-2]), "seconds": spans[0]}
    return {**row, "again_s": spans[1]} if len(spans) > 1 else row


def main() -> int:
    options = parser(__doc__, "digits.json")
    options.add_argument("models", nargs="*", default=list(RECIPES))
    options.add_argument("--target", default="cpu", choices=("cpu", "auto"))
    given = options.parse_args()
    if given.target == "cpu":
        where = {"where": f"NumPy, {os.cpu_count()} cores"}
    else:
        machine = gpu_and_torch()
        where = {"where": machine["gpu"], **machine}
    good = True
    for model in given.models:
        _, epochs, _, goal = RECIPES[model]
        row = {"model": model, **where, "epochs": epochs, "goal": goal, **trained(model, given.target)}
        write_row(given.output, {}, given.commit, row, KEYS["digits.json"])
        good = good and min(row["accuracy"], row["reloaded"]) >= goal
        print(row, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
