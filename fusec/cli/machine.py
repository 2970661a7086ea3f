"""`fusec targets` and `fusec doctor`: the GPUs there are descriptions of, and what this machine has."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fusec.cli.options import Json
from fusec.cli.output import json_text


def targets(json: Json = False) -> int:
    """List the GPUs that can be compiled for."""
    from fusec.explain.table import table  # here and below: what is heavy is imported by the command that needs it
    from fusec.gpu import device
    from fusec.target import load, names

    here = device.device_name()
    known = [load(name) for name in names()]
    present = {t.name for t in known if here is not None and device.is_present(t)}
    if json:
        rows = [
            {
                "name": t.name,
                "device": t.device_name,
                "sm": t.sm,
                "memory_bandwidth": t.memory_bandwidth,
                "flops": dict(t.flops),
                "derived": t.derived,
                "source": t.source,
                "present": t.name in present,
            }
            for t in known
        ]
        typer.echo(json_text(rows))
        return 0
    header = ("target", "GPU", "capability", "memory GB/s", "properties", "")
    lines = [
        (
            t.name,
            t.device_name,
            f"{t.sm // 10}.{t.sm % 10}",
            f"{t.memory_bandwidth / 1e9:.0f}",
            "derived from data sheets" if t.derived else "read from a device",
            "in this machine" if t.name in present else "",
        )
        for t in known
    ]
    typer.echo("\n".join(table(header, lines, right=(2, 3))))
    return 0


def doctor(
    ops: Annotated[
        bool, typer.Option("--ops", help="For each op: how it reaches cuDNN, or why not; its ONNX ops.")
    ] = False,
    json: Json = False,
) -> int:
    """Say what fusec finds on this machine, and for each missing piece the remedy."""
    return _ops(json) if ops else _machine(json)


def _machine(json: bool) -> int:
    from fusec.cli.progress import Bar
    from fusec.gpu.doctor import diagnose

    with Bar() as bar:
        bar("looking around", 0, 0)
        checks = diagnose()
    sound = all(c.ok or not c.required for c in checks)
    if json:
        typer.echo(json_text({"ok": sound, "checks": [asdict(c) for c in checks]}))
    else:
        typer.echo("\n".join(map(str, checks)))
    return 0 if sound else 1


def _ops(json: bool) -> int:
    """Where each op of the registry stands; status 1 if a table forgets one or holds it twice."""
    from fusec.explain.table import table
    from fusec.lower_cudnn import LOWER, WITHOUT
    from fusec.ops import BY_NAME

    rows = [{"op": name, "cudnn": name in LOWER, "why_not": WITHOUT.get(name, "")} for name in sorted(BY_NAME)]
    wrong = sorted(
        name for name in {*BY_NAME, *LOWER, *WITHOUT} if ((name in LOWER) + (name in WITHOUT)) != (name in BY_NAME)
    )
    onnx = _onnx_ops()
    if json:
        typer.echo(json_text({"ok": not wrong, "ops": rows, "onnx": onnx, "not_in_one_table": wrong}))
    else:
        cells = [(str(r["op"]), "lowered" if r["cudnn"] else "-", str(r["why_not"])) for r in rows]
        typer.echo("\n".join(table(("op", "cuDNN", "why not"), cells)))
        typer.echo(f"\n{len(onnx)} ONNX ops imported: {', '.join(onnx)}")
        if wrong:
            typer.echo(f"in no table, or in two: {', '.join(wrong)}")
    return 1 if wrong else 0


def _onnx_ops() -> list[str]:
    from fusec.frontends.onnx.tables import TABLE

    return sorted({name for name, _ in TABLE})
