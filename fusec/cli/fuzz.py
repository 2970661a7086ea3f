"""Run `fusec fuzz` and `fusec fuzz replay`: options, progress, report."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusec.cli.common import output
from fusec.cli.common.options import AsJson, seconds_of
from fusec.errors import CheckError, FusecError

if TYPE_CHECKING:
    from fusec.testing.runner.report import FuzzReport

# Imports that only a command needs are inside it: see commands.py; Hypothesis is an optional dependency.

LINE_S = 30.0  # between lines of progress where there is no terminal

app = typer.Typer(invoke_without_command=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def fuzz(
    context: typer.Context,
    time: Annotated[str | None, typer.Option(metavar="60s", help="Stop after this time: 60s, 10m, 1h.")] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="Stop after this number of graphs; 2000 without --time.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random graphs.")] = 0,
    property: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run only this property, or your own FILE.py:FUNCTION; may be repeated."),
    ] = None,
    graphs: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Strategy that draws the graphs: MODULE:NAME, or your own FILE.py:NAME."),
    ] = None,
    target: Annotated[str, typer.Option(help="A GPU of `fusec targets`.")] = "h200",
    device: Annotated[bool, typer.Option("--device", help="Also run the properties that need a GPU.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes; by default one for each core.")
    ] = None,
    database: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder that records finished work; by default in fusec's cache folder."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the records of the database first.")] = False,
    findings: Annotated[Path, typer.Option(metavar="DIR", help="Folder for findings.")] = Path("fusec-findings"),
    max_findings: Annotated[int, typer.Option(min=1, help="Stop after this number of findings.")] = 10,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Spread the run over the workers of this Dask cluster.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run properties of fusion on random graphs. A graph that fails is shrunk and written as a folder."""
    if context.invoked_subcommand is not None:
        return
    from fusec.testing import fuzz as fuzzing
    from fusec.testing.resolve import GRAPHS

    options: dict[str, Any] = {
        "properties": property,
        "time": None if time is None else seconds_of(time, "--time"),
        "examples": examples,
        "seed": seed,
        "target": target,
        "device": device,
        "max_findings": max_findings,
        "graphs": graphs or GRAPHS,
    }
    if dask is not None:
        if workers is not None or database is not None or fresh:
            raise FusecError("--dask runs as many processes as the cluster has threads, and records no finished work")
        from fusec.dask import fuzz_cluster

        report = fuzz_cluster(dask, findings, options)
    else:
        with _display(sys.stderr.isatty()) as show:
            try:
                report = fuzzing.fuzz(
                    **options, workers=workers, database=database, fresh=fresh, findings=findings, progress=show
                )
            except fuzzing.FuzzInterrupted as stop:
                _print(stop.report, as_json)
                raise
    _print(report, as_json)
    if not report.ok:
        raise CheckError(
            f"{len(report.findings)} findings in {findings}: `fusec fuzz replay {findings}` runs them again"
        )
    if not report.examples:
        raise CheckError("no graph was checked within this time: give more --time")


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A finding, or a folder of findings.")],
    as_json: AsJson = False,
) -> None:
    """Run saved findings again, and list which still fail and which are fixed."""
    from fusec.testing import finding_folder as findings
    from fusec.testing.runner.report import short
    from fusec.testing.runner.worker_process import check_apart

    rows: list[dict[str, Any]] = []
    for place in findings.folders(folder):
        name = ""
        try:
            finding = findings.load(place)
            name = finding.property
            failure = check_apart(finding)
            words = "" if failure is None else failure.message.strip() or failure.error
        except FusecError as error:  # a finding that cannot run counts as failing, because it may not be fixed
            words = f"cannot be run: {error}"
        rows.append({"folder": str(place), "property": name, "fails": bool(words), "message": words})
        if not as_json:
            state = f"still fails: {words.splitlines()[0]}" if words else "fixed"
            output.say(f"{place}: {short(name)}{': ' if name else ''}{state}", flush=True)
    failing = sum(row["fails"] for row in rows)
    if as_json:
        output.say(output.json_text({"findings": rows, "failing": failing}))
    if failing:
        raise CheckError(f"{failing} of {len(rows)} findings still fail")


def _print(report: FuzzReport, as_json: bool) -> None:
    output.result(report.to_json(), report, as_json)
    sys.stdout.flush()


@contextlib.contextmanager
def _display(terminal: bool) -> Generator[Callable[[FuzzReport], None]]:
    """Show progress on stderr: one line that changes on a terminal, else a new line every LINE_S seconds."""
    if terminal:
        # here, because importing rich takes as long as `fusec --help`
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(stderr=True), transient=True, refresh_per_second=4) as live:
            yield lambda report: live.update(Text(f"{report.seconds:5.0f} s  {report.line}"))
        return
    last = time.monotonic()

    def line(report: FuzzReport) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_S:
            last = time.monotonic()
            output.say(f"fusec fuzz: {report.seconds:.0f} s, {report.line}", file=sys.stderr, flush=True)

    yield line
