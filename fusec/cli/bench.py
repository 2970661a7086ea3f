"""`fusec bench`: how long a model takes, as a whole and step by step, against what the hardware allows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fusec.cli import files as cli_io
from fusec.cli.request import Request

# What the command needs is imported inside it, as in commands.py.


def bench(
    model: cli_io.Model,
    target: cli_io.Target = "auto",
    precision: cli_io.Precision = "fp32",
    shape: cli_io.Shapes = None,
    disable: cli_io.Disable = None,
    deterministic: cli_io.Deterministic = False,
    rounding: cli_io.Rounding = "fused",
    channels_last: cli_io.ChannelsLast = False,
    tune: cli_io.Tune = "quick",
    budget: cli_io.Budget = None,
    locked: cli_io.Locked = None,
    runs: Annotated[int, typer.Option(min=1, help="How many times everything is timed.")] = 20,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print each step with its time and limit, and where compile time went.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the steps as a trace that Perfetto opens.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random inputs.")] = 0,
    as_json: cli_io.AsJson = False,
) -> None:
    """Time a model: compiling it, calling it, its steps at once and one by one. In simulation without a GPU."""
    from fusec.cli import run
    from fusec.cli import step_times as timing
    from fusec.execution.compile_options import CompileOptions
    from fusec.runtime import SimulatorBackend
    from fusec.targets.target import CPU

    cli_io.check_writable(trace)
    request = Request(
        model,
        shape,
        CompileOptions(
            precision=precision,
            tune=tune,
            budget_s=cli_io.budget_of(budget),
            disable=disable or (),
            rounding=rounding,
            deterministic=deterministic,
            channels_last=channels_last,
            lock=locked,
        ),
    )
    with cli_io.progress() as report:
        start = time.perf_counter()
        executable = request.executable(target, report)
        compile_s = time.perf_counter() - start
        report("bench", 0, 0)
        measured = timing.measure(executable, run.feeds(executable, {}, seed), runs)
    if trace is not None:
        text = cli_io.json_text(measured.trace()) + "\n"
        cli_io.write_whole(trace, lambda file: file.write(text.encode()))
    if as_json:
        spent = {} if executable.spent is None else executable.spent.by_what
        parts = {what: round(each.seconds, 3) for what, each in spent.items()}
        told = {"model": model, "cudnn_asked": executable.compiled.asked, "compile_s": compile_s, "compile": parts}
        cli_io.say(cli_io.json_text({**told, **measured.to_json()}))
        return
    how = "loaded" if model.endswith(".fusec") else "compiled"
    cli_io.say(f"{model} in {executable.compiled.options.precision}, {how} in {compile_s:.2f} s, {measured}")
    if executable.device in (SimulatorBackend.name, CPU):
        cli_io.say("NumPy ran the steps: these times say nothing of a GPU")
    cli_io.print_note(executable.compiled.note)
    if profile:
        cli_io.say(measured.table())
        if executable.spent is not None:
            cli_io.say(f"compiling it took\n{executable.spent}")
