"""Run `fusec targets` and `fusec doctor`: list the GPUs and ops that fusec knows, and check this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from fusec.cli.common import output
from fusec.cli.common.options import AsJson
from fusec.errors import CheckError

# Imports that only a command needs are inside it: see commands.py.


def targets(as_json: AsJson = False) -> None:
    """List the GPUs that fusec knows."""
    from fusec.targets import target

    rows: list[dict[str, Any]] = [
        {
            "name": t.name,
            "gpu": t.device_name,
            "capability": f"{t.sm // 10}.{t.sm % 10}",
            "derived": t.derived,
            "source": t.source,
        }
        for t in map(target.load, target.names())
    ]
    lines = [
        f"{row['name']:5} {row['gpu']:24} {row['capability']:>5} {'derived' if row['derived'] else 'measured':9} "
        f"{row['source']}"
        for row in rows
    ]
    output.result(rows, "\n".join(lines), as_json)


def doctor(
    ops: Annotated[
        bool, typer.Option("--ops", help="List which ops cuDNN graphs take instead, and why not the others.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check the pieces that fusec needs on this machine, and print the remedy for each that is missing."""
    if ops:
        _ops(as_json)
        return
    from fusec.gpu.doctor import diagnose

    with output.progress() as report:
        report("checks", 0, 0)
        checks = diagnose()
    missing = [check.name for check in checks if check.required and not check.ok]
    data = {"ok": not missing, "checks": [asdict(check) for check in checks]}
    output.result(data, "\n".join(map(str, checks)), as_json)
    if missing:
        raise CheckError(f"missing: {', '.join(missing)}")


def _ops(as_json: bool) -> None:
    """List the ops, and if cuDNN runs each. Raises CheckError for an op without a lowering or a reason."""
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
    width = max(len(row["op"]) for row in rows)
    lines: list[str] = []
    for row in rows:
        how = "cuDNN, as anchor" if row["anchor"] else "cuDNN"
        lines.append(f"{row['op']:{width}} {how if row['lowered'] else 'not cuDNN: ' + row['why_not']}")
    output.result(rows, "\n".join(lines), as_json)
    unexplained = [row["op"] for row in rows if not row["lowered"] and not row["why_not"]]
    if unexplained:
        raise CheckError(f"neither lowered nor explained: {', '.join(unexplained)}")
