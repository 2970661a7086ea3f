"""Measure what a new size of a dynamic dim costs on a GPU, for ResNet-50 and BERT-base in fp16.

Usage, on a machine with an NVIDIA GPU, torch and torchvision: python -m benchmarks.compile_time.new_shapes [CASE ...]
A case is MODEL:TUNE:KERNELS:CACHE. MODEL: resnet50 or bert. TUNE: none or quick. KERNELS: size, shared
(`share_kernels`) or each (`tune_each`). CACHE: cold, or warm with the plan cache of the same case run cold before.
Each case runs in a process of its own (benchmarks/compile_time/new_shapes_child.py), whose first size includes loading
the libraries. After the first size there is a pause, in which runtime engines are compiled for all sizes. Results are
compared with torch's in fp32. Writes benchmarks/results/shapes.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.result_files import KEYS, ROOT, compiler_caches, gpu_and_torch, parser, write_row

SIZES = {"resnet50": [(8,), (9,), (16,), (5,)], "bert": [(8, 128), (9, 128), (16, 128), (8, 96)]}
PADDED = {"resnet50": (13,), "bert": (13, 128)}  # to 16, where that program exists
CASES = [
    *(f"{m}:none:{k}:{c}" for m in SIZES for k in ("size", "shared") for c in ("cold", "warm")),
    *(f"{m}:quick:{k}:{c}" for m in ("bert", "resnet50") for k in ("size", "each") for c in ("cold", "warm")),
]
TOLERANCE = 2e-2  # relative L2 of a whole model in fp16


@dataclass(frozen=True)
class Recording:
    """The file that rows are written to, and the machine and commit that they are measured on."""

    output: Path
    machine: dict[str, Any]
    commit: str


def exported(name: str, path: Path) -> None:
    """Export a model with dynamic dims and random weights, with inputs and torch's outputs for all sizes."""
    import torch

    from benchmarks.common.model_zoo import make

    model, inputs = make({"bert": "bert_base"}.get(name, name), 2)
    axes = {0: "N", 1: "S"} if name == "bert" else {0: "N"}
    torch.backends.mha.set_fastpath_enabled(False)  # because the exporter does not support it
    options: dict[str, Any] = {"dynamo": False, "opset_version": 17, "input_names": ["x"], "output_names": ["y"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, inputs, str(path), dynamic_axes={"x": axes, "y": axes}, **options)
    rng, arrays = np.random.default_rng(3), dict[str, Any]()
    for size in [*SIZES[name], PADDED[name]]:
        key = "_".join(map(str, size))
        x = rng.integers(0, 30522, size) if name == "bert" else rng.standard_normal((*size, 3, 224, 224), np.float32)
        arrays["x" + key] = x
        with torch.inference_mode():
            arrays["y" + key] = model(torch.from_numpy(x)).numpy()
    np.savez(path.with_suffix(".npz"), **arrays)


def measure(
    case: str, path: Path, cache: Path, seconds: float, pause: float, recording: Recording
) -> list[dict[str, Any]]:
    """Run a case and write a row for each size. The process is stopped after the time limit.

    path: the model.
    cache: folder of the plan cache.
    pause: seconds after the first size.
    """
    name, tune, kernels, turn = case.split(":")
    sizes = [*SIZES[name], PADDED[name]]
    environment = {**os.environ, "FUSEC_CACHE": str(cache), **compiler_caches(cache)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    files = [str(path), str(path.with_suffix(".npz"))]
    options = [json.dumps(option) for option in (tune, kernels, sizes, PADDED[name], pause)]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compile_time.new_shapes_child", *files, *options]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True)
        alarm = threading.Timer(max(1.0, seconds), process.kill)
        alarm.start()
        assert process.stdout is not None
        for line in process.stdout:
            row = {"model": name, "tune": tune, "kernels": kernels, "cache": turn, **json.loads(line)}
            row["padded"] = row["size"] == list(PADDED[name])
            rows.append(row)
            print(_line(row), flush=True)
            write_row(recording.output, recording.machine, recording.commit, row, KEYS["shapes.json"])
        process.wait()
        alarm.cancel()
        if len(rows) < len(sizes):
            errors.seek(0)
            print(
                f"{case}: {len(rows)} of {len(sizes)} sizes", *errors.read().splitlines()[-3:], sep="\n  ", flush=True
            )
    return rows


def _line(row: dict[str, Any]) -> str:
    case = f"{row['model']:8} {row['tune']:5} {row['kernels']:6} {row['cache']:4} {row['size']!s:9}"
    first = f"{row['first_s']:6.3f} s, of these {row['program_s']:6.3f} to the program (asked {row['asked']:3})"
    return f"{case} {first}, 2nd {1000 * row['second_s']:6.1f} ms, runs {row['run_us']:6.0f} us, {row['error']:.0e}"


def main() -> None:
    options = parser(__doc__, "shapes.json")
    options.add_argument("cases", nargs="*", default=CASES, help="MODEL:TUNE:KERNELS:CACHE")
    options.add_argument("--seconds", type=float, default=1e6, help="limit for all cases")
    options.add_argument("--pause", type=float, default=2.0, help="seconds between the first size and the next")
    options.add_argument("--models", type=Path, help="folder of exported models; missing ones are exported into it")
    given = options.parse_args()
    end = time.monotonic() + given.seconds
    rows: list[dict[str, Any]] = []
    recording = Recording(given.output, gpu_and_torch(), given.commit)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.models or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for case in given.cases:
            name, tune, kernels, _ = case.split(":")
            path = folder / f"{name}.onnx"
            if not path.with_suffix(".npz").exists():
                exported(name, path)
            left, cache = end - time.monotonic(), Path(scratch) / f"{name}-{tune}-{kernels}"
            if left > 5:
                rows += measure(case, path, cache, left, given.pause, recording)
    wrong = [_line(row) for row in rows if not row["error"] <= TOLERANCE]
    if wrong:
        raise SystemExit("wrong results:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
