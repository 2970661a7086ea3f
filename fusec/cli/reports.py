"""`fusec explain` and `fusec verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusec.cli.options import Disable, Json, Model, Precision, Shapes, Target, disabled, shapes_of
from fusec.cli.output import json_text
from fusec.cli.progress import Bar

if TYPE_CHECKING:
    from fusec.compiled import Compiled
    from fusec.program import Program


def explain(
    model: Model,
    target: Annotated[
        str, typer.Option("--target", "-t", help="One or more of `fusec targets`, joined by commas, or auto.")
    ] = "auto",
    precision: Precision = "fp32",
    shape: Shapes = None,
    disable: Disable = None,
    must_fuse: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Fail unless what matches, say 'conv*+add+relu', is one step; repeatable."
        ),
    ] = None,
    cores: Annotated[bool, typer.Option(help="Reduce refusals to their smallest core.")] = True,
    json: Json = False,
) -> int:
    """Say what fused into which step and, for every op left out, why."""
    from fusec import driver, frontends  # late, as everything heavy
    from fusec.explain import compare
    from fusec.explain import explain as explained

    shapes, left_out = shapes_of(shape), disabled(disable)
    goals = [driver.resolve_target(name.strip()) for name in target.split(",")]
    patterns = must_fuse or []
    explanations: list[tuple[str, Any]] = []
    checks: list[dict[str, Any]] = []
    with Bar() as bar:
        source = frontends.load(model, shapes)
        for goal in dict.fromkeys(g.name for g in goals):

            def tell(stage: str, done: int, total: int, goal: str = goal) -> None:
                bar(f"{goal}: {stage}", done, total)

            compiled = driver.build(source, target=goal, precision=precision, disable=left_out, progress=tell)
            checks += [{"target": goal, **_must_fuse(compiled.program, pattern)} for pattern in patterns]
            told = explained(compiled.program, compiled.target, compiled.judge, cores=cores, progress=tell)
            explanations.append((goal, told))
    failed = [c for c in checks if not c["ok"]]
    if json:
        told = [e.to_json() for _, e in explanations]
        data: dict[str, Any] = {"model": str(model), "precision": precision, "targets": told}
        if patterns:
            data["must_fuse"] = checks
        typer.echo(json_text(data))
    elif len(explanations) == 1:
        typer.echo(str(explanations[0][1]))
    else:
        typer.echo(compare(explanations))
        for name, explanation in explanations:
            typer.echo(f"\n== {name}\n{explanation.reasons()}")
    for check in [] if json else checks:
        said = (
            f"{check['places']} places match {check['pattern']!r}, each one cuDNN step"
            if check["ok"]
            else check["message"]
        )
        typer.echo(f"\n{check['target']}: {said}")
    return 1 if failed else 0


def _must_fuse(program: Program, pattern: str) -> dict[str, Any]:
    from fusec.errors import CheckError
    from fusec.must_fuse import assert_fused, check

    places, misses = check(program, pattern)
    message = ""
    try:
        assert_fused(program, pattern)
    except CheckError as error:
        message = str(error)
    return {
        "pattern": pattern,
        "ok": not message,
        "places": places,
        "misses": [str(miss) for miss in misses],
        "message": message,
    }


def verify(
    model: Model,
    target: Target = "auto",
    precision: Precision = "fp32",
    shape: Shapes = None,
    disable: Disable = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random inputs.")] = 0,
    json: Json = False,
) -> int:
    """Check the passes, every step and every cuDNN graph against float64 references."""
    from fusec import driver  # late, as everything heavy
    from fusec.verify import verify as verified

    shapes, left_out = shapes_of(shape), disabled(disable)
    with Bar() as bar:
        compiled = driver.build(
            model, target=target, precision=precision, shapes=shapes, disable=left_out, progress=bar
        )
        run, where = _runner(compiled)
        report = verified(compiled, seed, run, lambda done, total: bar(f"verifying {where}", done, total))
    if json:
        head = {"model": str(model), "target": compiled.target.name, "precision": precision, "ran": where}
        typer.echo(json_text({**head, **report.to_json()}))
    else:
        typer.echo(f"{report}\ncuDNN graphs ran {where}")
    return 0 if report.ok else 1


def _runner(compiled: Compiled) -> tuple[Any, str]:
    """What runs lowered graphs: this machine's GPU if it is the target, else the simulator."""
    from fusec.gpu import device
    from fusec.simulate import simulate

    if not device.is_present(compiled.target):
        return simulate, "in simulation"
    from fusec.gpu.backend import CudnnBackend  # needs cupy and cudnn, which only a GPU machine must have

    backend = CudnnBackend("none")
    return backend.run_on_host, f"on {backend.name}"
