"""Measure what each kernel family is worth: models compiled without one family at a time.

Runs through `python -m benchmarks.kernels.kernel_times --leave-one-out [MODEL:BATCH[:FORM] ...]`, on a machine with a
GPU and torch; benchmarks/kernels/leave_one_out_cases.py says which models there are. Only families that run a step of a
model are left out of it, because the others cannot change its program. A family that has several variants of a kernel
is also measured with its first variant alone. `--families a,b` leaves out these families only, and adds their figures
to the row. The programs with and without a family are timed in turns, as soon as both are compiled. The row is written
then, so that a run that is stopped (`--seconds`) loses little. `--dry` needs no GPU: it lists the families that can run
steps of a model. Writes benchmarks/results/leave_one_out.json; `python -m benchmarks.common.result_files FILE` adds
rows from another machine.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks.common.result_files import KEYS, earlier_row
from fusec.errors import FusecError
from fusec.gpu import kernels
from fusec.gpu.kernels import Family, GpuFigures, Kernel
from fusec.ir import Node, Value
from fusec.runtime import Executable
from fusec.schedule.program import Kind, Partition

if TYPE_CHECKING:
    from benchmarks.common.attempt import Attempt
    from benchmarks.kernels.leave_one_out_cases import Case

ALONE = "{} with one variant"
TOLERANCE = 2e-2  # relative L2 of a whole model in fp16


@dataclass(frozen=True)
class Settings:
    """Options that all cases share.

    families: those to leave out; all that run a step if empty.
    seconds: limit of the whole run; 0 is no limit.
    dry: list the families, and measure nothing.
    """

    families: tuple[str, ...]
    seconds: float
    dry: bool


def used_families(steps: Sequence[Partition], figures: GpuFigures) -> dict[str, int]:
    """Count the steps of each kernel family. A family with variants is counted under a second name, too.

    steps: those that a kernel runs.
    figures: figures of the GPU that they run on.
    """
    counts: dict[str, int] = {}
    for step in steps:
        families = kernels.families_for(step.nodes)  # no `find`: cached
        offers = ((f.__name__, f(step.nodes, step.outputs, figures)) for f in families)
        for name, kernel in ((name, kernel) for name, kernel in offers if kernel is not None):
            for each in (name, *([ALONE.format(name)] if kernel.others else [])):
                counts[each] = counts.get(each, 0) + 1
            break
    return counts


@contextmanager
def left_out(name: str) -> Generator[None]:
    """Leave out a kernel family, or all variants of its kernels but the first."""
    with (
        patch.object(kernels, "FAMILIES", _without(name, kernels.FAMILIES)),
        patch.object(kernels, "NARROW_FAMILIES", _without(name, kernels.NARROW_FAMILIES)),
    ):
        yield


def _without(name: str, families: Sequence[Family]) -> tuple[Family, ...]:
    left: list[Family] = []
    for family in families:
        if name == ALONE.format(family.__name__):
            left.append(_with_one_variant(family))
        elif name != family.__name__:
            left.append(family)
    return tuple(left)


def _with_one_variant(family: Family) -> Family:
    def first(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
        kernel = family(nodes, outputs, figures)
        return None if kernel is None else replace(kernel, others=())

    return first


def measure(case: Case, row: dict[str, Any], wanted: Sequence[str], attempt: Attempt) -> None:
    """Compile a model with all families and without each that it uses, and time both programs in turns.

    row: gets the median times in ms, and is written after each family.
    wanted: the families to leave out; all that run a step if empty.
    """
    from benchmarks.common.torch_timing import free_memory, relative_l2, timed

    with tempfile.TemporaryDirectory() as folder:
        os.environ["FUSEC_CACHE"] = f"{folder}/all"
        whole = case.start(case.compile())
        row["all_ms"] = timed({}, spans={"all": whole.span})["all"]["median_ms"]
        steps = [step for step in whole.program.compiled.program.steps if step in whole.program.kernels]
        used = used_families(steps, whole.program.compiled.figures)
        attempt.say(f"{named(row)}: {row['all_ms']:.3f} ms with all families; {used}")
        for name, count in used.items():
            if wanted and name not in wanted:
                continue
            # cuDNN's verdicts still hold, but choices of plans must be made anew
            os.environ["FUSEC_CACHE"] = f"{folder}/{name}"
            shutil.copytree(f"{folder}/all", f"{folder}/{name}", ignore=shutil.ignore_patterns("plans"))
            found: dict[str, Any] = {"steps": count}
            row["without"][name] = found
            try:
                with left_out(name):
                    other = case.start(case.compile())
            except (FusecError, ValueError) as error:  # a choice may need the family that is left out
                found["failed"] = str(error)
            else:
                if relative_l2(other.results, whole.results) > TOLERANCE:
                    raise RuntimeError(f"{named(row)} without {name} gives other results")
                times = timed({}, spans={"all": whole.span, name: other.span})
                found |= {**times[name], "all_ms": times["all"]["median_ms"]}
                found["worth"] = found["median_ms"] / found["all_ms"] - 1
                del other
                free_memory()
            attempt.keep(row)
            worth = f"{found['worth']:+.1%}" if "worth" in found else f"needed: {found['failed']}"
            attempt.say(f"{named(row)}: {name} {worth}")


def named(row: Mapping[str, Any]) -> str:
    """Name the model of a row, as tables show it: `vit_b_16 b32`, or `vit_b_16 training b32, 2 layers`."""
    form = "" if row.get("form", "fp16") == "fp16" else f"{row['form']} "
    smaller = "".join(f", {row[name]} {name}" for name in ("layers", "steps") if name in row)
    return f"{row['model']} {form}b{row['batch']}{smaller}"


def list_families(case: Case) -> dict[str, int]:
    """Count the steps of a program for an H200 that each family could run, cuDNN's included.

    Measured times decide on a GPU.
    """
    made = case.compile(target="h200", simulate=True)
    compiled = (made if isinstance(made, Executable) else made.programs[0]).compiled
    steps = [step for step in compiled.program.steps if step.kind is not Kind.VIEW]
    return used_families(steps, compiled.figures)


def main(cases: Sequence[str], settings: Settings, output: Path, commit: str) -> int:
    """Measure the cases and write a row for each. Without cases, take those of benchmarks/models/peers.py.

    Returns 1 if a case fails, or if the time is over; cases after one that fails are measured.
    """
    from benchmarks.common.attempt import Attempt, TooLongError, within
    from benchmarks.models.peers import CASES

    output.parent.mkdir(parents=True, exist_ok=True)
    attempt, failed = Attempt(output, commit), 0
    try:
        with within(settings.seconds):
            for text in cases or CASES:
                try:
                    measure_case(text, settings, attempt)
                except (FusecError, ValueError, RuntimeError) as error:
                    attempt.say(f"{text} failed: {error}")
                    failed = 1
    except TooLongError as reason:
        attempt.say(f"stopped: {reason}")
        return 1
    return failed


def measure_case(text: str, settings: Settings, attempt: Attempt) -> None:
    """Measure MODEL:BATCH[:FORM], or list its families."""
    from benchmarks.common.torch_timing import free_memory
    from benchmarks.kernels.leave_one_out_cases import prepare

    with tempfile.TemporaryDirectory() as folder:
        case = prepare(text, Path(folder))
        if settings.dry:
            attempt.say(f"{text}: {list_families(case)}")
            return
        row = case.row() | {"without": dict[str, Any](), "part": bool(settings.families)}
        if settings.families:
            row["without"] |= earlier_row(attempt.output, row, KEYS[attempt.output.name]).get("without", {})
        measure(case, row, settings.families, attempt)
    free_memory()
