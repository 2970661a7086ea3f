"""Run `fusec cache`: show and clear the caches, export and import plans, and trust the plans of a .fusec file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fusec.cli.common import files, output
from fusec.cli.common.options import AsJson
from fusec.system.printable import printable

# Imports that only a command needs are inside it: see commands.py.

app = typer.Typer(help="Show or clear the caches; export or import plans.")


@app.command()
def info(as_json: AsJson = False) -> None:
    """Show what the caches of plans and programs hold, and the folder of the plans."""
    from fusec.diagnostics.text_table import bytes_text
    from fusec.plans.plan_cache import PlanStore
    from fusec.program_cache.store import ProgramStore

    found, programs = PlanStore().info(), ProgramStore()
    count, size = programs.info()
    words = (
        f"{printable(str(found.folder))}: {found.entries} plans, {found.blobs} of them serialized; "
        f"{bytes_text(found.bytes)} of {bytes_text(found.max_bytes)}\n"
        f"{found.choices} choices for steps and kernels; {found.quarantined} plans in quarantine; "
        f"{found.trusted} serialized plans trusted\n"
        f"{count} programs of model files; {bytes_text(size)} of {bytes_text(programs.max_bytes)}"
    )
    # the schema calls choices `forms`
    plain = {"forms" if name == "choices" else name: value for name, value in asdict(found).items()}
    output.result({**plain, "folder": str(found.folder), "programs": count, "program_bytes": size}, words, as_json)


@app.command()
def clear(as_json: AsJson = False) -> None:
    """Delete all plans, the quarantine, the record of which serialized plans are trusted, and all programs."""
    from fusec.plans.plan_cache import PlanStore
    from fusec.program_cache.store import ProgramStore

    plans, programs = PlanStore().clear(), ProgramStore().clear()
    words = f"{plans} plans and {programs} programs deleted"
    output.result({"cleared": plans, "programs": programs}, words, as_json)


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
