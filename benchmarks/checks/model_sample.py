"""Check a sample of 60 exported models: each must compile, be right, and leave no work to references.

Usage, with torch, torchvision, timm, transformers and onnxscript:
    python -m benchmarks.checks.model_sample [--target h200 | --target auto] [--tune none] [--processes 2]
        [--slice 1/4] [MODEL ...]
Without a GPU the programs of the target run in simulation. `--target auto` runs them on this machine's GPU; the third
call of each program, which replays its capture, is compared, too. The models are small and have random weights. Their
outputs are compared with torch's on the CPU, which are fp32.
Writes benchmarks/results/model_sample.json, or model_sample_gpu.json for `--target auto`. Slices that run at the same
time need files of their own (`--output`); `benchmarks.common.result_files` joins them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

from benchmarks.common.attempt import TooLongError, within
from benchmarks.common.live_rows import LiveRows
from benchmarks.common.result_files import KEYS, parser

TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}  # relative L2; fp16 rounds every stored value
ON_GPU = "model_sample_gpu.json"
CALLS_ON_GPU = 3  # step by step, while they are captured, and as a replay of the capture


@dataclass(frozen=True)
class Check:
    """Options of the compilation, and the limit for one model in seconds."""

    target: str = "h200"
    precision: str = "fp32"
    tune: str = "none"
    seconds: float = 600.0


def check(source: str, name: str, how: Check) -> dict[str, Any]:
    """Export, compile and run one model; return its row of the result file."""
    where = "GPU" if how.target == "auto" else "simulation"
    row: dict[str, Any] = {"model": name, "precision": how.precision, "from": source, "where": where}
    start = time.perf_counter()
    try:
        with within(how.seconds):
            row |= _measured(source, name, how)
    except (Exception, TooLongError) as error:  # noqa: BLE001  # a model that fails is a row, and the others go on
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        row |= {"ok": False, "failed": f"{type(error).__name__}: {lines[0][:300]}"}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def _measured(source: str, name: str, how: Check) -> dict[str, Any]:
    import torch

    import fusec
    from benchmarks.checks.sample_models import MODELS

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, inputs = MODELS[source][name]()
    _randomise(model.eval())
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        wanted = torch.utils._pytree.tree_leaves(model(*inputs))
        refuse_constants([x.numpy() for x in wanted])
        file = str(Path(folder) / "model.onnx")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own
            torch.onnx.export(model, inputs, file, dynamo=True, verbose=False, external_data=False)
        exported = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            executable = fusec.compile(file, target=how.target, precision=how.precision, tune=how.tune)
            errors = _errors(executable, inputs, wanted, CALLS_ON_GPU if how.target == "auto" else 1)
    programs = _programs(executable)
    left = sorted({part for program in programs for part in _references(program)})
    return {
        "steps": sum(len(program.program.steps) for program in programs),
        "launches": sum(program.program.launches for program in programs),
        "programs": len(programs),
        "reference": left,
        "warnings": sorted({str(each.message).splitlines()[0][:200] for each in said}),
        "error": max(errors),
        "ok": all(error <= TOLERANCE[how.precision] for error in errors) and not left,
        "compile_and_run_s": round(time.perf_counter() - exported, 1),
    }


def _errors(executable: Any, inputs: Sequence[Any], wanted: Sequence[Any], calls: int) -> list[float]:
    """Return the relative L2 error of each output of each call."""
    import numpy as np

    from fusec.diagnostics.verify import relative_l2

    errors: list[float] = []
    for _ in range(calls):
        results = executable(*(x.numpy() for x in inputs))
        results = [results] if not isinstance(results, tuple | list) else list(results)
        errors += [relative_l2(np.asarray(a), b.numpy()) for a, b in zip(results, wanted, strict=True)]
    return errors


def refuse_constants(outputs: Sequence[Any]) -> None:
    """Refuse a model with an output whose elements are all equal, because almost any mistake would leave it right."""
    for i, output in enumerate(outputs):
        if output.size > 1 and (output == output.flat[0]).all():
            raise ValueError(
                f"each element of output {i} of the model is {output.flat[0]}: give its layers other weights"
            )


def _randomise(model: Any) -> None:
    """Give norms and classifiers numbers that are not trivial, so that a mistake shows."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
        elif isinstance(module, torch.nn.Linear) and not module.weight.any():  # a classifier that gives only zeros
            torch.nn.init.normal_(module.weight, std=0.1)


def _programs(executable: Any) -> list[Any]:
    """Return the compilations of a model: one, or those of the segments that ran between host steps."""
    return [each.compiled for each in getattr(executable, "programs", [executable])]


def _references(compiled: Any) -> Iterator[str]:
    """Yield the steps that run as references on a GPU, because no library and no kernel of fusec has them.

    cuBLASLt runs single products, those in fp32 too, which cuDNN declines.
    """
    from fusec.gpu.kernels import find
    from fusec.ops import MatMul
    from fusec.schedule.program import Kind

    for step in compiled.program.steps:
        product = len(step.nodes) == 1 and isinstance(step.nodes[0].op, MatMul)
        if step.kind is Kind.KERNEL and not product and find(step.nodes, step.outputs, compiled.figures) is None:
            yield step.signature


def _machine(target: str) -> dict[str, Any]:
    """Name the versions, and the GPU if there is one."""
    import timm
    import torch
    import torchvision
    import transformers

    from benchmarks.common.result_files import gpu

    libraries = {lib.__name__: lib.__version__ for lib in (torch, torchvision, timm, transformers)}
    return libraries | (gpu() if target == "auto" else {"target": target})


def part_of_all(text: str) -> tuple[int, int]:
    """Read `2/4`, the second of four slices."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no slice, such as 2/4")
    return int(first), int(count)


def chosen(
    models: Mapping[str, Iterable[str]], names: Sequence[str], part: tuple[int, int] = (1, 1)
) -> list[tuple[str, str]]:
    """Return source and name of the models of a slice. Similar models of one source go to all slices.

    names: the models to choose from; all if it is empty.
    """
    pairs = [(source, name) for source, held in models.items() for name in held]
    if unknown := sorted(set(names) - {name for _, name in pairs}):
        raise SystemExit(f"the sample has no model {', '.join(unknown)}")
    return [pair for pair in pairs if not names or pair[1] in names][part[0] - 1 :: part[1]]


def main() -> int:
    """Check the models in several processes, and write a row for each when it is ready."""
    options = parser(__doc__, "model_sample.json")
    options.add_argument("models", nargs="*", help="names of models; all if none is given")
    options.add_argument("--target", default=Check.target, help="auto: the GPU of this machine")
    options.add_argument("--precision", default=Check.precision, choices=TOLERANCE)
    options.add_argument("--tune", default=Check.tune, choices=("none", "quick", "full"), help="none: time nothing")
    options.add_argument("--seconds", type=float, default=Check.seconds, help="limit for one model")
    options.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    options.add_argument("--slice", type=part_of_all, default=(1, 1), metavar="I/N", help="only the Ith of N slices")
    given = options.parse_args()
    # one process imports the libraries, which takes seconds, and the others fork it
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.checks.sample_models", "fusec"])
    ensure_running()
    from benchmarks.checks.sample_models import MODELS

    pairs = chosen(MODELS, given.models, given.slice)
    how = Check(given.target, given.precision, given.tune, given.seconds)
    output = given.output.with_name(ON_GPU) if how.target == "auto" else given.output
    rows = LiveRows(output, given.commit, _machine(how.target), KEYS[output.name])
    bad = 0
    with ProcessPoolExecutor(given.processes, mp_context=context) as pool:
        for done in as_completed([pool.submit(check, *pair, how) for pair in pairs]):
            row = done.result()
            bad += not row["ok"]
            rows("ok " if row["ok"] else "BAD", {name: row[name] for name in KEYS[output.name]}, **row)
    print(f"{len(pairs) - bad} of {len(pairs)} models are right and run without references")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
