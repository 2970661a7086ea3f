"""Run `fusec atlas`: ask releases of cuDNN which fusion patterns they accept on which GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusec.cli.common import files, output
from fusec.cli.common.options import AsJson

# Imports that only a command needs are inside it: see commands.py.


def atlas(
    cudnn: Annotated[
        str,
        typer.Option(
            metavar="VERSIONS", help="Releases such as 9.28 or 9.19.0.56, joined by commas, which pip installs."
        ),
    ] = "installed",
    target: Annotated[str, typer.Option(help="GPUs of `fusec targets`, joined by commas; default: all.")] = "",
    pattern: Annotated[str, typer.Option(help="Only patterns whose names match, such as 'conv+bias*'.")] = "*",
    folder: Annotated[Path, typer.Option("-o", "--output", help="Folder of atlas.json and atlas.html.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Ask releases of cuDNN which fusion patterns they accept on which GPU, and write the table as JSON and as a page.

    Releases that an atlas.json in the folder has already stay in it. No GPU is needed.
    """
    from fusec.atlas import document, page
    from fusec.atlas.collect import collect
    from fusec.atlas.patterns import patterns
    from fusec.errors import FusecError
    from fusec.targets import target as targets

    data, html = folder / "atlas.json", folder / "atlas.html"
    files.check_writable(data)
    files.check_writable(html)
    asked = patterns(pattern)
    if not asked:
        raise FusecError(f"--pattern {pattern!r}: no pattern has such a name")
    table = document.read(data) if data.exists() else document.Atlas(asked)
    if list(table.patterns) != list(asked):
        raise FusecError(f"{data}: has other patterns than this fusec: remove it, or choose another folder")
    names = [targets.load(name).name for name in (target.split(",") if target else targets.names())]

    def write(whole: document.Atlas) -> None:
        text = document.text(whole)
        files.write_text(data, text.rstrip())
        files.write_text(html, page.html(text).rstrip())

    with output.progress() as report:
        collect(table, list(dict.fromkeys(cudnn.split(","))), names, pattern, report, write)
    releases, written = list(table.to_json()["releases"]), [str(data), str(html)]
    summary = {"patterns": len(asked), "releases": releases, "files": written}
    text = f"{len(asked)} patterns, cuDNN {', '.join(releases)}: {' and '.join(written)}"
    output.result(summary, text, as_json)
