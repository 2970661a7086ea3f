"""`fusec compile -o model.fusec` and `fusec lock`: what a compilation decided, written down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from fusec.cli import files as cli_io
from fusec.cli.files import AsJson, Report
from fusec.errors import CheckError, FusecError

if TYPE_CHECKING:
    from fusec.execution.compilation import Compiled
    from fusec.lockfile import Kept

# What a command needs is imported inside it, as in commands.py.


class _WriteUnlessNamed(TyperGroup):
    """`fusec lock MODEL` is `fusec lock write MODEL`; a model of a command's name is ./diff."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["write", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_WriteUnlessNamed, help="Write down which plan runs each partition; compare.")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="As for `fusec compile`.")]


def build(
    model: str,
    target: str,
    precision: str,
    shape: Sequence[str] | None,
    disable: Sequence[str] | None,
    report: Report,
    channels_last: bool = False,
) -> Compiled:
    """The model compiled; a `.fusec` file as it was compiled, so that other options are an error."""
    from fusec import driver

    if not model.endswith(".fusec"):
        shapes = cli_io.shapes_of(shape or ())
        options: dict[str, Any] = {"precision": precision, "shapes": shapes, "disable": tuple(disable or ())}
        with cli_io.told_by_label():
            return driver.build(model, target=target, progress=report, channels_last=channels_last, **options)
    compiled = driver.load_artifact(model, target).compiled
    check_options(model, compiled, precision, shape, disable, channels_last)
    return compiled


def check_options(
    model: str,
    compiled: Compiled,
    precision: str,
    shape: Sequence[str] | None,
    disable: Sequence[str] | None,
    channels_last: bool = False,
) -> None:
    """FusecError for options that a model compiled already cannot follow; fp32 is what is meant by none."""
    if precision not in ("fp32", compiled.options.precision):
        raise FusecError(f"{model}: was compiled in {compiled.options.precision}: compile it again for {precision}")
    from fusec.passes.base import UNORDERED, UNROUNDED

    if shape or disable or channels_last:
        of = {UNROUNDED: "--rounding", UNORDERED: "--deterministic"}
        other = of.get(next(iter(disable)), "--disable") if disable else "--channels-last"
        given = "--shape" if shape else other
        raise FusecError(f"{model}: is compiled already: {given} comes too late")


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
    from fusec.gpu import device

    cli_io.check_writable(output)
    disable = cli_io.left_out(disable, deterministic)
    goals, limit = list(dict.fromkeys(target or ["auto"])), cli_io.budget_of(budget)
    entries: list[lockfile.Locked] = []
    with cli_io.progress() as report:
        for goal in goals:
            if not model.endswith(".fusec") and device.is_present(driver.resolve_target(goal)):
                shapes, left_out = cli_io.shapes_of(shape or ()), tuple(disable or ())
                options: dict[str, Any] = {"precision": precision, "shapes": shapes, "disable": left_out}
                options["channels_last"] = channels_last
                net = driver.compile(model, target=goal, tune=tune, budget=limit, progress=report, **options)
                entries += net.lock().entries
            else:  # a .fusec file holds what was chosen
                entries += lockfile.make([build(model, goal, precision, shape, disable, report, channels_last)]).entries
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
    from fusec.lockfile import changes

    before, disable = lockfile.read(old), cli_io.left_out(disable, deterministic)
    if new.endswith((".lock", ".toml")):
        lines = changes.differences(before, lockfile.read(new))
    else:
        with cli_io.progress() as report:
            compiled = build(new, target, precision, shape, disable, report, channels_last)
            lines = changes.changes(before, compiled)
    cli_io.say(cli_io.json_text({"differences": lines}) if as_json else "\n".join(lines) or "no difference")
    if lines:
        raise CheckError(f"{old}: {len(lines)} differences")


def save(path: Path, compiled: Sequence[Compiled], report: Report, kept: Sequence[Kept] | None = None) -> None:
    """Write a `.fusec` file with plans built here, also for GPUs this machine does not have: those of a
    lock that was `kept` to, else the first that cuDNN offers."""
    from fusec.artifacts import fusec_file
    from fusec.gpu.cudnn import plan_serialization
    from fusec.gpu.cudnn.deviceless import cudnn_number
    from fusec.plans.plan_cache import PlanStore
    from fusec.plans.plan_record import Entry

    for each in compiled:
        each.require_answers(f"{path}: a compiled model")
    store = PlanStore()
    plans: dict[tuple[str, str], Sequence[Entry]] = {}
    ready = compiled if kept is None else [each.compiled for each in kept]
    for place, c in enumerate(ready):
        graphs = [lowered.graph for lowered in c.lowered if lowered is not None]
        cudnn = cudnn_number()
        skip = {g.key: [(e, k) for e, k, _ in store.quarantined(g.key, c.target.name, cudnn)] for g in graphs}
        choices = None if kept is None else {key: [choice] for key, choice in kept[place].choices.items()}
        made = plan_serialization.serialize(
            graphs, c.target, choices=choices, skip=skip, progress=lambda done, total: report("plans", done, total)
        )
        plans.update({(c.target.name, key): entries for key, entries in made.items()})
    for entries in plans.values():
        for entry in entries:
            if entry.blob is not None:
                store.trust(entry.blob)  # built by this very machine
    fusec_file.save(path, ready, plans)


def required(path: Path, compiled: Sequence[Compiled]) -> list[Kept]:
    """Each program as a lock has it; CheckError unless that decides every step, by plans not in quarantine."""
    from fusec import lockfile
    from fusec.gpu.cudnn.deviceless import cudnn_number
    from fusec.plans.plan_cache import PlanStore

    lock, store, cudnn = lockfile.read(path), PlanStore(), cudnn_number()
    kept = [lockfile.apply(lock, c) for c in compiled]
    for c, each in zip(compiled, kept, strict=True):
        for key, choice in each.choices.items():
            for engine, knobs, reason in store.quarantined(key, c.target.name, cudnn):
                if (engine, knobs) == choice.identity:
                    raise CheckError(f"{path}: engine {engine} on {c.target.name} is in quarantine: {reason}")
    return kept
