"""Measure the nine light models without a GPU: what fuses, the errors, and the time to compile.

Usage: python -m benchmarks.checks.light_models [--target h200] [MODEL ...]
With the shipped weights, the outputs are compared with the shipped ones. With seeded random weights, they are compared
with onnxruntime's (fp32, relative L2). Writes benchmarks/results/light_models.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import fusec
from benchmarks.common.result_files import ROOT, date_and_commit, parser, write
from examples.models import LIGHT, light, random_inputs, randomised, reference_inputs, reference_outputs
from fusec.diagnostics.verify import relative_l2, verify
from fusec.schedule.program import Kind


def worst(executable: fusec.Executable, inputs: dict[str, np.ndarray], wanted: list[np.ndarray]) -> tuple[float, float]:
    """Run the model; return the error of its worst output, and the seconds."""
    start = time.perf_counter()
    outputs = executable.run(None, inputs)
    seconds = time.perf_counter() - start
    return max(relative_l2(g, w) for g, w in zip(outputs, wanted, strict=True)), seconds


def measure(name: str, target: str) -> dict[str, Any]:
    start = time.perf_counter()
    shipped = fusec.compile(light(name), target=target)
    compile_s = time.perf_counter() - start
    reference_error, _ = worst(shipped, reference_inputs(name), list(reference_outputs(name).values()))

    model = randomised(onnx.load(light(name)), seed=1)
    inputs = random_inputs(model, seed=2)
    data = model.SerializeToString()
    start = time.perf_counter()
    executable = fusec.compile(data, target=target)
    warm_s = time.perf_counter() - start
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    random_error, run_s = worst(executable, inputs, session.run(None, inputs))
    report = verify(executable.compiled, seed=3)

    steps = executable.compiled.program.steps
    convolutions = [s for s in steps if any(n.op.name in ("conv", "conv_transpose") for n in s.nodes)]
    cudnn = [s for s in convolutions if s.kind is Kind.CUDNN]
    return {
        "model": name,
        "launches": executable.compiled.program.launches,
        "cudnn_partitions": sum(s.kind is Kind.CUDNN for s in steps),
        "convolution_partitions": len(cudnn),
        "with_precompiled_plans": sum(bool(s.verdict and s.verdict.precompiled) for s in cudnn),
        "without_precompiled_plans": sorted({s.signature for s in cudnn if s.verdict and not s.verdict.precompiled}),
        "residual_adds_inside": sum(
            any(n.op.name == "add" and all(v.literal is None for v in n.operands) for n in s.nodes) for s in cudnn
        ),
        "batch_norms_left": sum(n.op.name == "batch_norm" for n in executable.compiled.graph.nodes),
        "kernels": dict(sorted(Counter(s.signature for s in steps if s.kind is Kind.KERNEL).items())),
        "virtual_bytes": sum(s.virtual_bytes for s in steps if s.kind is Kind.CUDNN),
        "compile_s": round(compile_s, 2),
        "compile_warm_s": round(warm_s, 2),
        "simulated_run_s": round(run_s, 2),
        "error_shipped": reference_error,
        "error_random_weights": random_error,
        "verified": report.ok,
    }


def in_child(name: str, target: str) -> dict[str, Any]:
    """Measure in a process of its own, because peak memory is that of a process."""
    command = [sys.executable, "-m", "benchmarks.checks.light_models", "--target", target, "--child", name]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def import_seconds() -> float:
    """Return the median time of `import fusec` in five fresh processes."""
    code = "import time; t = time.perf_counter(); import fusec; print(time.perf_counter() - t)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout)
        for _ in range(5)
    ]
    return round(sorted(runs)[2], 3)


def main() -> None:
    options = parser(__doc__, "light_models.json")
    options.add_argument("models", nargs="*", default=list(LIGHT))
    options.add_argument("--target", default="h200")
    options.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.child:
        row = measure(given.models[0], given.target)
        row["peak_memory_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
        print(json.dumps(row))
        return
    import cudnn

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:  # empty, so that the first compilation of each model is cold
        for name in given.models:
            os.environ["FUSEC_CACHE"] = str(Path(cache) / name)
            rows.append(in_child(name, given.target))
            print(json.dumps(rows[-1]), flush=True)
    result = {
        **date_and_commit(given.commit),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "gpu": None},
        "target": given.target,
        "cudnn": int(cudnn.backend_version()),
        "import_s": import_seconds(),
        "models": rows,
    }
    write(given.output, result)


if __name__ == "__main__":
    main()
