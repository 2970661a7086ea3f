"""Run `fusec compile -o model.fusec` and `fusec lock`: write the choices of a compilation to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from fusec.cli import files as cli_io
from fusec.cli.files import AsJson, Report
from fusec.cli.request import Request
from fusec.errors import CheckError

if TYPE_CHECKING:
    from fusec.execution.compilation import Compiled
    from fusec.lockfile import LockedProgram

# What a command needs is imported inside it, as in commands.py.


class _WriteUnlessNamed(TyperGroup):
    """Commands of `fusec lock`; `fusec lock MODEL` is `fusec lock write MODEL`.

    A model whose file is named as a command is given as ./diff.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["write", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_WriteUnlessNamed, help="Write down which plan runs each partition; compare.")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="As for `fusec compile`.")]


@app.command()
def write(
    model: Model,
    target: Annotated[
        list[str] | None,
        typer.Option(help="A GPU of `fusec targets`; may be repeated. auto: this machine's, or an H200."),
    ] = None,
    precision: cli_io.Precision = "fp32",
    shape: cli_io.Shapes = None,
    disable: cli_io.Disable = None,
    deterministic: cli_io.Deterministic = False,
    channels_last: cli_io.ChannelsLast = False,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")] = Path("fusec.lock"),
    tune: cli_io.Tune = "quick",
    budget: cli_io.Budget = None,
    as_json: AsJson = False,
) -> None:
    """Write in which form and by which plan or kernel each step runs: the fastest on this machine's GPU; for others
    what the cost model says and the first plan that cuDNN builds; of a .fusec file its own."""
    from fusec import driver, lockfile
    from fusec.execution.compile_options import CompileOptions
    from fusec.gpu import device

    cli_io.check_writable(output)
    options = CompileOptions(
        precision=precision,
        tune=tune,
        budget_s=cli_io.budget_of(budget),
        disable=disable or (),
        deterministic=deterministic,
        channels_last=channels_last,
    )
    request, goals = Request(model, shape, options), list(dict.fromkeys(target or ["auto"]))
    entries: list[lockfile.Locked] = []
    with cli_io.progress() as report:
        for goal in goals:
            if not request.is_compiled and device.is_present(driver.resolve_target(goal)):
                entries += request.executable(goal, report).lock().entries
            else:  # a .fusec file holds what was chosen
                entries += lockfile.make([request.build(goal, report)]).entries
    lock = lockfile.Lock(lockfile.versions(), lockfile.in_order(entries))
    lockfile.write(output, lock)
    count = sum(entry.name != lockfile.WHOLE for entry in lock.entries)
    cli_io.say(cli_io.json_text({"partitions": count}) if as_json else f"{count} partitions locked in {output}")


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(metavar="LOCK", help="A lock.")],
    new: Annotated[str, typer.Argument(metavar="LOCK|MODEL", help="Another, or a model to compile with this cuDNN.")],
    target: Annotated[str, typer.Option(help="For a model: a GPU of `fusec targets`.")] = "auto",
    precision: cli_io.Precision = "fp32",
    shape: cli_io.Shapes = None,
    disable: cli_io.Disable = None,
    deterministic: cli_io.Deterministic = False,
    channels_last: cli_io.ChannelsLast = False,
    as_json: AsJson = False,
) -> None:
    """Say what differs between two locks, or what this cuDNN and GPU would change; no GPU is needed."""
    from fusec import lockfile
    from fusec.execution.compile_options import CompileOptions
    from fusec.lockfile import changes

    before = lockfile.read(old)
    options = CompileOptions(
        precision=precision, disable=disable or (), deterministic=deterministic, channels_last=channels_last
    )
    if new.endswith((".lock", ".toml")):
        lines = changes.differences(before, lockfile.read(new))
    else:
        with cli_io.progress() as report:
            lines = changes.changes(before, Request(new, shape, options).build(target, report))
    cli_io.say(cli_io.json_text({"differences": lines}) if as_json else "\n".join(lines) or "no difference")
    if lines:
        raise CheckError(f"{old}: {len(lines)} differences")


def save(
    path: Path, compiled: Sequence[Compiled], report: Report, locked: Sequence[LockedProgram] | None = None
) -> None:
    """Write a `.fusec` file with plans built here, also for GPUs that this machine does not have.

    locked: the plans of a lock; None: the first that cuDNN offers.
    """
    from fusec.artifacts import fusec_file
    from fusec.gpu.cudnn import plan_serialization
    from fusec.gpu.cudnn.deviceless import cudnn_number
    from fusec.plans.plan_cache import PlanStore
    from fusec.plans.plan_record import Entry

    for each in compiled:
        each.require_answers(f"{path}: a compiled model")
    store = PlanStore()
    plans: dict[tuple[str, str], Sequence[Entry]] = {}
    ready = compiled if locked is None else [each.compiled for each in locked]
    for place, c in enumerate(ready):
        graphs = [lowered.graph for lowered in c.lowered if lowered is not None]
        cudnn = cudnn_number()
        skip = {g.key: [(e, k) for e, k, _ in store.quarantined(g.key, c.target.name, cudnn)] for g in graphs}
        choices = None if locked is None else {key: [choice] for key, choice in locked[place].choices.items()}
        made = plan_serialization.serialize(
            graphs, c.target, choices=choices, skip=skip, progress=lambda done, total: report("plans", done, total)
        )
        plans.update({(c.target.name, key): entries for key, entries in made.items()})
    for entries in plans.values():
        for entry in entries:
            if entry.blob is not None:
                store.trust(entry.blob)  # built by this very machine
    fusec_file.save(path, ready, plans)


def required(path: Path, compiled: Sequence[Compiled]) -> list[LockedProgram]:
    """Apply a lock to each program. Raises CheckError if a step has no entry, or its plan is in quarantine."""
    from fusec import lockfile
    from fusec.gpu.cudnn.deviceless import cudnn_number
    from fusec.plans.plan_cache import PlanStore

    lock, store, cudnn = lockfile.read(path), PlanStore(), cudnn_number()
    programs = [lockfile.apply(lock, c) for c in compiled]
    for c, each in zip(compiled, programs, strict=True):
        for key, choice in each.choices.items():
            for engine, knobs, reason in store.quarantined(key, c.target.name, cudnn):
                if (engine, knobs) == choice.identity:
                    raise CheckError(f"{path}: engine {engine} on {c.target.name} is in quarantine: {reason}")
    return programs
