"""What single choices of fusec's are worth on one GPU: a model compiled with each and without it, replays in turns.

Usage, with an NVIDIA GPU, torch and torchvision: python -m benchmarks.choices [CHOICE:MODEL:BATCH[:PRECISION] …]
A choice is a pass or rule that `disable` knows, `gelu_by_tanh`, or `cublaslt`, for which that extra must be installed.
Writes benchmarks/results/choices.json: cases that are not measured anew keep their rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import fusec
from benchmarks.machine import KEYS, RESULTS, gpu, keep
from fusec.gpu.cublaslt import algorithms
from fusec.ops import Concat
from fusec.passes import names
from fusec.passes.partition import equivalent_spellings
from fusec.passes.partition.concat_in_place import joined
from fusec.runtime import Executable

CASES = [
    *(
        "concat_in_place:densenet121:32",
        "concat_in_place:dense_block:32",
        "concat_in_place:unet:8",
        "concat_in_place:squeezenet1_1:32",
    ),
    *("widen_channels:resnet_stem:32", "patches:vit_stem:32", "gelu_by_tanh:linear_gelu:32"),
    *("cublaslt:bert_base:8:fp32", "cublaslt:bert_base:32:fp16", "cublaslt:vit_b_16:32:fp16"),
]
TOLERANCES = {"fp16": 2e-2, "fp32": 1e-3}  # of a whole model


@contextmanager
def left_out(choice: str) -> Generator[Collection[str]]:
    """What `disable` is given to compile without a choice, while what `disable` does not know is not there."""
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
        raise SystemExit(f"{choice} is no choice that can be left out")


@contextmanager
def cached(choice: str, way: str) -> Generator[None]:
    """Plans of both ways in one folder, but for a spelling: how a step is spelled is remembered by what it computes."""
    before = os.environ["FUSEC_CACHE"]
    if choice in equivalent_spellings.FOR_SPEED:
        os.environ["FUSEC_CACHE"] = f"{before}/{choice}-{way}"
    try:
        yield
    finally:
        os.environ["FUSEC_CACHE"] = before


def steps_of(executable: Executable) -> dict[str, Any]:
    """What the choice can have changed: who runs how many steps, and how many concats are in place."""
    libraries = list(executable.libraries().values())
    found: dict[str, Any] = {name: libraries.count(name) for name in sorted(set(libraries))}
    program = executable.compiled.program
    if concats := sum(isinstance(node.op, Concat) for node in program.graph.nodes):
        found |= {"concats": concats, "in place": sum(len(family.concats) for family in joined(program))}
    return found


def part(name: str, batch: int) -> Any:
    """Beginnings and single layers, as models of torch's with their inputs; None for the name of a whole model."""
    import torch
    from torch import nn

    class Rows(nn.Module):
        """Patches as rows, as ViT-B/16 begins."""

        def __init__(self) -> None:
            super().__init__()
            self.cut = nn.Conv2d(3, 768, 16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cut(x).flatten(2).transpose(1, 2)

    class Dense(nn.Module):
        """The first dense block of DenseNet-121, between poolings: each layer reads what all before it wrote."""

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
            made = [nn.functional.max_pool2d(x, 3, 2, 1)]
            for layer in self.layers:
                made.append(layer(torch.cat(made, 1)))
            return torch.cat(made, 1).mean((2, 3))

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
    import cupy
    import torch

    from benchmarks.contest import timed
    from benchmarks.zoo import exported, halved, make

    model, inputs = part(name, batch) or make(name, batch)
    model, inputs = model.cuda(), tuple(x.cuda() for x in inputs)
    with torch.inference_mode():
        want = model(*inputs).double().clone()
    if precision == "fp16":
        model, inputs = model.half(), tuple(map(halved, inputs))
    data = exported(model, inputs)
    feeds = {f"x{i}": cupy.from_dlpack(x) for i, x in enumerate(inputs)}
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
        row["errors"][way] = float((torch.from_dlpack(y).double() - want).norm() / want.norm())
        row[f"{way}_steps"] = steps_of(executable)
        contenders[way] = executable.replay
    row["times"] = timed(contenders)
    return row


def line(row: dict[str, Any]) -> str:
    right = all(error <= TOLERANCES[row["precision"]] for error in row["errors"].values())
    what = f"{'ok ' if right else 'BAD'} {row['choice']} {row['model']}:{row['batch']} {row['precision']}"
    for way in ("with", "without"):
        t, seconds = row["times"][way], row[f"{way}_compile_s"]
        what += f"  {way} {t['median_ms']:.4f} ms ({t['low_ms']:.4f}..{t['high_ms']:.4f}), in {seconds} s"
        what += f" {row[f'{way}_steps']}"
    return what


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES, help="CHOICE:MODEL:BATCH[:PRECISION]")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for timing plans, each time")
    parser.add_argument("--commit", default="", help="where there is no history to ask")
    parser.add_argument("--output", type=Path, default=RESULTS / "choices.json")
    given = parser.parse_args()
    right = True
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("FUSEC_CACHE", folder)
        for item in given.cases:
            choice, name, batch, *precision = item.split(":")
            if choice == "cublaslt" and not algorithms.version():
                print(f"{item} left out: the extra cublaslt is not installed", flush=True)
                continue
            row = case(choice, name, int(batch), precision[0] if precision else "fp16", given.budget)
            right = right and all(error <= TOLERANCES[row["precision"]] for error in row["errors"].values())
            print(line(row), flush=True)
            keep(given.output, gpu(), given.commit, row, KEYS["choices.json"])
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
