"""Run `fusec cache`: show, clear, export and import the plan cache, and trust the plans of a .fusec file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fusec.cli.common import files, output
from fusec.cli.common.options import AsJson
from fusec.system.printable import printable

# Imports that only a command needs are inside it: see commands.py.

app = typer.Typer(help="Show, clear, export or import the plan cache.")


@app.command()
def info(as_json: AsJson = False) -> None:
    """Show what the plan cache holds, and its folder."""
    from fusec.diagnostics.text_table import bytes_text
    from fusec.plans.plan_cache import PlanStore

    found = PlanStore().info()
    words = (
        f"{printable(str(found.folder))}: {found.entries} plans, {found.blobs} of them serialized; "
        f"{bytes_text(found.bytes)} of {bytes_text(found.max_bytes)}\n"
        f"{found.choices} choices for steps and kernels; {found.quarantined} plans in quarantine; "
        f"{found.trusted} serialized plans trusted"
    )
    # the schema calls choices `forms`
    plain = {"forms" if name == "choices" else name: value for name, value in asdict(found).items()}
    output.result({**plain, "folder": str(found.folder)}, words, as_json)


@app.command()
def clear(as_json: AsJson = False) -> None:
    """Delete all plans, the quarantine, and the record of which serialized plans are trusted."""
    from fusec.plans.plan_cache import PlanStore

    count = PlanStore().clear()
    output.result({"cleared": count}, f"{count} plans deleted", as_json)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The zip file to write.")], as_json: AsJson = False
) -> None:
    """Write plans and quarantine to one file that another machine can import."""
    from fusec.plans.plan_cache import PlanStore

    files.check_writable(file)
    count = PlanStore().export(file)
    output.result({"exported": count}, f"{count} plans written to {file}", as_json)
    output.wrote(file, as_json)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `fusec cache export` wrote.")],
    as_json: AsJson = False,
) -> None:
    """Import exported choices and quarantine. Serialized plans of another machine are built again on this one."""
    from fusec.plans.plan_cache import PlanStore

    count = PlanStore().import_(file)
    output.result({"imported": count}, f"{count} plans imported from {file}", as_json)


@app.command()
def trust(
    file: Annotated[Path, typer.Argument(metavar="FILE.fusec", help="A compiled model from a source that you trust.")],
    as_json: AsJson = False,
) -> None:
    """Let this machine run the serialized plans of a compiled model, which hold machine code."""
    from fusec.artifacts import fusec_file

    count = fusec_file.trust(file)
    output.result({"trusted": count}, f"{count} serialized plans and compiled kernels of {file} are trusted", as_json)
