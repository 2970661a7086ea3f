"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file, or a graph in fusec's text form (.txt).")]
Target = Annotated[
    str, typer.Option("--target", "-t", help="A GPU of `fusec targets`, or auto: this machine's, else an H200.")
]
Precision = Annotated[str, typer.Option("--precision", "-p", help="fp32, tf32, fp16 or bf16.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="NAME=1,3,224,224", help="Shape of an input with symbolic dims; repeatable."),
]
Disable = Annotated[
    list[str] | None, typer.Option("--disable", metavar="NAME", help="A pass or rule to leave out; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs; all else goes to stderr.")]


def shapes_of(texts: Sequence[str] | None) -> dict[str, tuple[int, ...]]:
    """Shapes by input name from NAME=1,3,224,224; an input may also be a scalar: NAME=."""
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts or ():
        name, equals, sizes = text.rpartition("=")
        dims = [d.strip() for d in sizes.split(",")] if sizes else []
        if not equals or not name or not all(d.isascii() and d.isdigit() for d in dims):
            raise typer.BadParameter(f"--shape takes NAME=1,3,224,224 (sizes joined by commas), not {text!r}")
        if name in shapes:
            raise typer.BadParameter(f"--shape is given twice for {name!r}")
        shapes[name] = tuple(int(d) for d in dims)
    return shapes


def files_of(texts: Sequence[str] | None) -> dict[str, Path]:
    """Files by input name from NAME=file.npy."""
    files: dict[str, Path] = {}
    for text in texts or ():
        name, equals, file = text.partition("=")
        if not equals or not name or not file:
            raise typer.BadParameter(f"--input takes NAME=FILE.npy, not {text!r}")
        if name in files:
            raise typer.BadParameter(f"--input is given twice for {name!r}")
        files[name] = Path(file)
    return files


def disabled(names: Sequence[str] | None) -> tuple[str, ...]:
    """The names to leave out, checked against the passes and rules there are."""
    from fusec import passes  # heavy: imported by the commands that compile

    known = passes.names()
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"--disable: no pass or rule {name!r}; there are {', '.join(sorted(known))}")
    return tuple(names or ())
