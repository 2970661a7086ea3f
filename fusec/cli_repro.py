"""`fusec repro`: one step of a compiled model as a folder fit for a bug report to NVIDIA."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusec import cli_io

# What the command needs is imported inside it, as in cli.py.


def repro(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file, or a graph in fusec's text form.")],
    partition: Annotated[int, typer.Option(metavar="N", help="The step, as `fusec explain` numbers them.")],
    target: Annotated[
        str, typer.Option("--target", help="A GPU of `fusec targets`; auto: this machine's, or an H200.")
    ] = "auto",
    precision: Annotated[str, typer.Option(help="fp32, tf32, fp16 or bf16; sums are fp32 in all.")] = "fp32",
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="NAME=SIZES", help="Shape of an input with symbolic dims: x=1,3,224,224."),
    ] = None,
    disable: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Leave out a pass or a rewrite rule; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="The folder, new or empty; else repro-MODEL-N here."),
    ] = None,
    as_json: cli_io.AsJson = False,
) -> None:
    """Write a step as a script that needs cudnn and cupy alone, with inputs, expected outputs and versions."""
    from fusec import driver
    from fusec import repro as writing

    folder = output if output is not None else Path(f"repro-{Path(model).stem}-{partition}")
    writing.check_folder(folder)
    shapes = cli_io.shapes_of(shape or ())
    with cli_io.progress() as report:
        compiled = driver.build(
            model, target=target, precision=precision, shapes=shapes, disable=tuple(disable or ()), progress=report
        )
        report("simulate", 0, 0)
        writing.write(compiled, partition, folder, seed)
    signature = compiled.program.steps[partition].signature
    if as_json:
        files = sorted(path.name for path in folder.iterdir())
        data = {"model": model, "target": compiled.target.name, "step": partition, "signature": signature}
        print(cli_io.json_text({**data, "folder": str(folder), "files": files}))
        return
    print(f"{folder}: step {partition} ({signature}); run {folder / 'repro.py'} on a machine with a GPU")
