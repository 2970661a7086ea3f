"""Measure compile time and memory without a GPU: random pointwise graphs, large weights, and processes together.

Usage, on any machine with cuDNN installed: python -m benchmarks.compile_time.time_and_memory [CASE...]. Each case runs
in processes of its own, with an empty cache. Processor seconds count the worker processes, too, and depend less than
seconds on what else the machine does. Writes benchmarks/results/compile_time.json.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.result_files import KEYS, ROOT, parser, write_row
from fusec.ir import DType, Graph, TensorType
from fusec.ops import MatMul, pw

TARGET = "h200"
SHAPES = ((8, 64, 32), (8, 1, 32), (64, 1), (8, 64, 1), (32,), (4, 64, 32), (4, 1, 32))
UNARY = ("relu", "tanh", "sigmoid", "neg", "abs", "exp", "sqrt", "erf", "gelu", "swish", "sin", "cos", "softplus")
BINARY = ("add", "mul", "sub", "max", "min", "div")
RECENT = 60  # most operands are among so many values before
CASES: dict[str, tuple[str, int, int]] = {  # what is compiled, its size, the number of processes
    "import": ("import", 0, 1),
    "pointwise 300": ("pointwise", 300, 1),
    "pointwise 2500": ("pointwise", 2500, 1),
    "pointwise 10000": ("pointwise", 10_000, 1),
    "weights 1 GB": ("weights", 16, 1),
    "resnet50": ("resnet50", 0, 1),
    "resnet50, 8 processes": ("resnet50", 0, 8),
}


def pointwise(nodes: int) -> Graph:
    """Make a random graph of unary and binary ops over mixed shapes, whose values are used several times."""
    rng, graph = random.Random(0), Graph("pointwise")
    values = [graph.add_input(f"x{i}", TensorType(shape, DType.F32)) for i, shape in enumerate(SHAPES)]
    while len(graph) < nodes:
        near = values[-RECENT:] if rng.random() < 0.9 else values
        first, second = rng.choice(near), rng.choice(near)
        if rng.random() < 0.45:
            values.append(graph.add(pw(rng.choice(UNARY)), first))
        elif _broadcasts(first.type.shape, second.type.shape):
            values.append(graph.add(pw(rng.choice(BINARY)), first, second))
    graph.set_outputs([value for value in values if value.node is not None and not value.uses])
    return graph


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))


def weights(products: int) -> Graph:
    """Make a sequence of products with fp32 weights of 4096x4096, 67 MB each."""
    rng, graph = np.random.default_rng(0), Graph("weights")
    value = graph.add_input("x", TensorType((8, 4096), DType.F32))
    for number in range(products):
        weight = rng.standard_normal((4096, 4096), dtype=np.float32)
        value = graph.add(MatMul(), value, graph.constant(weight, f"w{number}"))
    graph.set_outputs([value])
    return graph


def resnet50(_: int) -> str:
    from examples.models import light

    return str(light("resnet50"))


MODELS: dict[str, Callable[[int], Any]] = {"pointwise": pointwise, "weights": weights, "resnet50": resnet50}


def child(what: str, size: int) -> dict[str, Any]:
    """Compile once in this process, and save the large one."""
    if what == "import":
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "fusec", "--version"], check=True, stdout=subprocess.DEVNULL)
        return {"compile_s": round(time.perf_counter() - start, 2)}
    from fusec import driver

    model = MODELS[what](size)
    before, start = _peak_bytes(), time.perf_counter()
    executable = driver.compile(model, target=TARGET, simulate=True)
    row: dict[str, Any] = {"compile_s": round(time.perf_counter() - start, 2)}
    if what == "weights" and isinstance(executable, driver.Executable):
        with tempfile.TemporaryDirectory() as folder:
            path, start = Path(folder) / "model.fusec", time.perf_counter()
            executable.save(path)
            row |= {"save_s": round(time.perf_counter() - start, 2), "file_bytes": path.stat().st_size}
        row["weights_bytes"] = size * 4096 * 4096 * 4
    return {**row, "peak_bytes": _peak_bytes(), "peak_before_bytes": before}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str) -> dict[str, Any]:
    """Run a case in processes of its own, and return its row."""
    what, size, count = CASES[name]
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "benchmarks.compile_time.time_and_memory", "--child", what, str(size)]
        environment = {**os.environ, "FUSEC_CACHE": cache, "FUSEC_DEVICE": "none"}
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        processes = [
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        texts = [process.communicate()[0] for process in processes]
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if any(process.returncode for process in processes):
        raise SystemExit(f"{name}: a process failed")
    rows: list[dict[str, Any]] = [json.loads(text.splitlines()[-1]) for text in texts]
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    slowest = max(rows, key=lambda row: row["compile_s"])
    return {"case": name, "processes": count, "all_s": round(seconds, 2), "cpu_s": round(spent, 2), **slowest}


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2], int(sys.argv[3]))))
        return 0
    options = parser(__doc__, "compile_time.json")
    options.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    given = options.parse_args()
    if unknown := set(given.cases) - CASES.keys():
        options.error(f"no case is named {', '.join(sorted(unknown))}")
    machine = {"cores": os.cpu_count(), "python": sys.version.split()[0], "target": TARGET}
    for name in given.cases or CASES:
        row = measure(name)
        row["load"] = round(os.getloadavg()[0], 1)
        print(row, flush=True)
        write_row(given.output, machine, given.commit, row, KEYS["compile_time.json"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
