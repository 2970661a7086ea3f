"""Measure the gain of single choices on one GPU: compile a model with and without one, and time both in turns.

Usage, with a GPU, torch and torchvision: python -m benchmarks.models.ablation [CHOICE:MODEL:BATCH[:PRECISION] …]
A choice is a name that `disable` takes, `gelu_by_tanh`, or `cublaslt`, which needs that extra installed.
PRECISION is fp16 (the default), fp32, or `training`: a training step of benchmarks/kernels/leave_one_out_cases.py.
Writes benchmarks/results/choices.json: cases that are not measured again keep their rows. On any machine with torch,
--dry compiles whole models both ways for an H200, and prints steps and planned memory.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import fusec
from benchmarks.common.result_files import KEYS, gpu_and_torch, parser, write_row
from fusec.gpu.cublaslt import algorithms
from fusec.ops import Concat
from fusec.passes import names
from fusec.passes.partition import equivalent_spellings
from fusec.passes.partition.concat_in_place import joined
from fusec.runtime import Executable
from fusec.schedule.memory_plan import plan_memory

if TYPE_CHECKING:
    from benchmarks.kernels.leave_one_out_cases import Case

CASES = [
    *(
        "concat_in_place:densenet121:32",
        "concat_in_place:dense_block:32",
        "concat_in_place:unet:8",
        "concat_in_place:squeezenet1_1:32",
    ),
    *("pad_channels:resnet_stem:32", "patch_embedding:vit_stem:32", "gelu_by_tanh:linear_gelu:32"),
    "relu_mask_bits:resnet50:32:training",
    *("cublaslt:bert_base:8:fp32", "cublaslt:bert_base:32:fp16", "cublaslt:vit_b_16:32:fp16"),
]
TRAINING = "training"
TOLERANCES = {"fp16": 2e-2, "fp32": 1e-3, TRAINING: 2e-2}  # relative L2 of a whole model, or of losses


@contextmanager
def left_out(choice: str) -> Generator[Collection[str]]:
    """Yield the names to disable for a compilation without a choice.

    A choice that `disable` does not know is patched out instead.
    """
    if choice in names():
        yield (choice,)
    elif choice in equivalent_spellings.FOR_SPEED:
        others = {name: rewrite for name, rewrite in equivalent_spellings.FOR_SPEED.items() if name != choice}
        with mock.patch.object(equivalent_spellings, "FOR_SPEED", others):
            yield ()
    elif choice == "cublaslt":
        with mock.patch.object(algorithms, "version", return_value=""):
            yield ()
    else:
        raise SystemExit(f"no choice {choice!r} can be left out: give a pass or rule, a spelling, or cublaslt")


@contextmanager
def cached(choice: str, way: str) -> Generator[None]:
    """Give both compilations one cache, and those of a spelling one each.

    The cache stores a step's spelling under what the step computes, which is the same with and without the choice.
    """
    before = os.environ["FUSEC_CACHE"]
    if choice in equivalent_spellings.FOR_SPEED:
        os.environ["FUSEC_CACHE"] = f"{before}/{choice}-{way}"
    try:
        yield
    finally:
        os.environ["FUSEC_CACHE"] = before


def steps_of(executable: Executable) -> dict[str, Any]:
    """Count what a choice may change: steps by library, and concats in place."""
    libraries = list(executable.libraries().values())
    found: dict[str, Any] = {name: libraries.count(name) for name in sorted(set(libraries))}
    program = executable.compiled.program
    if concats := sum(isinstance(node.op, Concat) for node in program.graph.nodes):
        found |= {"concats": concats, "in place": sum(len(family.concats) for family in joined(program))}
    return found


def part(name: str, batch: int) -> Any:
    """Make a part of a network with its inputs; None for the name of a whole model."""
    import torch
    from torch import nn

    class Rows(nn.Module):
        """The first layer of ViT-B/16: each patch becomes a row."""

        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 768, 16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.patches(x).flatten(2).transpose(1, 2)

    class Dense(nn.Module):
        """The first dense block of DenseNet-121, between poolings. Each layer reads the results of all before it."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(self._layer(64 + 32 * i) for i in range(6))
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    nn.init.uniform_(module.weight, 0.5, 1.5)
                    nn.init.normal_(module.bias, std=0.1)

        @staticmethod
        def _layer(channels: int) -> nn.Sequential:
            narrow = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 128, 1, bias=False))
            wide = nn.Sequential(nn.BatchNorm2d(128), nn.ReLU(), nn.Conv2d(128, 32, 3, padding=1, bias=False))
            return nn.Sequential(narrow, wide)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            results = [nn.functional.max_pool2d(x, 3, 2, 1)]
            for layer in self.layers:
                results.append(layer(torch.cat(results, 1)))
            return torch.cat(results, 1).mean((2, 3))

    torch.manual_seed(0)
    if name == "dense_block":
        return Dense().eval(), (torch.randn(batch, 64, 112, 112),)
    image = torch.randn(batch, 3, 224, 224)
    if name == "resnet_stem":
        return nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU()).eval(), (image,)
    if name == "vit_stem":
        return Rows().eval(), (image,)
    if name == "linear_gelu":  # of ViT-B/16
        return nn.Sequential(nn.Linear(768, 3072), nn.GELU()).eval(), (torch.randn(batch, 197, 768),)
    return None


def case(choice: str, name: str, batch: int, precision: str, budget: float) -> dict[str, Any]:
    import torch

    from benchmarks.common.model_zoo import feeds_of, make, on_gpu
    from benchmarks.common.torch_timing import relative_l2, timed

    _, inputs, data, want = on_gpu(*(part(name, batch) or make(name, batch)), precision)
    feeds = feeds_of(inputs)
    row: dict[str, Any] = {"choice": choice, "model": name, "batch": batch, "precision": precision, "errors": {}}
    contenders: dict[str, Callable[[], None]] = {}
    for way in ("without", "with"):
        started = time.perf_counter()
        with left_out(choice) if way == "without" else nullcontext(()) as disabled, cached(choice, way):
            executable = fusec.compile(data, precision=precision, budget=budget, disable=disabled)
        (y,) = executable.run(None, feeds)
        executable.run(None, feeds)
        executable.backend.finish()
        row[f"{way}_compile_s"] = round(time.perf_counter() - started, 2)
        row["errors"][way] = relative_l2(torch.from_dlpack(y), want)
        row[f"{way}_steps"] = steps_of(executable)
        contenders[way] = executable.replay
    row["times"] = timed(contenders)
    return row


def training_case(choice: str, name: str, batch: int, budget: float) -> dict[str, Any]:
    """Measure a choice in a training step; its error is that of the losses against those without the choice."""
    from benchmarks.common.torch_timing import relative_l2, timed
    from benchmarks.kernels.leave_one_out_cases import Trial

    step = _prepared(name, batch, TRAINING)
    row: dict[str, Any] = {"choice": choice, "model": name, "batch": batch, "precision": TRAINING}
    trials: dict[str, Trial] = {}
    for way in ("without", "with"):
        started = time.perf_counter()
        with left_out(choice) if way == "without" else nullcontext(()) as disabled, cached(choice, way):
            trials[way] = step.start(step.compile(budget=budget, disable=disabled))
        row[f"{way}_compile_s"] = round(time.perf_counter() - started, 2)
        row[f"{way}_steps"] = steps_of(trials[way].program)
    row["errors"] = {"with": relative_l2(trials["with"].results, trials["without"].results)}
    row["times"] = timed({}, spans={way: trial.span for way, trial in trials.items()})
    return row


def _prepared(name: str, batch: int, precision: str) -> Case:
    from benchmarks.kernels.leave_one_out_cases import prepare

    with tempfile.TemporaryDirectory() as folder:
        return prepare(f"{name}:{batch}:{precision}", Path(folder))


def dry(choice: str, name: str, batch: int, precision: str) -> None:
    """Print the steps and the planned memory of both programs for an H200."""
    model = _prepared(name, batch, precision)
    for way in ("without", "with"):
        with left_out(choice) if way == "without" else nullcontext(()) as disabled:
            made: Any = model.compile(target="h200", simulate=True, disable=disabled)
        mb = plan_memory(made.compiled.program).nbytes >> 20
        print(f"{way} {choice} {name}:{batch} {precision}: {steps_of(made)}, {mb} MB", flush=True)


def is_right(row: dict[str, Any]) -> bool:
    return all(error <= TOLERANCES[row["precision"]] for error in row["errors"].values())


def line(row: dict[str, Any]) -> str:
    what = f"{'ok ' if is_right(row) else 'BAD'} {row['choice']} {row['model']}:{row['batch']} {row['precision']}"
    for way in ("with", "without"):
        t, seconds = row["times"][way], row[f"{way}_compile_s"]
        what += f"  {way} {t['median_ms']:.4f} ms ({t['low_ms']:.4f}..{t['high_ms']:.4f}), in {seconds} s"
        what += f" {row[f'{way}_steps']}"
    return what


def main() -> int:
    options = parser(__doc__, "choices.json", budget=True)
    options.add_argument("cases", nargs="*", default=CASES, help="CHOICE:MODEL:BATCH[:PRECISION]")
    options.add_argument("--dry", action="store_true", help="compile for an H200, and time nothing; needs no GPU")
    given = options.parse_args()
    right = True
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("FUSEC_CACHE", folder)
        for item in given.cases:
            choice, name, batch, *precision = item.split(":")
            if choice == "cublaslt" and not algorithms.version():
                print(f"{item} left out: the extra cublaslt is not installed", flush=True)
                continue
            kind = precision[0] if precision else "fp16"
            if given.dry:
                dry(choice, name, int(batch), kind)
                continue
            if kind == TRAINING:
                row = training_case(choice, name, int(batch), given.budget)
            else:
                row = case(choice, name, int(batch), kind, given.budget)
            right = right and is_right(row)
            print(line(row), flush=True)
            write_row(given.output, gpu_and_torch(), given.commit, row, KEYS["choices.json"])
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
