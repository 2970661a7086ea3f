"""Run `fusec explain`: show the steps of a program, and the reason for each fusion that was declined."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusec.cli.common import output
from fusec.cli.common.options import AsJson
from fusec.cli.common.request import Request, compiles
from fusec.errors import CheckError, FusecError

if TYPE_CHECKING:
    from fusec.segments.records import SegmentedExplanation

# What the command needs is imported inside it, as in commands.py.


@compiles("rounding")
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
    as_json: AsJson = False,
) -> None:
    """Show which ops fuse into which step on each GPU, and why the others do not."""
    from fusec import driver
    from fusec.diagnostics import explain as explaining
    from fusec.diagnostics.must_fuse import assert_fused
    from fusec.errors import NotOneProgramError

    names = [driver.resolve_target(name).name for name in dict.fromkeys(target.split(","))]
    precision = request.options.precision
    explained: list[tuple[str, explaining.Explanation]] = []
    checks: list[dict[str, Any]] = []
    with output.progress() as report:
        for name in names:
            try:
                compiled = request.build(name, report)
            except NotOneProgramError:
                _explain_segments(request, names, must_fuse or (), as_json)
                return
            explanation = explaining.explain(compiled.program, compiled.target, compiled.judge, cores, report)
            floats = explaining.float_edges(compiled.source, compiled.program, compiled.options)
            explained.append((name, replace(explanation, floats=floats)))
            precision = compiled.options.precision
            for pattern in must_fuse or ():
                compiled.require_answers(f"--must-fuse {pattern!r}")
                miss = ""
                try:
                    assert_fused(compiled.program, pattern, cudnn_only)
                except CheckError as error:
                    miss = str(error)
                checks.append({"target": name, "pattern": pattern, "ok": not miss, "message": miss})
    if as_json:
        targets = [explanation.to_json() for _, explanation in explained]
        data = {"model": request.model, "precision": precision, "targets": targets, "must_fuse": checks}
        output.say(output.json_text(data))
    elif len(explained) > 1:
        reasons = [f"{name}\n{explanation.reasons()}" for name, explanation in explained]
        output.say("\n\n".join([explaining.compare(explained), *reasons]))
    else:
        output.say(explained[0][1])
    missed = [f"{check['target']}: {check['message']}" for check in checks if not check["ok"]]
    if missed:
        raise CheckError("must-fuse does not hold\n" + "\n".join(missed))


def _explain_segments(request: Request, names: Sequence[str], must_fuse: Sequence[str], as_json: bool) -> None:
    """Explain a model with host steps, after one simulated call on random inputs, which meets the later segments."""
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
    if as_json:
        targets = [{"target": name, **explanation.to_json()} for name, explanation in explained]
        output.say(output.json_text({"model": request.model, "targets": targets}))
        return
    for name, explanation in explained:
        output.say(f"{name}, with the values of one simulated call on random inputs\n\n{explanation}")
