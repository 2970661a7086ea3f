"""`fusec cache`: what the plan cache holds; empty it, carry it elsewhere, trust an artefact's plans."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fusec.cli import files as cli_io
from fusec.cli.files import AsJson
from fusec.system.printable import printable

# What a command needs is imported inside it, as in commands.py.

app = typer.Typer(help="The plan cache: what it holds; clear, export, import.")


@app.command()
def info(as_json: AsJson = False) -> None:
    """Say what the plan cache holds, and where."""
    from fusec.plans.plan_cache import PlanStore

    found = PlanStore().info()
    if as_json:
        cli_io.say(cli_io.json_text({**asdict(found), "folder": str(found.folder)}))
        return
    sizes = f"{found.bytes} of {found.max_bytes} bytes"
    cli_io.say(f"{printable(str(found.folder))}: {found.entries} plans, {found.blobs} of them serialized; {sizes}")
    cli_io.say(
        f"{found.forms} measured forms; {found.quarantined} plans in quarantine; "
        f"{found.trusted} serialized plans trusted"
    )


@app.command()
def clear(as_json: AsJson = False) -> None:
    """Forget all plans, the quarantine and which serialized plans are trusted."""
    from fusec.plans.plan_cache import PlanStore

    count = PlanStore().clear()
    cli_io.say(cli_io.json_text({"cleared": count}) if as_json else f"{count} plans forgotten")


@app.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, a zip.")], as_json: AsJson = False
) -> None:
    """Write plans and quarantine into one file, to be imported elsewhere."""
    from fusec.plans.plan_cache import PlanStore

    cli_io.check_writable(file)
    count = PlanStore().export(file)
    cli_io.say(cli_io.json_text({"exported": count}) if as_json else f"{count} plans written to {file}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `fusec cache export` wrote.")],
    as_json: AsJson = False,
) -> None:
    """Take over exported choices and quarantine; serialized plans from elsewhere are built anew here."""
    from fusec.plans.plan_cache import PlanStore

    count = PlanStore().import_(file)
    cli_io.say(cli_io.json_text({"imported": count}) if as_json else f"{count} plans taken over from {file}")


@app.command()
def trust(
    file: Annotated[Path, typer.Argument(metavar="FILE.fusec", help="A compiled model whose maker is known.")],
    as_json: AsJson = False,
) -> None:
    """Let this machine run the serialized plans of a compiled model as they are: they hold machine code."""
    from fusec.artifacts import fusec_file

    count = fusec_file.trust(file)
    cli_io.say(cli_io.json_text({"trusted": count}) if as_json else f"{count} serialized plans of {file} are trusted")
