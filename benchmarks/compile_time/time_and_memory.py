"""Measure compile time and memory without a GPU: random pointwise graphs, large weights, and processes together.

Usage, on any machine with cuDNN installed: python -m benchmarks.compile_time.time_and_memory [CASE...]. Each case runs
in processes of its own, with an empty cache; a warm one after another process has filled it. Processor seconds count
the worker processes, too, and depend less than seconds on what else the machine does. Writes
benchmarks/results/compile_time.json.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.result_files import KEYS, ROOT, parser, write_row

TARGET = "h200"


@dataclass(frozen=True)
class Case:
    """A model to compile, and its options.

    what: `import`, a graph made by `models.pointwise` or `models.weights`, or a file of `models.FILES`.
    size: number that the graph is made with.
    precision: precision of the compiled model. sources: its file also holds the weights of the ONNX file.
    saves: the model is saved.
    warm: another process has filled the cache.
    """

    what: str
    size: int = 0
    processes: int = 1
    precision: str = "fp32"
    sources: bool = False
    saves: bool = False
    warm: bool = False


CASES: dict[str, Case] = {
    "import": Case("import"),
    "pointwise 300": Case("pointwise", 300),
    "pointwise 2500": Case("pointwise", 2500),
    "pointwise 10000": Case("pointwise", 10_000),
    "weights 1 GB": Case("weights", 16, saves=True),
    "ONNX file 1 GB": Case("1 GB", saves=True),
    "ONNX file 1 GB, fp16": Case("1 GB", precision="fp16", saves=True),
    "ONNX file 1 GB, fp16, with sources": Case("1 GB", precision="fp16", sources=True, saves=True),
    "ONNX file 1 GB, 8 bits": Case("1 GB, 8 bits", precision="fp16", saves=True),
    "warm resnet50, fp16": Case("resnet50", precision="fp16", warm=True),
    "warm encoder, fp16": Case("encoder", precision="fp16", warm=True),
    "warm vgg19, fp16": Case("vgg19", precision="fp16", warm=True),
    "resnet50": Case("resnet50"),
    "resnet50, 8 processes": Case("resnet50", processes=8),
}


def child(case: Case, file: str) -> dict[str, Any]:
    """Compile once in this process, and save or load the weights. file: the ONNX file, or empty."""
    if case.what == "import":
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "fusec", "--version"], check=True, stdout=subprocess.DEVNULL)
        return {"compile_s": _since(start)}
    from fusec import driver

    model: Any = file
    if not file:
        from benchmarks.compile_time import models

        model = getattr(models, case.what)(case.size)
    before, start = _peak_bytes(), time.perf_counter()
    executable = driver.compile(model, target=TARGET, precision=case.precision, simulate=True)
    assert isinstance(executable, driver.Executable)
    row: dict[str, Any] = {"compile_s": _since(start)}
    if case.saves:
        with tempfile.TemporaryDirectory() as folder:
            path, start = Path(folder) / "model.fusec", time.perf_counter()
            executable.save(path, sources=case.sources)
            row |= {"save_s": _since(start), "file_bytes": path.stat().st_size}
    if case.warm:
        start = time.perf_counter()
        _load_weights(executable)
        row["weights_s"] = _since(start)
    return {**row, "peak_bytes": _peak_bytes(), "peak_before_bytes": before}


def _load_weights(executable: Any) -> None:
    """Read the weights that the steps read, as a GPU's backend does before it copies them to the device."""
    from fusec.ir import load_all
    from fusec.schedule.program import inputs_of

    wanted: list[Any] = []
    for step, lowered in zip(executable.compiled.program.steps, executable.compiled.lowered, strict=True):
        read = [v.literal for v in inputs_of(step.nodes)] if lowered is None else [b.literal for b in lowered.constants]
        wanted += [literal for literal in read if literal is not None]
    load_all(wanted)


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 2)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str) -> dict[str, Any]:
    """Run a case in processes of its own, and return its row."""
    from benchmarks.compile_time import models

    case, file = CASES[name], ""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "FUSEC_CACHE": folder, "FUSEC_DEVICE": "none"}
        if case.what in models.FILES:
            file = f"{folder}/model.onnx"
            _run("--make", case.what, file, environment=environment)[0].communicate()
        if case.warm:
            _run("--child", name, file, environment=environment)[0].communicate()
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        processes = _run("--child", name, file, environment=environment, count=case.processes)
        texts = [process.communicate()[0] for process in processes]
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        weights = {"weights_bytes": Path(file).stat().st_size} if file else {}
    if any(process.returncode for process in processes):
        raise SystemExit(f"{name}: a process failed")
    rows: list[dict[str, Any]] = [json.loads(text.splitlines()[-1]) for text in texts]
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    slowest = max(rows, key=lambda row: row["compile_s"])
    head = {"case": name, "processes": case.processes, "all_s": round(seconds, 2), "cpu_s": round(spent, 2)}
    return {**head, **weights, **slowest}


def _run(*arguments: str, environment: dict[str, str], count: int = 1) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.compile_time.time_and_memory", *arguments]
    return [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]


def main() -> int:
    if sys.argv[1:2] == ["--make"]:
        from benchmarks.compile_time import models

        models.write(sys.argv[2], Path(sys.argv[3]))
        return 0
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(CASES[sys.argv[2]], sys.argv[3])))
        return 0
    options = parser(__doc__, "compile_time.json")
    options.add_argument("cases", nargs="*", metavar="CASE", help=f"of {'; '.join(CASES)}; default: all")
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
