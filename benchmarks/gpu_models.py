"""Models on a GPU: outputs against torch or onnxruntime, every distinct cuDNN step against the simulator.

Usage, on a machine with an NVIDIA GPU, torch and torchvision: python benchmarks/gpu_models.py
Writes benchmarks/results/gpu_models.json. It is about right answers; the times are for orientation.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import cupy  # noqa: E402  # the examples folder must be on the path first
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402
import torch  # noqa: E402
import torchvision  # noqa: E402
from machine import gpu, made  # noqa: E402
from models import (  # noqa: E402
    LIGHT,
    light,
    random_inputs,
    randomised,
    reference_inputs,
    reference_outputs,
)

import fusec  # noqa: E402
from tests.gpu.plan_check import compare  # noqa: E402

TORCHVISION = ("resnet50", "mobilenet_v2", "densenet121")
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}  # of whole models; fp16 rounds every stored value
STEP_TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3}


def relative_l2(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def exported(name: str) -> tuple[bytes, dict[str, np.ndarray], np.ndarray]:
    """A torchvision model with random weights and BatchNorm statistics: ONNX, inputs, float64 output."""
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(weights=None).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias, std=0.1)
    x = torch.randn(2, 3, 224, 224)
    file = io.BytesIO()
    torch.onnx.export(model, (x,), file, input_names=["x"], output_names=["y"], dynamo=False)
    with torch.no_grad():
        want = model.double()(x.double()).numpy()
    return file.getvalue(), {"x": x.numpy()}, want


def light_model(name: str) -> tuple[bytes, dict[str, np.ndarray], np.ndarray]:
    model = randomised(onnx.load(light(name)), seed=1)
    inputs, data = random_inputs(model, seed=2), model.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, inputs, session.run(None, inputs)[0]


def measure(name: str, precision: str, data: bytes, inputs: dict[str, np.ndarray], want: np.ndarray) -> dict[str, Any]:
    start = time.perf_counter()
    executable = fusec.compile(data, precision=precision)
    compile_s = time.perf_counter() - start
    error = relative_l2(executable.run(None, inputs)[0], want)
    on_device = {k: cupy.asarray(v) for k, v in inputs.items()}
    times: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        executable.run(None, on_device)
        times.append(1000 * (time.perf_counter() - start))
    shipped = None
    if name in LIGHT and precision == "fp32":
        (want,) = reference_outputs(name).values()
        shipped = relative_l2(fusec.compile(light(name)).run(None, reference_inputs(name))[0], want)
    rng = np.random.default_rng(0)
    graphs = {low.graph.key: low.graph for low in executable.compiled.lowered if low is not None}
    checks = [compare(executable.backend, graph, rng) for graph in graphs.values()]
    steps = [check.error for check in checks]
    return {
        "model": name,
        "precision": precision,
        "launches": executable.compiled.program.launches,
        "distinct_cudnn_graphs": len(graphs),
        "error": error,
        "error_shipped": shipped,
        "worst_step_error": max(steps),
        "unwritten_elements": sum(check.untouched for check in checks),
        "ok": error <= TOLERANCE[precision]
        and (shipped is None or shipped <= 1e-3)
        and all(e <= STEP_TOLERANCE[precision] for e in steps),
        "compile_s": round(compile_s, 2),
        "call_ms_median": round(sorted(times)[2], 2),
        "call_ms_min": round(min(times), 2),
        "call_ms_max": round(max(times), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[*TORCHVISION, *LIGHT])
    parser.add_argument("--precisions", default="fp32,fp16")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_models.json")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    result = {**made(arguments.commit), **gpu(), "models": rows}
    for name in arguments.models:
        data, inputs, want = exported(name) if name in TORCHVISION else light_model(name)
        for precision in arguments.precisions.split(","):
            rows.append(measure(name, precision, data, inputs, want))
            row = rows[-1]
            print(
                f"{'ok ' if row['ok'] else 'BAD'} {name:20} {precision} launches {row['launches']:4} error "
                f"{row['error']:.1e} worst step {row['worst_step_error']:.1e} compile {row['compile_s']} s "
                f"call {row['call_ms_median']} ms",
                flush=True,
            )
            # after each row: what was measured stays if the rest does not get to run
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
