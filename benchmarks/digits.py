"""How long the toy framework trains on handwritten digits, and how well: `python -m benchmarks.digits [cnn vit]`.

--target auto: on the GPU at hand. Each model is trained, exported to ONNX and reloaded in a process of its own; seconds
count its imports and compilation, on a GPU with empty caches of plans and kernels; then once more with what the first
run left there. Writes benchmarks/results/digits.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

from benchmarks.machine import KEYS, RESULTS, ROOT, gpu, keep
from examples.toy_framework.train_digits import RECIPES

CHILD = """
import json, sys
from examples.toy_framework.train_digits import train
found, again = train(sys.argv[1], target=sys.argv[2])
print(json.dumps({"accuracy": found, "reloaded": again}))
"""


def trained(model: str, target: str) -> dict[str, float]:
    """Accuracy, and seconds: of the steps, as the last epoch says, of all, and of all once more on a GPU."""
    command = [sys.executable, "-c", CHILD, model, target]
    spans: list[float] = []
    with tempfile.TemporaryDirectory() as kept:
        caches = {"FUSEC_CACHE": f"{kept}/plans", "CUPY_CACHE_DIR": f"{kept}/kernels"}
        for _ in range(1 if target == "cpu" else 2):
            start = time.perf_counter()
            done = subprocess.run(
                command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **caches}
            )
            spans.append(round(time.perf_counter() - start, 1))
    *said, found = done.stdout.splitlines()
    row = {**json.loads(found), "steps_s": float(said[-1].split()[-2]), "seconds": spans[0]}
    return {**row, "again_s": spans[1]} if len(spans) > 1 else row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(RECIPES))
    parser.add_argument("--target", default="cpu", choices=("cpu", "auto"))
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    where = (
        {"where": f"NumPy, {os.cpu_count()} cores"} if arguments.target == "cpu" else {"where": gpu()["gpu"], **gpu()}
    )
    good = True
    for model in arguments.models:
        _, epochs, _, goal = RECIPES[model]
        row = {"model": model, **where, "epochs": epochs, "goal": goal, **trained(model, arguments.target)}
        keep(RESULTS / "digits.json", {}, arguments.commit, row, KEYS["digits.json"])
        good = good and min(row["accuracy"], row["reloaded"]) >= goal
        print(row, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
