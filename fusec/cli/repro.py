"""`fusec repro`: one step of a compiled model as a folder fit for a bug report to NVIDIA."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusec.cli import files as cli_io
from fusec.cli.request import Request
from fusec.system.printable import printable

# What the command needs is imported inside it, as in commands.py.


def repro(
    model: cli_io.Model,
    partition: Annotated[int, typer.Option(metavar="N", help="The step, as `fusec explain` numbers them.")],
    target: cli_io.Target = "auto",
    precision: cli_io.Precision = "fp32",
    shape: cli_io.Shapes = None,
    disable: cli_io.Disable = None,
    deterministic: cli_io.Deterministic = False,
    rounding: cli_io.Rounding = "fused",
    channels_last: cli_io.ChannelsLast = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="The folder, new or empty; else repro-MODEL-N here."),
    ] = None,
    as_json: cli_io.AsJson = False,
) -> None:
    """Write a step as a script that needs cudnn and cupy alone, with inputs, expected outputs and versions."""
    from fusec import repro as writing
    from fusec.execution.compile_options import CompileOptions

    folder = output if output is not None else Path(f"repro-{Path(model).stem}-{partition}")
    writing.check_folder(folder)
    options = CompileOptions(
        precision=precision,
        disable=disable or (),
        rounding=rounding,
        deterministic=deterministic,
        channels_last=channels_last,
    )
    with cli_io.progress() as report:
        compiled = Request(model, shape, options).build(target, report)
        report("simulate", 0, 0)
        writing.write(compiled, partition, folder, seed)
    signature, named = compiled.program.steps[partition].signature, printable(str(folder))
    if as_json:
        files = sorted(path.name for path in folder.iterdir())
        data = {"model": model, "target": compiled.target.name, "step": partition, "signature": signature}
        cli_io.say(cli_io.json_text({**data, "folder": str(folder), "files": files}))
        return
    cli_io.say(f"{named}: step {partition} ({signature}); run {named}/repro.py on a machine with a GPU")
