"""Run `fusec convert`: write the optimised graph as ONNX, so that Netron and other tools show what fused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusec.cli.common import files, output
from fusec.cli.common.options import AsJson, Target
from fusec.cli.common.request import Request, compiles

# Imports that only a command needs are inside it: see commands.py.


@compiles("rounding")
def convert(
    request: Request,
    file: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.onnx", help="The file to write.")],
    target: Target = "auto",
    as_json: AsJson = False,
) -> None:
    """Write the optimised graph as ONNX. The metadata of each node names its step."""
    from fusec import convert as converting

    files.check_writable(file)
    with output.progress() as report:
        compiled = request.build(target, report)
        data = converting.to_bytes(compiled)
    files.write_whole(file, lambda opened: opened.write(data))
    program = compiled.program
    summary = {
        "model": request.model,
        "output": str(file),
        "target": compiled.target.name,
        "bytes": len(data),
        "cudnn_asked": compiled.asked,
        "nodes": len(program.graph),
        "steps": len(program.steps),
        "launches": program.launches,
    }
    words = f"{file}: {len(program.graph)} nodes in {program.counts} for {compiled.target.name}"
    output.result(summary, words, as_json)
    output.print_note("" if as_json else compiled.note)
    output.wrote(file, as_json)
