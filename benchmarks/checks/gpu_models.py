"""Check models on a GPU: their outputs against torch or onnxruntime, each distinct cuDNN graph against the simulator.

Usage, on a machine with an NVIDIA GPU, torch and torchvision: python -m benchmarks.checks.gpu_models
Writes benchmarks/results/gpu_models.json. It checks results; its times are rough.
"""

from __future__ import annotations

import io
import sys
import time
from typing import Any

import cupy
import numpy as np
import onnx
import onnxruntime
import torch
import torchvision

import fusec
from benchmarks.common.result_files import date_and_commit, gpu_and_torch, parser, write
from examples.models import LIGHT, light, random_inputs, randomised, reference_inputs, reference_outputs
from fusec.diagnostics.verify import relative_l2
from tests.gpu.plan_check import compare

TORCHVISION = ("resnet50", "mobilenet_v2", "densenet121")
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}  # relative L2 of a whole model; fp16 rounds every stored value
STEP_TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3}


def exported(name: str) -> tuple[bytes, dict[str, np.ndarray], np.ndarray]:
    """Return a torchvision model with random weights and statistics as ONNX, its inputs, and its float64 output."""
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
    options = parser(__doc__, "gpu_models.json")
    options.add_argument("models", nargs="*", default=[*TORCHVISION, *LIGHT])
    options.add_argument("--precisions", default="fp32,fp16")
    given = options.parse_args()
    rows: list[dict[str, Any]] = []
    result = {**date_and_commit(given.commit), **gpu_and_torch(), "models": rows}
    for name in given.models:
        data, inputs, want = exported(name) if name in TORCHVISION else light_model(name)
        for precision in given.precisions.split(","):
            rows.append(measure(name, precision, data, inputs, want))
            row = rows[-1]
            print(
                f"{'ok ' if row['ok'] else 'BAD'} {name:20} {precision} launches {row['launches']:4} error "
                f"{row['error']:.1e} worst step {row['worst_step_error']:.1e} compile {row['compile_s']} s "
                f"call {row['call_ms_median']} ms",
                flush=True,
            )
            write(given.output, result)  # after each row, because a later one may fail
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
