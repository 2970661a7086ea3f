"""`fusec convert`: the optimised graph as ONNX, for Netron and other tools to show what fused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusec.cli import files as cli_io
from fusec.cli.lock import Model
from fusec.cli.request import Request

# What the command needs is imported inside it, as in commands.py.


def convert(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.onnx", help="The file to write.")],
    target: cli_io.Target = "auto",
    precision: cli_io.Precision = "fp32",
    shape: cli_io.Shapes = None,
    disable: cli_io.Disable = None,
    deterministic: cli_io.Deterministic = False,
    rounding: cli_io.Rounding = "fused",
    channels_last: cli_io.ChannelsLast = False,
    as_json: cli_io.AsJson = False,
) -> None:
    """Write the optimised graph as ONNX, with the step each node became part of in its metadata."""
    from fusec import convert as converting
    from fusec.execution.compile_options import CompileOptions

    cli_io.check_writable(output)
    options = CompileOptions(
        precision=precision,
        disable=disable or (),
        rounding=rounding,
        deterministic=deterministic,
        channels_last=channels_last,
    )
    with cli_io.progress() as report:
        compiled = Request(model, shape, options).build(target, report)
        data = converting.to_bytes(compiled)
    cli_io.write_whole(output, lambda file: file.write(data))
    program = compiled.program
    summary = {"model": model, "output": str(output), "target": compiled.target.name, "bytes": len(data)}
    summary["cudnn_asked"] = compiled.asked
    if as_json:
        counts = {"nodes": len(program.graph), "steps": len(program.steps), "launches": program.launches}
        cli_io.say(cli_io.json_text({**summary, **counts}))
        return
    cli_io.say(f"{output}: {len(program.graph)} nodes in {len(program.steps)} steps for {compiled.target.name}")
    cli_io.print_note(compiled.note)
