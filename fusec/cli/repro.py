"""Run `fusec repro`: write one step of a compiled model as a folder for a bug report to NVIDIA."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusec.cli.common import output
from fusec.cli.common.options import AsJson, Seed, Target
from fusec.cli.common.request import Request, compiles
from fusec.system.printable import printable

# Imports that only a command needs are inside it: see commands.py.


@compiles("rounding")
def repro(
    request: Request,
    partition: Annotated[int, typer.Option(metavar="N", help="The step, as `fusec explain` numbers them.")],
    target: Target = "auto",
    seed: Seed = 0,
    folder: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="A new or empty folder; by default repro-MODEL-N."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a step as a script that needs only cudnn and cupy, with inputs, expected outputs and versions."""
    from fusec import repro as writing

    folder = folder or Path(f"repro-{Path(request.model).stem}-{partition}")
    writing.check_folder(folder)
    with output.progress() as report:
        compiled = request.build(target, report)
        report("simulate", 0, 0)
        writing.write(compiled, partition, folder, seed)
    signature, named = compiled.program.steps[partition].signature, printable(str(folder))
    names = sorted(path.name for path in folder.iterdir())
    data = {"model": request.model, "target": compiled.target.name, "step": partition, "signature": signature}
    output.result(
        {**data, "folder": str(folder), "files": names},
        f"{named}: step {partition} ({signature}); run {named}/repro.py on a machine with a GPU",
        as_json,
    )
    output.wrote(folder, as_json)
