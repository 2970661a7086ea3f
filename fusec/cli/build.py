"""`fusec compile` and `fusec run`."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusec.cli.options import Disable, Json, Model, Precision, Shapes, Target, disabled, files_of, shapes_of
from fusec.cli.output import check_writable, json_text, note, whole_files, write_whole
from fusec.cli.progress import Bar

if TYPE_CHECKING:
    from fusec.runtime import Executable

Tune = Annotated[str, typer.Option("--tune", help="On a GPU: quick times plans and keeps the fastest; none does not.")]


class Judge(enum.Enum):
    """What outputs can be compared with."""

    ONNXRUNTIME = "onnxruntime"


def compile(
    model: Model,
    target: Target = "auto",
    precision: Precision = "fp32",
    shape: Shapes = None,
    tune: Tune = "quick",
    disable: Disable = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the summary there, as JSON.")] = None,
    json: Json = False,
) -> int:
    """Compile a model and say what came of it."""
    shapes = shapes_of(shape)
    if output is not None:
        check_writable(output)
    executable, seconds = _compiled(model, target, precision, shapes, tune, disable)
    from fusec.explain import explain  # late, as everything heavy

    compiled = executable.compiled
    explanation = explain(compiled.program, compiled.target, cores=False)
    summary = {**_head(model, executable, seconds), **explanation.to_json()}
    if output is not None:
        write_whole(output, lambda file: file.write((json_text(summary) + "\n").encode()))
    if json:
        typer.echo(json_text(summary))
    else:
        totals = explanation.totals
        typer.echo(
            f"{model}: {len(compiled.source)} nodes as imported, {len(compiled.graph)} after the passes\n"
            f"{explanation.summary}\n"
            f"compiled in {seconds:.1f} s for {compiled.target.name} in {precision}; runs {_where(executable)}"
        )
        if totals["kernels"]:
            typer.echo("`fusec explain` says why the other kernels are not cuDNN's")
    return 0


def run(
    model: Model,
    target: Target = "auto",
    precision: Precision = "fp32",
    shape: Shapes = None,
    tune: Tune = "quick",
    disable: Disable = None,
    input: Annotated[
        list[str] | None, typer.Option("--input", "-i", metavar="NAME=FILE.npy", help="An input; repeatable.")
    ] = None,
    random_seed: Annotated[int, typer.Option(min=0, help="Inputs not given are random numbers from this seed.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write outputs: FILE.npz, or a folder of .npy files.")
    ] = None,
    compare: Annotated[Judge | None, typer.Option(help="Compare the outputs; status 1 if too far apart.")] = None,
    tolerance: Annotated[float | None, typer.Option(min=0, help="Relative L2 distance allowed by --compare.")] = None,
    json: Json = False,
) -> int:
    """Compile a model, run it once and describe its outputs."""
    from fusec.cli import arrays  # late, as everything heavy

    shapes = shapes_of(shape)
    given = {name: arrays.read(path) for name, path in files_of(input).items()}
    places = arrays.Places(output) if output is not None else None
    session = arrays.Onnxruntime(model) if compare is Judge.ONNXRUNTIME else None
    executable, compile_s = _compiled(model, target, precision, shapes, tune, disable)
    feeds = arrays.feeds(executable, given, random_seed)
    with Bar() as bar:
        bar("running", 0, 0)
        start = time.perf_counter()
        results = executable.run(None, feeds)
        run_s = time.perf_counter() - start
    named = {spec.name: array for spec, array in zip(executable.outputs, results, strict=True)}
    if places is not None:
        files = places.of(list(named))
        with whole_files(files) as opened:
            places.write(opened, named)
        note(f"wrote {', '.join(map(str, files))}")
    rows = [arrays.describe(name, array) for name, array in named.items()]
    errors = session.distances(feeds, named) if session is not None else {}
    allowed = tolerance if tolerance is not None else arrays.ALLOWED[precision]
    close = all(error <= allowed for error in errors.values())  # NaN is not
    if json:
        data = {**_head(model, executable, compile_s), "run_seconds": run_s, "outputs": rows}
        if session is not None:
            data["compare"] = {"with": "onnxruntime", "relative_l2": errors, "allowed": allowed, "ok": close}
        typer.echo(json_text(data))
    else:
        typer.echo(f"ran {_where(executable)} in {run_s:.2f} s (compiled in {compile_s:.1f} s)")
        typer.echo(arrays.described(rows))
        for name, error in errors.items():
            mark = "" if error <= allowed else "  TOO FAR"
            typer.echo(f"{name}: relative L2 distance from onnxruntime {error:.1e} (allowed {allowed:.0e}){mark}")
    return 0 if close else 1


def _compiled(
    model: Path,
    target: str,
    precision: str,
    shapes: Mapping[str, tuple[int, ...]],
    tune: str,
    disable: list[str] | None,
) -> tuple[Executable, float]:
    from fusec import driver  # late, as everything heavy

    left_out = disabled(disable)
    start = time.perf_counter()
    with Bar() as bar:
        executable = driver.compile(
            model, target=target, precision=precision, shapes=shapes, tune=tune, disable=left_out, progress=bar
        )
    return executable, time.perf_counter() - start


def _head(model: Path, executable: Executable, compile_s: float) -> dict[str, Any]:
    compiled = executable.compiled
    return {
        "model": str(model),
        "target": compiled.target.name,
        "device": executable.device,
        "precision": compiled.options.precision,
        "compile_seconds": compile_s,
        "inputs": [{"name": s.name, "shape": list(s.shape), "dtype": str(s.dtype)} for s in executable.inputs],
        "outputs": [{"name": s.name, "shape": list(s.shape), "dtype": str(s.dtype)} for s in executable.outputs],
    }


def _where(executable: Executable) -> str:
    return "in simulation" if executable.device == "simulated" else f"on {executable.device}"
