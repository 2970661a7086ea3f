"""The nine light models on a machine without a GPU: what fused, how exact, how long. Writes a JSON result.

Usage: python benchmarks/light_models.py [--target h200] [MODEL ...]
Each model runs with the shipped weights against the shipped outputs, and with seeded random weights
against onnxruntime (fp32, relative L2).
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

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import numpy as np  # noqa: E402  # the examples folder must be on the path first
import onnx  # noqa: E402
import onnxruntime  # noqa: E402
from machine import made  # noqa: E402
from models import (  # noqa: E402
    LIGHT,
    light,
    random_inputs,
    randomised,
    reference_inputs,
    reference_outputs,
)

import fusec  # noqa: E402
from fusec.diagnostics.verify import verify  # noqa: E402
from fusec.schedule.program import Kind  # noqa: E402


def relative_l2(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want.astype(np.float64)))


def worst(executable: fusec.Executable, inputs: dict[str, np.ndarray], wanted: list[np.ndarray]) -> tuple[float, float]:
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
    """Measure in a process of its own, so that peak memory is the model's."""
    command = [sys.executable, __file__, "--target", target, "--child", name]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def import_seconds() -> float:
    """The median of five times `import fusec` in a fresh process."""
    code = "import time; t = time.perf_counter(); import fusec; print(time.perf_counter() - t)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout)
        for _ in range(5)
    ]
    return round(sorted(runs)[2], 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(LIGHT))
    parser.add_argument("--target", default="h200")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "light_models.json")
    arguments = parser.parse_args()
    if arguments.child:
        row = measure(arguments.models[0], arguments.target)
        row["peak_memory_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
        print(json.dumps(row))
        return 0

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:  # the first compile of each model is cold
        for name in arguments.models:
            os.environ["FUSEC_CACHE"] = str(Path(cache) / name)
            rows.append(in_child(name, arguments.target))
            print(json.dumps(rows[-1], indent=None), flush=True)
    result = {
        **made(),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "gpu": None},
        "target": arguments.target,
        "cudnn": _cudnn_version(),
        "import_s": import_seconds(),
        "models": rows,
    }
    partial = arguments.output.with_suffix(".tmp")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(arguments.output)
    return 0


def _cudnn_version() -> int:
    import cudnn  # only this script's record needs it

    return int(cudnn.backend_version())


if __name__ == "__main__":
    sys.exit(main())
