"""Run `fusec run`: run a model once, and compare its outputs with onnxruntime."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fusec.cli.common import files, output
from fusec.cli.common.options import AsJson, Seed, Target
from fusec.cli.common.request import Request, compiles
from fusec.errors import CheckError
from fusec.system.printable import printable

# What the command needs is imported inside it, as in commands.py.

TOLERANCE = 1e-3  # relative L2 distance from onnxruntime that --compare allows by default


@compiles("rounding", "tune", "budget", "locked")
def run(
    request: Request,
    target: Target = "auto",
    input: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE.npy", help="An input; those not given are random. May be repeated."),
    ] = None,
    seed: Seed = 0,
    file: Annotated[Path | None, typer.Option("-o", "--output", help="Write the outputs to this .npz file.")] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="onnxruntime", help="Run the file in onnxruntime, too, and compare.")
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Relative L2 distance that --compare allows.")] = TOLERANCE,
    as_json: AsJson = False,
) -> None:
    """Compile a model and run it once: on the GPU if it is this machine's, else in simulation."""
    from fusec.cli.common import feeds as running

    files.check_writable(file)
    if compare is not None:
        running.need_onnxruntime(compare)
    arrays = files.arrays_of(input or ())
    model = request.model
    with output.progress() as report:
        executable = request.executable(target, report)
        feeds = running.feeds(executable, arrays, seed)
        report("run", 0, 0)
        start = time.perf_counter()
        results = executable.run(None, feeds)
        seconds = time.perf_counter() - start
        named = {spec.name: array for spec, array in zip(executable.outputs, results, strict=True)}
        if file is not None:
            files.write_npz(file, named)
        report("onnxruntime", 0, 0)
        errors = running.distances(model, feeds | request.constants(), named) if compare is not None else {}
    rows = [{**running.statistics(name, array), "error": errors.get(name)} for name, array in named.items()]
    if as_json:
        told = {"model": model, "device": executable.device, "cudnn_asked": executable.asked}
        output.say(output.json_text({**told, "seconds": seconds, "outputs": rows}))
    else:
        for row in rows:
            name = printable(str(row["name"]))
            output.say(f"{name}: {row['dtype']} {row['shape']} mean {row['mean']:.6g} std {row['std']:.6g}")
        output.say(f"ran on {executable.device} in {seconds:.3f} s")
        output.print_note(executable.note)
        for name, error in errors.items():
            output.say(f"relative L2 distance from {compare}: {printable(name)} {error:.1e} (allowed {tolerance:.0e})")
    if file is not None:
        output.wrote(file, as_json)
    bad = [f"{printable(name)} {error:.1e}" for name, error in errors.items() if not error <= tolerance]  # NaN is bad
    if bad:
        raise CheckError(f"{model}: differs from {compare} by more than {tolerance:.0e}: {', '.join(bad)}")
