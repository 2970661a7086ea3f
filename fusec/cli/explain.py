"""Run `fusec explain`: show the steps of a program, and the reason for each fusion that was declined."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusec.cli.common import colour, files, output
from fusec.cli.common.options import AsJson
from fusec.cli.common.request import Request, compiles
from fusec.errors import CheckError, FusecError
from fusec.system.dataclass import dataclass

if TYPE_CHECKING:
    from fusec.diagnostics.explain import Explanation
    from fusec.segments.records import SegmentedExplanation

# Imports that only a command needs are inside it: see commands.py.


@compiles("rounding", "budget")
def explain(
    request: Request,
    target: Annotated[str, typer.Option(help="GPUs of `fusec targets`, joined by commas.")] = "auto",
    must_fuse: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Fail unless sequences of ops like 'conv*+add+relu' are one step each."),
    ] = None,
    cudnn_only: Annotated[
        bool, typer.Option("--cudnn-only", help="With --must-fuse: only steps that cuDNN runs count.")
    ] = False,
    cores: Annotated[bool, typer.Option(help="Reduce each refusal to its smallest core (asks cuDNN more).")] = True,
    summary: Annotated[
        bool, typer.Option("--summary", help="Print the totals, and how many steps there are of each kind.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Print each step, also those of equal layers, which are shown once otherwise.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write this to a file; as JSON if *.json.")
    ] = None,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Spread the targets over the workers of this Dask cluster.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which ops fuse into which step on each GPU, and why the others do not."""
    from fusec import driver

    files.check_writable(file)
    printer = _Printer(file, as_json, summary, every)
    names = [driver.resolve_target(name).name for name in dict.fromkeys(target.split(","))]
    search = cores and not summary and request.options.budget_s == math.inf
    question = _Question(request, tuple(must_fuse or ()), cudnn_only, search)
    with output.progress() as report:
        if dask is None:
            found = (_explained(question, name, report) for name in names)
            answers = list(itertools.takewhile(lambda answer: answer is not None, found))
        else:
            from fusec.dask import spread

            there = replace(question, request=request.with_absolute_paths())
            answers = spread(dask, partial(_explained, there), names, partial(report, "targets"))
    several = [answer for answer in answers if answer is not None]
    if len(several) < len(names):
        if dask is not None:
            raise FusecError(f"{request.model}: has host steps, whose segments --dask does not spread: leave it out")
        _explain_segments(request, names, must_fuse or (), printer)
        return
    explained = [(name, answer.explanation) for name, answer in zip(names, several, strict=True)]
    targets = [explanation.to_json() for _, explanation in explained]
    checks = [check for answer in several for check in answer.checks]
    precision = several[-1].precision
    data = {"model": request.model, "precision": precision, "targets": targets, "must_fuse": checks}
    printer.show(data, lambda width: _text(explained, printer, width), [e.summary for _, e in explained])
    missed = [f"{check['target']}: {check['message']}" for check in checks if not check["ok"]]
    if missed:
        raise CheckError("must-fuse does not hold\n" + "\n".join(missed))


@dataclass(frozen=True)
class _Question:
    """Options for the explanation of each target. cores: reduce each refusal to its smallest core."""

    request: Request
    must_fuse: tuple[str, ...]
    cudnn_only: bool
    cores: bool


@dataclass(frozen=True)
class _Answer:
    """The explanation for one target. checks: what --json prints for each pattern of --must-fuse."""

    explanation: Explanation
    precision: str
    checks: tuple[dict[str, Any], ...]


def _explained(question: _Question, target: str, report: output.Report = lambda *_: None) -> _Answer | None:
    """Explain the program for one target, in any process; return None for a model with host steps."""
    from fusec.diagnostics import explain as explaining
    from fusec.diagnostics.must_fuse import assert_fused
    from fusec.errors import NotOneProgramError

    try:
        compiled = question.request.build(target, report)
    except NotOneProgramError:
        return None
    explanation = explaining.explain(compiled.program, compiled.target, compiled.judge, question.cores, report)
    checks: list[dict[str, Any]] = []
    for pattern in question.must_fuse:
        compiled.require_answers(f"--must-fuse {pattern!r}")
        miss = ""
        try:
            assert_fused(compiled.program, pattern, question.cudnn_only)
        except CheckError as error:
            miss = str(error)
        checks.append({"target": target, "pattern": pattern, "ok": not miss, "message": miss})
    floats = explaining.float_edges(compiled)
    return _Answer(replace(explanation, floats=floats), compiled.options.precision, tuple(checks))


@dataclass(frozen=True)
class _Printer:
    """Print an explanation, or write it to a file, whole or as a summary."""

    file: Path | None
    as_json: bool
    summary: bool
    every: bool

    def text(self, explanation: Explanation | SegmentedExplanation, width: int) -> str:
        """Return an explanation, or its summary."""
        return explanation.overview(width) if self.summary else explanation.text(width, fold=not self.every)

    def show(self, data: dict[str, Any], text: Callable[[int], str], summaries: Sequence[str]) -> None:
        """Print the explanation; if it goes to a file, print the summaries alone. text: returns it for a width."""
        if self.as_json:
            output.say(output.json_text(data))
        elif self.file is None:
            output.show(text(colour.width()))
        else:
            output.say("\n".join(summaries))
        if self.file is not None:
            files.write_text(self.file, output.json_text(data) if self.file.suffix == ".json" else text(colour.WIDTH))
            output.wrote(self.file, self.as_json)


def _text(explained: Sequence[tuple[str, Explanation]], printer: _Printer, width: int) -> str:
    """Return the explanation for one target, or the comparison of several with the reasons of each."""
    from fusec.diagnostics.explain import compare

    if len(explained) == 1:
        return printer.text(explained[0][1], width)
    reasons = [] if printer.summary else [f"{name}\n{explanation.reasons(width)}" for name, explanation in explained]
    return "\n\n".join([compare(explained), *reasons])


def _explain_segments(request: Request, names: Sequence[str], must_fuse: Sequence[str], printer: _Printer) -> None:
    """Explain a model with host steps, after one simulated call on random inputs, which compiles the later segments."""
    from fusec.cli.common import feeds as running
    from fusec.segments.executable import SegmentedExecutable

    explained: list[tuple[str, SegmentedExplanation]] = []
    with output.progress() as report:
        for name in names:
            executable = request.executable(name, report, simulate=True)
            assert isinstance(executable, SegmentedExecutable)
            report("run", 0, 0)
            try:
                executable.run(None, running.feeds(executable, {}, 0))
            except FusecError as error:
                what = "the call on random inputs failed, so that the segments after it are not shown"
                warnings.warn(f"{what}: {error}", stacklevel=2)
            for pattern in must_fuse:
                executable.assert_fused(pattern)
            explained.append((name, executable.explain()))
    targets = [{"target": name, **explanation.to_json()} for name, explanation in explained]

    def text(width: int) -> str:
        how = "with the values of one simulated call on random inputs"
        return "\n".join(f"{name}, {how}\n\n{printer.text(explanation, width)}" for name, explanation in explained)

    summaries = [f"{name}: {explanation.summary}" for name, explanation in explained]
    printer.show({"model": request.model, "targets": targets}, text, summaries)
