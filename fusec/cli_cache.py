"""`fusec cache`: the plans chosen on this machine, and those that must not be used again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fusec import cli_io
from fusec.errors import FusecError

app = typer.Typer(no_args_is_help=True, help="What fusec remembers: info, clear, export, import.")

# What a command needs is imported inside it, as in cli.py.


@app.command()
def info(as_json: cli_io.AsJson = False) -> None:
    """Say where the cache is and what it holds."""
    from fusec.cache import Store
    from fusec.plan_store import PlanStore

    answers, plans = Store(), PlanStore().info()
    data = {"answers": {"path": str(answers.path), "bytes": answers.nbytes, "entries": len(answers)}, "plans": plans}
    if as_json:
        print(cli_io.json_text(data))
        return
    print(f"{answers.path}: {len(answers)} answers of cuDNN, {answers.nbytes / 1e6:.1f} MB")
    known = ", ".join(f"{count} for {device}" for device, count in plans["plans"].items()) or "none"
    print(f"{plans['path']}: plans: {known}; {plans['quarantined']} quarantined; {plans['bytes'] / 1e6:.1f} MB")


@app.command()
def clear(as_json: cli_io.AsJson = False) -> None:
    """Forget cuDNN's answers, the plans chosen, and the quarantine."""
    from fusec.cache import Store
    from fusec.plan_store import PlanStore

    answers, plans = Store(), PlanStore()
    data = {"answers": len(answers), "plans": len(plans)}
    answers.clear()
    plans.clear()
    print(cli_io.json_text(data) if as_json else f"forgot {data['answers']} answers and {data['plans']} plans")


@app.command("export")
def export_plans(file: Annotated[Path, typer.Argument(metavar="FILE")], as_json: cli_io.AsJson = False) -> None:
    """Write the plans chosen and the quarantine to a file, for another machine."""
    from fusec.plan_store import PlanStore

    data = PlanStore().export()
    text = cli_io.json_text(data) + "\n"
    cli_io.write_whole(file, lambda handle: handle.write(text.encode()))
    count = len(data["entries"])
    print(cli_io.json_text({"file": str(file), "entries": count}) if as_json else f"{file}: {count} entries")


@app.command("import")
def import_plans(file: Annotated[Path, typer.Argument(metavar="FILE")], as_json: cli_io.AsJson = False) -> None:
    """Take in plans that another machine exported; they are used where GPU, driver and cuDNN are the same."""
    from fusec.plan_store import PlanStore

    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise FusecError(f"{file}: cannot be read as exported plans: {error}") from error
    try:
        count = PlanStore().merge(data)
    except FusecError as error:
        raise FusecError(f"{file}: {error}") from error
    print(cli_io.json_text({"file": str(file), "entries": count}) if as_json else f"{file}: {count} entries taken in")
