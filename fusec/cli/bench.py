"""Run `fusec bench`: time a model as a whole and step by step, against what the hardware allows."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusec.cli.common import files, output
from fusec.cli.common.options import AsJson, Seed, Target
from fusec.cli.common.request import Request, compiles
from fusec.errors import FusecError

if TYPE_CHECKING:
    from fusec.runtime import Executable

# Imports that only a command needs are inside it: see commands.py.


@compiles("rounding", "tune", "budget", "locked")
def bench(
    request: Request,
    target: Target = "auto",
    runs: Annotated[
        int | None, typer.Option(min=1, help="Number of times that everything is timed; default: 20, in simulation 1.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print time and limit of each step, and compile time by stage.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the steps as a trace that Perfetto opens.")
    ] = None,
    nvtx: Annotated[
        bool, typer.Option("--nvtx", help="Then run each step alone in a range that Nsight Systems shows by name.")
    ] = False,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Time a model: compilation, calls, all steps together, and each step alone. Without a GPU only their limits."""
    from fusec.cli.common.feeds import feeds
    from fusec.diagnostics import step_times

    files.check_writable(trace)
    if nvtx and importlib.util.find_spec("cupy") is None:
        raise FusecError("--nvtx needs cupy: pip install 'fusec[cu13]' (CUDA 12: 'fusec[cu12]')")
    with output.progress() as report:
        start = time.perf_counter()
        executable = request.program(target, report)
        compile_s = time.perf_counter() - start
        report("bench", 0, 0)
        measured = step_times.measure(executable, feeds(executable, {}, seed), runs)
        if nvtx:
            _mark_steps(executable)
    if trace is not None:
        files.write_text(trace, output.json_text(measured.trace()))
    hints = [hint.to_json() for hint in executable.hints]
    if as_json:
        spent = {} if executable.spent is None else executable.spent.stages
        stages = {what: round(each.seconds, 3) for what, each in spent.items()}
        head = {"model": request.model, "cudnn_asked": executable.asked}
        timed = {"compile_s": compile_s, "compile": stages, "hints": hints, **measured.to_json()}
        output.say(output.json_text({**head, **timed}))
        if trace is not None:
            output.wrote(trace, as_json)
        return
    how = "loaded" if request.is_compiled else "compiled"
    output.say(f"{request.model} in {executable.compiled.options.precision}, {how} in {compile_s:.2f} s, {measured}")
    output.print_note(executable.note)
    output.print_hints(hints)
    if profile:
        output.say(measured.table())
        if executable.spent is not None:
            output.say(f"compile time by stage\n{executable.spent}")
    if trace is not None:
        output.wrote(trace, as_json)


def _mark_steps(executable: Executable) -> None:
    """Run each step alone in a range with its number, library and ops, as the table of --profile names it."""
    from fusec.gpu.measure.nvtx_ranges import named_range
    from fusec.schedule.program import Kind

    steps, libraries = executable.compiled.program.steps, executable.libraries()
    names = [f"{i} {libraries.get(step, Kind.VIEW.value)} {step.signature}" for i, step in enumerate(steps)]
    with named_range("fusec"):
        executable.run_steps(lambda index: named_range(names[index]))
