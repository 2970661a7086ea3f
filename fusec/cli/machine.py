"""`fusec targets` and `fusec doctor`: which GPUs and ops fusec knows, and what this machine has."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from fusec.cli import files as cli_io
from fusec.cli.files import AsJson
from fusec.errors import CheckError

# What a command needs is imported inside it, as in commands.py.


def targets(as_json: AsJson = False) -> None:
    """List the GPUs fusec knows."""
    from fusec.targets import target

    known = [target.load(name) for name in target.names()]
    rows: list[dict[str, Any]] = [
        {
            "name": t.name,
            "gpu": t.device_name,
            "capability": f"{t.sm // 10}.{t.sm % 10}",
            "derived": t.derived,
            "source": t.source,
        }
        for t in known
    ]
    if as_json:
        cli_io.say(cli_io.json_text(rows))
        return
    for row in rows:
        origin = "derived" if row["derived"] else "measured"
        cli_io.say(f"{row['name']:5} {row['gpu']:24} {row['capability']:>5} {origin:9} {row['source']}")


def doctor(
    ops: Annotated[
        bool, typer.Option("--ops", help="Say instead which ops cuDNN graphs take, and why not the others.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what this machine has of the pieces fusec needs, and the remedy for each that is missing."""
    if ops:
        _ops(as_json)
        return
    from fusec.gpu.doctor import diagnose

    with cli_io.progress() as report:
        report("checks", 0, 0)
        checks = diagnose()
    missing = [check.name for check in checks if check.required and not check.ok]
    if as_json:
        cli_io.say(cli_io.json_text({"ok": not missing, "checks": [asdict(check) for check in checks]}))
    else:
        cli_io.say("\n".join(map(str, checks)))
    if missing:
        raise CheckError(f"missing: {', '.join(missing)}")


def _ops(as_json: bool) -> None:
    from fusec.lower_cudnn import LOWER, WITHOUT
    from fusec.ops import ALL, ANCHORS

    rows: list[dict[str, Any]] = [
        {
            "op": op.name,
            "lowered": op.name in LOWER,
            "anchor": issubclass(op, ANCHORS),
            "why_not": "" if op.name in LOWER else WITHOUT.get(op.name, ""),
        }
        for op in ALL
    ]
    if as_json:
        cli_io.say(cli_io.json_text(rows))
    else:
        width = max(len(row["op"]) for row in rows)
        for row in rows:
            how = "cuDNN, as anchor" if row["anchor"] else "cuDNN"
            cli_io.say(f"{row['op']:{width}} {how if row['lowered'] else 'not cuDNN: ' + row['why_not']}")
    unexplained = [row["op"] for row in rows if not row["lowered"] and not row["why_not"]]
    if unexplained:
        raise CheckError(f"neither lowered nor explained: {', '.join(unexplained)}")
