"""Measure what each kernel family is worth: models compiled without one family at a time.

Runs through `python -m benchmarks.kernels.kernel_times --leave-one-out [MODEL:BATCH ...]`, on a machine with a GPU and
torch. Only families that run a step of a model are left out of it, because the others cannot change its program. A
family that has several variants of a kernel is also measured with its first variant alone. All programs of a model are
timed in turns. Writes benchmarks/results/leave_one_out.json; `python -m benchmarks.common.result_files FILE` adds rows
from another machine.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.common.result_files import KEYS, gpu_and_torch, write_row
from fusec.errors import FusecError
from fusec.gpu import kernels
from fusec.gpu.kernels import Family, GpuFigures, Kernel
from fusec.ir import Node, Value
from fusec.schedule.program import Partition

ALONE = "{} with one variant"
TOLERANCE = 2e-2  # relative L2 of a whole model in fp16


def used_families(steps: Sequence[Partition], figures: GpuFigures) -> dict[str, int]:
    """Count the steps of each kernel family. A family with variants is counted under a second name, too.

    steps: those that a kernel runs.
    figures: of the GPU that they run on.
    """
    counts: dict[str, int] = {}
    for step in steps:
        offers = ((f.__name__, f(step.nodes, step.outputs, figures)) for f in kernels.FAMILIES)  # no `find`: cached
        for name, kernel in ((name, kernel) for name, kernel in offers if kernel is not None):
            for each in (name, *([ALONE.format(name)] if kernel.others else [])):
                counts[each] = counts.get(each, 0) + 1
            break
    return counts


@contextmanager
def left_out(name: str) -> Generator[None]:
    """Leave out a kernel family, or all variants of its kernels but the first."""
    families: list[Family] = []
    for family in kernels.FAMILIES:
        if name == ALONE.format(family.__name__):
            families.append(_with_one_variant(family))
        elif name != family.__name__:
            families.append(family)
    with patch.object(kernels, "FAMILIES", tuple(families)):
        yield


def _with_one_variant(family: Family) -> Family:
    def first(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
        kernel = family(nodes, outputs, figures)
        return None if kernel is None else replace(kernel, others=())

    return first


def measure(model: str, batch: int) -> dict[str, Any]:
    """Compile a model with all families and without each that it uses; return the median times in ms."""
    from benchmarks.common.model_zoo import channels_last, exported, feeds_of, halved, make
    from benchmarks.common.torch_timing import relative_l2, timed
    from benchmarks.models.peers import CHANNELS_LAST, first_result

    module, inputs = make(model, batch)
    module, inputs = module.cuda().half(), tuple(halved(x.cuda()) for x in inputs)
    data, last = exported(module, inputs), model in CHANNELS_LAST
    if last:
        inputs = channels_last(inputs)
    feeds = feeds_of(inputs)
    replays: dict[str, Callable[[], None]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FUSEC_CACHE"] = f"{folder}/all"
        whole, want, _ = first_result(data, feeds, "quick", float("inf"), last)
        replays["all"] = whole.replay
        steps = [step for step in whole.compiled.program.steps if step in whole.kernels]
        used = used_families(steps, whole.compiled.figures)
        for name in used:
            # cuDNN's verdicts still hold, but choices of plans must be made anew
            os.environ["FUSEC_CACHE"] = f"{folder}/{name}"
            shutil.copytree(f"{folder}/all", f"{folder}/{name}", ignore=shutil.ignore_patterns("plans"))
            try:
                with left_out(name):
                    other, got, _ = first_result(data, feeds, "quick", float("inf"), last)
            except (FusecError, ValueError) as error:  # a choice may need the family that is left out
                failed[name] = str(error)
                continue
            if relative_l2(got, want) > TOLERANCE:
                raise RuntimeError(f"{model} without {name} gives other results")
            replays[name] = other.replay
        times = timed(replays)
    base = times["all"]["median_ms"]
    return {
        "model": model,
        "batch": batch,
        "all_ms": base,
        "without": {
            name: {"steps": count, "failed": failed[name]}
            if name in failed
            else {"steps": count, **times[name], "worth": times[name]["median_ms"] / base - 1}
            for name, count in used.items()
        },
    }


def main(cases: Sequence[str], output: Path, commit: str) -> None:
    """Measure the cases and write a row for each. Without cases, take those of benchmarks/models/peers.py."""
    from benchmarks.models.peers import CASES

    for case in cases or CASES:
        model, batch = case.split(":")
        row = measure(model, int(batch))
        write_row(output, gpu_and_torch(), commit, row, KEYS["leave_one_out.json"])
        worth = "  ".join(f"{n} {w['worth']:+.1%}" if "worth" in w else f"{n} fails" for n, w in row["without"].items())
        print(f"{case:18} {row['all_ms']:.3f} ms  {worth}", flush=True)
