"""What a new size of a dynamic dim costs on a GPU, and how fast its program runs: ResNet-50 and BERT-base in fp16.

Usage, on a machine with an NVIDIA GPU, torch and torchvision: python -m benchmarks.shapes [CASE ...]
A case is MODEL:TUNE:KERNELS:CACHE: resnet50 or bert; none or quick; size, shared (`share_kernels`) or each
(`tune_each`); cold or warm (what another process left in the plan cache). Each is a process of its own, which the first
size has to bring up; behind it there is a pause, in which what is compiled at run time is compiled for all sizes.
Answers are compared with torch's in fp32. Writes benchmarks/results/shapes.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import RESULTS, ROOT, gpu, keep

SIZES = {"resnet50": [(8,), (9,), (16,), (5,)], "bert": [(8, 128), (9, 128), (16, 128), (8, 96)]}
PADDED = {"resnet50": (13,), "bert": (13, 128)}  # to 16, where a program for that is there
CASES = [
    *(f"{m}:none:{k}:{c}" for m in SIZES for k in ("size", "shared") for c in ("cold", "warm")),
    *(f"{m}:quick:{k}:{c}" for m in ("bert", "resnet50") for k in ("size", "each") for c in ("cold", "warm")),
]
KEY = ("model", "tune", "kernels", "cache", "size")
TOLERANCE = 2e-2  # of a whole model in fp16
# In a process of its own, a line of JSON for each size: seconds to its first result, of these up to the program (host
# and questions to cuDNN); then how long it runs.
CHILD = """
import json, sys, time, warnings
import numpy as np
path, answers, tune, kernels, sizes, padded, pause = sys.argv[1], np.load(sys.argv[2]), *map(json.loads, sys.argv[3:8])
import cupy, fusec, fusec.dynamic, fusec.gpu.backend
from fusec import driver
build, spent = driver.build, [0.0]
def timed(*args, **named):
    start = time.perf_counter()
    try:
        return build(*args, **named)
    finally:
        spent[0] += time.perf_counter() - start
driver.build = timed
cupy.zeros(1)
warnings.simplefilter("ignore")
buckets = {"N": sorted({size[0] for size in sizes if size != padded})}
how = {"share_kernels": kernels == "shared", "tune_each": kernels == "each", "buckets": buckets}
net = fusec.compile_dynamic(path, precision="fp16", tune=tune, **how)
for size in sizes:
    x, want = answers["x" + "_".join(map(str, size))], answers["y" + "_".join(map(str, size))]
    spent[0], start = 0.0, time.perf_counter()
    got = net(x)
    seconds = time.perf_counter() - start
    error = float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
    start = time.perf_counter()
    again = net(x)
    second = time.perf_counter() - start
    program = net.at(net.shapes[-1])
    net(x)
    whole = sorted(program.time_us(21)[0])
    judge = program.compiled.judge
    asked = judge.oracle.asked
    print(json.dumps({"size": size, "first_s": seconds, "program_s": spent[0], "second_s": second, "error": error,
        "run_us": whole[10], "low_us": whole[2], "high_us": whole[18], "asked": asked, "pause_s": pause}), flush=True)
    if size == sizes[0]:
        time.sleep(pause)
"""


def exported(name: str, path: Path) -> None:
    """The model with dynamic dims, random weights, and its answers for all sizes."""
    import torch

    from benchmarks.zoo import make

    model, inputs = make({"bert": "bert_base"}.get(name, name), 2)
    axes = {0: "N", 1: "S"} if name == "bert" else {0: "N"}
    torch.backends.mha.set_fastpath_enabled(False)  # which the exporter does not know
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


def measured(
    case: str, path: Path, cache: Path, seconds: float, result: Path, machine: dict[str, Any], commit: str, pause: float
) -> list[dict[str, Any]]:
    """The rows of a case, as far as the time goes."""
    name, tune, kernels, turn = case.split(":")
    sizes = [*SIZES[name], PADDED[name]]
    environment = {**os.environ, "FUSEC_CACHE": str(cache), "CUPY_CACHE_DIR": str(cache / "cupy")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    told = [json.dumps(word) for word in (tune, kernels, sizes, PADDED[name], pause)]
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(path), str(path.with_suffix(".npz")), *told]
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
            keep(result, machine, commit, row, KEY)
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--seconds", type=float, default=1e6, help="for all cases")
    parser.add_argument("--commit", default="", help="where there is no history to ask")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between the first size and the next")
    parser.add_argument("--models", type=Path, help="a folder with models exported before, or to keep them in")
    parser.add_argument("--result", type=Path, default=RESULTS / "shapes.json")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    rows: list[dict[str, Any]] = []
    machine = gpu()
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
                rows += measured(case, path, cache, left, given.result, machine, given.commit, given.pause)
    wrong = [_line(row) for row in rows if not row["error"] <= TOLERANCE]
    if wrong:
        raise SystemExit("wrong answers:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
