"""Run `fusec bench`: time a model as a whole and step by step, against what the hardware allows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fusec.cli.common import files, output
from fusec.cli.common.options import AsJson, Seed, Target
from fusec.cli.common.request import Request, compiles

# What the command needs is imported inside it, as in commands.py.


@compiles("rounding", "tune", "budget", "locked")
def bench(
    request: Request,
    target: Target = "auto",
    runs: Annotated[int, typer.Option(min=1, help="Number of times that everything is timed.")] = 20,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print time and limit of each step, and compile time by stage.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the steps as a trace that Perfetto opens.")
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Time a model: compilation, calls, all steps together, and each step alone. In simulation without a GPU."""
    from fusec.cli.common.feeds import feeds
    from fusec.diagnostics import step_times
    from fusec.runtime import SimulatorBackend
    from fusec.targets.target import CPU

    files.check_writable(trace)
    with output.progress() as report:
        start = time.perf_counter()
        executable = request.program(target, report)
        compile_s = time.perf_counter() - start
        report("bench", 0, 0)
        measured = step_times.measure(executable, feeds(executable, {}, seed), runs)
    if trace is not None:
        files.write_text(trace, output.json_text(measured.trace()))
    if as_json:
        spent = {} if executable.spent is None else executable.spent.stages
        stages = {what: round(each.seconds, 3) for what, each in spent.items()}
        told = {"model": request.model, "cudnn_asked": executable.asked}
        timed = {"compile_s": compile_s, "compile": stages, **measured.to_json()}
        output.say(output.json_text({**told, **timed}))
        if trace is not None:
            output.wrote(trace, as_json)
        return
    how = "loaded" if request.is_compiled else "compiled"
    output.say(f"{request.model} in {executable.compiled.options.precision}, {how} in {compile_s:.2f} s, {measured}")
    if executable.device in (SimulatorBackend.name, CPU):
        output.say("NumPy ran the steps, so these times say nothing about a GPU")
    output.print_note(executable.note)
    if profile:
        output.say(measured.table())
        if executable.spent is not None:
            output.say(f"compile time by stage\n{executable.spent}")
    if trace is not None:
        output.wrote(trace, as_json)
