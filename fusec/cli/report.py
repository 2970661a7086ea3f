"""Run `fusec report`: write what is known of a compiled model as one HTML page, and compare two models on one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusec.cli.common import files, output, verbosity
from fusec.cli.common.groups import WriteUnlessNamed
from fusec.cli.common.options import AsJson, Seed, Target
from fusec.cli.common.request import Request, compiles
from fusec.errors import FusecError
from fusec.system.dataclass import dataclass

if TYPE_CHECKING:
    from fusec.report import ReportedProgram
    from fusec.segments.executable import SegmentedExecutable

# Imports that only a command needs are inside it: see commands.py.

app = typer.Typer(
    cls=WriteUnlessNamed, help="Write one HTML page about a model (`fusec report MODEL`), or one that compares two."
)

Output = Annotated[Path, typer.Option("-o", "--output", help="The page to write.")]
Cores = Annotated[bool, typer.Option(help="Reduce each refusal to its smallest core (asks cuDNN more).")]
Runs = Annotated[int, typer.Option(min=1, help="On a GPU: number of times that everything is timed.")]


@dataclass(frozen=True)
class _PageOptions:
    """Options of a page. runs: timed runs on a GPU. seed: seed of their random inputs."""

    cores: bool
    runs: int
    seed: int


@app.command()
@verbosity.with_verbosity
@compiles("rounding", "tune", "budget", "locked")
def write(
    request: Request,
    target: Target = "auto",
    file: Output = Path("report.html"),
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Also compile for every GPU of `fusec targets`, and compare them.")
    ] = False,
    cores: Cores = True,
    runs: Runs = 20,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Write a page: steps, plans, refusals, limits and times, memory, precision. It opens without a network."""
    from fusec import report as pages

    pages.need_jinja()
    files.check_writable(file)
    with output.progress() as progress:
        programs = _programs(request, target, _PageOptions(cores, runs, seed), progress)
        fleet_programs = _fleet(request, programs[0], progress) if fleet else []
    side = pages.fleet(fleet_programs) if fleet_programs else None
    data: dict[str, Any] = {"programs": list(map(pages.totals_json, programs))}
    if side is not None:
        data["fleet"] = list(map(pages.totals_json, fleet_programs))
    words = ", ".join(_words(program) for program in programs)
    page = pages.report_page(Path(request.model).name, programs, side)
    _write(file, page, programs, {"model": request.model}, data, words, as_json)


_New = Annotated[str, typer.Argument(metavar="NEW", help="Another model or .fusec file, or the same for another GPU.")]


@app.command()
@verbosity.with_verbosity
@compiles("rounding", "tune", "budget", model=_New)
def diff(
    old: Annotated[str, typer.Argument(metavar="OLD", help="A model or .fusec file.")],
    request: Request,
    target: Annotated[
        str, typer.Option("--target", help="A GPU of `fusec targets` for both, or two joined by a comma: OLD's, NEW's.")
    ] = "auto",
    file: Output = Path("diff.html"),
    cores: Cores = True,
    runs: Runs = 20,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Write a page that compares two versions of a model, or one model on two GPUs: what fuses or runs differently."""
    from fusec import report as pages

    pages.need_jinja()
    files.check_writable(file)
    targets = target.split(",")
    if pages_given := [name for name in (old, request.model) if name.endswith((".html", ".htm"))]:
        raise FusecError(
            f"{pages_given[0]}: is a page; `fusec report diff` compares models or .fusec files: give these"
        )
    if len(targets) > 2:
        raise FusecError(f"--target {target}: names more than two GPUs; `fusec report MODEL --fleet` compares all")
    options = _PageOptions(cores, runs, seed)
    programs: list[ReportedProgram] = []
    with output.progress() as progress:
        for model, name in zip((old, request.model), (targets[0], targets[-1]), strict=True):
            found = _programs(replace(request, model=model), name, options, progress)
            if len(found) > 1:
                raise FusecError(f"{model}: has host steps, and only models of one program are compared")
            programs += found
    side = pages.difference(programs[0], programs[1], _names((old, request.model), programs))
    data = {
        "old": pages.totals_json(programs[0]),
        "new": pages.totals_json(programs[1]),
        "groups": side.count,
        "different": side.places_different,
        "other_plans": side.places_replanned,
    }
    words = f"{data['different']} of {side.count} groups of steps run differently"
    models = {"old_model": old, "new_model": request.model}
    _write(file, pages.difference_page(side), programs, models, data, words, as_json)


def _write(
    file: Path,
    page: str,
    programs: Sequence[ReportedProgram],
    models: dict[str, str],
    data: dict[str, Any],
    words: str,
    as_json: bool,
) -> None:
    """Write a page, and print where it is and what it is about."""
    files.write_text(file, page)
    asked = all(program.explanation.asked for program in programs)
    written = {**models, "output": str(file), "bytes": file.stat().st_size, "cudnn_asked": asked}
    output.result({**written, **data}, words, as_json)
    if not as_json:
        output.print_note(next((p.explanation.note for p in programs if p.explanation.note), ""))
    output.wrote(file, as_json)


def _words(program: ReportedProgram) -> str:
    from fusec.schedule.program import counts

    where = "simulated" if program.is_simulated else f"measured on {program.device}"
    steps = counts(len(program.steps), len(program.working))
    return f"{steps} for {program.target} in {program.precision}, {where}"


def _names(models: Sequence[str], programs: Sequence[ReportedProgram]) -> tuple[str, str]:
    """Name the two sides by what differs: files, targets or precisions."""
    short = [Path(model).name for model in models]
    for names in (
        short,
        [f"{name} on {program.target}" for name, program in zip(short, programs, strict=True)],
        [f"{name} in {program.precision}" for name, program in zip(short, programs, strict=True)],
        models,
    ):
        if names[0] != names[1]:
            return names[0], names[1]
    return f"{short[0]} (old)", f"{short[1]} (new)"


def _programs(request: Request, target: str, options: _PageOptions, progress: output.Report) -> list[ReportedProgram]:
    """Return the program of a model, measured if its GPU is in this machine; several if the model has host steps."""
    from fusec import report as pages
    from fusec.cli.common.feeds import feeds
    from fusec.compiler.build_plans import apply_lock
    from fusec.diagnostics import step_times
    from fusec.errors import NotOneProgramError
    from fusec.plans.plan_record import Entry
    from fusec.segments.executable import SegmentedExecutable

    title = Path(request.model).name
    if _is_present(request, target):
        executable = request.executable(target, progress)
        if isinstance(executable, SegmentedExecutable):
            return _segments(request, executable, options, progress)
        bench = None
        if executable.device not in step_times.WITHOUT_GPU:
            progress("bench", 0, 0)
            bench = step_times.measure(executable, feeds(executable, {}, options.seed), options.runs)
        return [pages.of_executable(executable, title, cores=options.cores, bench=bench)]
    plans: dict[str, Any] = {}
    try:
        if request.is_compiled:
            artifact = request.artifact(target)
            compiled, plans = artifact.compiled, dict(artifact.plans)
        else:
            compiled = request.build(target, progress)
            if request.options.lock is not None:
                (locked,) = apply_lock(Path(request.options.lock), [compiled])
                compiled, plans = locked.compiled, {key: (Entry(choice),) for key, choice in locked.choices.items()}
    except NotOneProgramError:
        segmented = request.executable(target, progress, simulate=True)
        assert isinstance(segmented, SegmentedExecutable)
        return _segments(request, segmented, options, progress)
    explanation = pages.explained(compiled, options.cores, progress)
    return [pages.of_compiled(compiled, explanation, pages.Background(title, plans=plans))]


def _is_present(request: Request, target: str) -> bool:
    """Tell if the target is this machine's GPU."""
    from fusec import driver
    from fusec.compiler import load_file
    from fusec.gpu import device
    from fusec.targets.target import load

    if request.is_compiled:
        return device.is_present(load(load_file.target_of(request.model, target)))
    return device.is_present(driver.resolve_target(target))


def _segments(
    request: Request, executable: SegmentedExecutable, options: _PageOptions, progress: output.Report
) -> list[ReportedProgram]:
    """Return the programs of a model with host steps. One call on random inputs compiles the later ones."""
    from fusec import report as pages
    from fusec.cli.common.feeds import feeds

    progress("run", 0, 0)
    try:
        executable.run(None, feeds(executable, {}, options.seed))
    except FusecError as error:
        what = "the call on random inputs failed, so that the segments after it are not shown"
        warnings.warn(f"{what}: {error}", stacklevel=2)
    found: list[ReportedProgram] = []
    for number, (program, record) in enumerate(executable.last_segments()):
        if program is not None:
            title = f"{Path(request.model).name}, segment {number}"
            found.append(pages.of_executable(program, title, cores=options.cores, anchor=f"segment-{number}-"))
        if found:
            rows = tuple(map(pages.host_step_row, record.steps))
            found[-1] = replace(found[-1], host_steps=found[-1].host_steps + rows)
    if not found:
        raise FusecError(f"{request.model}: no segment has a program: all of the model runs on the host")
    return found


def _fleet(request: Request, known: ReportedProgram, progress: output.Report) -> list[ReportedProgram]:
    """Return the programs for every GPU: those of `fusec targets`, or those that a .fusec file was compiled for."""
    from fusec import report as pages
    from fusec.artifacts import fusec_file
    from fusec.targets.target import names

    found: list[ReportedProgram] = []
    for name in fusec_file.targets(request.model) if request.is_compiled else names():
        if name == known.target and known.is_simulated:
            found.append(known)
            continue
        compiled = request.build(name, progress)
        explanation = pages.explained(compiled, cores=False)
        found.append(pages.of_compiled(compiled, explanation, pages.Background(name)))
    return found
