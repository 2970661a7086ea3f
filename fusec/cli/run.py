"""Run `fusec run`: run models once, and compare their outputs with onnxruntime."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fusec.cli.common import files, output
from fusec.cli.common.options import AsJson, Models, Seed, Target
from fusec.cli.common.request import Request, compiles
from fusec.errors import CheckError, FusecError
from fusec.system.dataclass import dataclass
from fusec.system.printable import printable

# Imports that only a command needs are inside it: see commands.py.

TOLERANCE = 1e-3  # relative L2 distance from onnxruntime that --compare allows by default
SUFFIXES = (".onnx", ".fusec", ".fusec-ir")  # of the models of a folder


@dataclass(frozen=True)
class _Options:
    """Options of a run. arrays: inputs by name; tolerance: distance from onnxruntime, None without --compare."""

    target: str
    seed: int
    tolerance: float | None
    arrays: dict[str, tuple[Path, Any]]


@dataclass(frozen=True)
class _Run:
    """A model that ran.

    data: what --json prints.
    errors: distance of each output.
    arrays: outputs by name.
    rounds_less: fusec may round less often than the model does.
    """

    data: dict[str, Any]
    note: str
    counts: str
    errors: dict[str, float]
    arrays: dict[str, Any]
    rounds_less: bool

    def bad(self, tolerance: float) -> str:
        """Name the outputs that differ too much, with a possible reason; NaN does. Empty if there are none."""
        outputs = [f"{printable(name)} {error:.1e}" for name, error in self.errors.items() if not error <= tolerance]
        reason = "; fusec may leave out roundings of a quantised model: compare with --rounding source"
        return ", ".join(outputs) + (reason if outputs and self.rounds_less else "")


@compiles("rounding", "tune", "budget", "locked", model=Models)
def run(
    request: Request,
    target: Target = "auto",
    input: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE.npy", help="An input; those not given are random. May be repeated."),
    ] = None,
    seed: Seed = 0,
    file: Annotated[Path | None, typer.Option("-o", "--output", help="Write the outputs to this .npz file.")] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="onnxruntime", help="Run the model in onnxruntime, too, and compare.")
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Relative L2 distance that --compare allows.")] = TOLERANCE,
    as_json: AsJson = False,
) -> None:
    """Compile models and run each once: on the GPU if it is this machine's, else in simulation."""
    from fusec.cli.common import feeds as running

    files.check_writable(file)
    if compare is not None:
        running.need_onnxruntime(compare)
    models = _listed(request.models)
    arrays = files.arrays_of(input or ())
    options = _Options(target, seed, None if compare is None else tolerance, arrays)
    if len(models) > 1 or models[0] != request.model:
        if file is not None or input:
            raise FusecError(f"{'--output' if file is not None else '--input'} is for one model, not for {len(models)}")
        _run_all([replace(request, model=model, models=(model,)) for model in models], options, as_json)
        return
    with output.progress() as report:
        ran = _run_one(request, options, report)
        if file is not None:
            files.write_npz(file, ran.arrays)
    if as_json:
        output.say(output.json_text(ran.data))
    else:
        for row in ran.data["outputs"]:
            name = printable(str(row["name"]))
            figures = "" if row["mean"] is None else f" mean {row['mean']:.6g} std {row['std']:.6g}"
            output.say(f"{name}: {row['dtype']} {row['shape']}{figures}")
        output.say(f"ran {_where(ran.data['device'])} in {ran.data['seconds']:.3f} s")
        output.print_note(ran.note)
        output.print_hints(ran.data["hints"])
        for name, error in ran.errors.items():
            output.say(f"relative L2 distance from {compare}: {printable(name)} {error:.1e} (allowed {tolerance:.0e})")
    if file is not None:
        output.wrote(file, as_json)
    if bad := ran.bad(tolerance):
        raise CheckError(f"{request.model}: differs from {compare} by more than {tolerance:.0e}: {bad}")


def _listed(given: tuple[str, ...]) -> list[str]:
    """Return the models in order; a folder stands for the models below it."""
    found: list[str] = []
    for name in given:
        path = Path(name)
        if not path.is_dir():
            found.append(name)
            continue
        inside = sorted(str(each) for each in path.rglob("*") if each.suffix in SUFFIXES and each.is_file())
        if not inside:
            raise FusecError(f"{name}: has no file that ends in {', '.join(SUFFIXES)}")
        found += inside
    return list(dict.fromkeys(found))


def _run_one(request: Request, options: _Options, report: output.Report) -> _Run:
    """Compile a model and run it once; compare it with onnxruntime if there is a tolerance."""
    from fusec.cli.common import feeds as running
    from fusec.runtime import Executable

    executable = request.executable(options.target, report)
    feeds = running.feeds(executable, options.arrays, options.seed)
    report("run", 0, 0)
    start = time.perf_counter()
    results = executable.run(None, feeds)
    seconds = time.perf_counter() - start
    named = {spec.name: array for spec, array in zip(executable.outputs, results, strict=True)}
    errors: dict[str, float] = {}
    if options.tolerance is not None:
        report("onnxruntime", 0, 0)
        model = running.onnx_of(request.model, executable)
        # onnxruntime's optimisations give wrong results for convolutions of 8-bit floats
        optimised = not running.has_fp8(executable)
        errors = running.distances(model, request.model, feeds | request.constants(), named, optimised)
    rows = [{**running.statistics(name, array), "error": errors.get(name)} for name, array in named.items()]
    head: dict[str, Any] = {"model": request.model, "device": executable.device}
    data = {**head, "cudnn_asked": executable.asked, "seconds": seconds}
    counts = executable.compiled.program.counts if isinstance(executable, Executable) else executable.explain().summary
    data |= {"hints": [hint.to_json() for hint in executable.hints], "outputs": rows}
    return _Run(data, executable.note, counts, errors, named, running.rounds_less(executable))


def _run_all(requests: list[Request], options: _Options, as_json: bool) -> None:
    """Run models, with a line for each. One that fails does not end the others.

    Raises FusecError if a model could not run. Raises CheckError if outputs differ from onnxruntime's.
    """
    rows: list[dict[str, Any]] = []
    notes: set[str] = set()
    for request in requests:
        status, words, data = 0, "", {}
        try:
            with output.progress() as report:
                ran = _run_one(request, options, report)
            data, words = ran.data, f"ok, {ran.counts}, {_where(ran.data['device'])} in {ran.data['seconds']:.3f} s"
            notes.add(ran.note)
            if options.tolerance is not None:
                bad = ran.bad(options.tolerance)
                worst = max(ran.errors.values(), default=0.0)
                status = 1 if bad else 0
                words = f"differs from onnxruntime: {bad}" if bad else f"{words}, distance {worst:.1e}"
        except CheckError as error:
            status, words = 1, f"failed: {str(error).removeprefix(f'{request.model}: ')}"
        except (FusecError, OSError, MemoryError) as error:
            status, words = 2, f"error: {str(error).removeprefix(f'{request.model}: ')}"
        rows.append({"model": request.model, "status": status, "message": words, **data})
        if not as_json:
            output.say(f"{printable(request.model)}: {printable(words)}")
    if as_json:
        output.say(output.json_text({"models": rows}))
    else:
        for note in sorted(notes):
            output.print_note(note)
    failed = [row for row in rows if row["status"]]
    if failed:
        kind = FusecError if any(row["status"] == 2 for row in failed) else CheckError
        raise kind(f"{len(failed)} of {len(rows)} models failed")


def _where(device: str) -> str:
    """Return in words where a program ran."""
    return {"simulated": "in simulation", "cpu": "on the CPU"}.get(device, f"on {device}")
