"""Run `fusec compile`: compile a model, summarise it, write a .fusec file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusec.cli.common import files, output, sizes
from fusec.cli.common.options import AsJson, Locked
from fusec.cli.common.request import Request, compiles
from fusec.errors import FusecError
from fusec.system.printable import printable

if TYPE_CHECKING:
    from fusec.execution.compilation import Compiled
    from fusec.lockfile import LockedProgram
    from fusec.segments.executable import SegmentedExecutable


@compiles("rounding", "budget")
def compile(
    request: Request,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="A GPU of `fusec targets`; may be repeated for a .fusec file. auto: this machine's, or an H200."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the compiled model to this .fusec file; else the summary, as JSON."),
    ] = None,
    bucket: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SIZES", help="Sizes to compile a dim for; others are padded: batch=1,8,32."),
    ] = None,
    sources: Annotated[
        bool,
        typer.Option(
            "--sources/--no-sources",
            help="Also store in the .fusec file the weights that only the imported model has.",
        ),
    ] = False,
    locked: Locked = None,
    as_json: AsJson = False,
) -> None:
    """Compile a model and print a summary of its program."""
    from fusec.compiler.build_plans import apply_lock
    from fusec.errors import NotOneProgramError
    from fusec.segments.executable import SegmentedExecutable

    files.check_writable(file)
    start = time.perf_counter()
    targets = list(dict.fromkeys(target or ["auto"]))
    saves = file is not None and file.suffix == ".fusec"
    if len(targets) > 1 and not saves:
        raise FusecError("several targets need -o FILE.fusec, because only such a file holds them all")
    if sources and not saves:
        raise FusecError("--sources needs -o FILE.fusec, because only such a file holds weights")
    with output.progress() as report:
        sized = sizes.ranged(request, bucket or (), locked is not None)
        try:
            if sized is None:
                all_compiled = [request.build(name, report) for name in targets]
            else:
                all_compiled = sizes.build(request, sized, targets, report, all_sizes=saves)
        except NotOneProgramError:
            if saves or locked is not None:
                raise
            executable = request.executable(targets[0], report, simulate=True)
            assert isinstance(executable, SegmentedExecutable)
            note = executable.note
            summary, words = _segments_summary(request, targets[0], executable, time.perf_counter() - start)
        else:
            programs = apply_lock(locked, all_compiled) if locked is not None else None
            compiled = all_compiled[0] if programs is None else programs[0].compiled
            if file is not None and saves:
                _save(file, all_compiled, report, programs, sized, sources)
            note = compiled.note
            summary, words = _summary(request.model, compiled, time.perf_counter() - start)
            if sized is not None and saves:
                summary["shapes"] = sizes.shapes_of(all_compiled)
    if file is not None and not saves:
        files.write_text(file, output.json_text(summary))
    if as_json:
        output.say(output.json_text(summary))
    else:
        _print(request.model, summary, words, note)
    if file is not None:
        output.wrote(file, as_json)


def _save(
    path: Path,
    compiled: Sequence[Compiled],
    report: output.Report,
    locked: Sequence[LockedProgram] | None,
    sized: sizes.Sized | None,
    sources: bool,
) -> None:
    """Write a `.fusec` file with plans that are built here, also for GPUs that this machine does not have.

    locked: programs with the plans of a lock file; None for the first plans that cuDNN offers.
    sized: the sizes of dims, if there are programs for several sets of input shapes.
    sources: whether the file also holds the weights that only the imported model has.
    """
    from fusec.artifacts import fusec_file
    from fusec.compiler.build_plans import build_plans
    from fusec.dynamic_shapes import save_shapes

    for each in compiled:
        each.require_answers(f"{path}: a compiled model")
    programs = compiled if locked is None else [each.compiled for each in locked]
    built = build_plans(programs, report, None if locked is None else [each.choices for each in locked])
    if sized is None:
        fusec_file.save(path, programs, built.plans, kernels=built.kernels, sources=sources)
    else:
        saved = [(each, built.plans) for each in programs]
        save_shapes.save(path, saved, sized.sizing, sized.padding, kernels=built.kernels, sources=sources)


def _print(model: str, summary: dict[str, Any], words: str, note: str) -> None:
    """Print a summary, its totals in words, the note that goes with it, and the hints."""
    output.say(f"{model} for {summary['target']} in {summary['precision']}, compiled in {summary['seconds']:.1f} s")
    for kind in ("inputs", "outputs"):
        for spec in summary[kind]:
            layout = ", channels last" if "order" in spec else ""
            output.say(f"  {kind[:-1]:7}{printable(spec['name'])}: {spec['dtype']} {spec['shape']}{layout}")
    output.say(f"  {words}")
    for shapes in summary.get("shapes", ()):
        output.say(f"  program for {', '.join(f'{printable(name)} {shape}' for name, shape in shapes.items())}")
    output.print_note(note)
    output.print_hints(summary["hints"])


def _segments_summary(
    request: Request, target: str, executable: SegmentedExecutable, seconds: float
) -> tuple[dict[str, Any], str]:
    """Return the summary of a model with host steps. Dims that depend on values are null."""
    from fusec.driver import resolve_target

    def specs(given: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {
                "name": spec.name,
                "dtype": None if spec.dtype is None else spec.dtype.name,
                "shape": None if spec.shape is None else [None if d == "" else d for d in spec.shape],
            }
            for spec in given
        ]

    explanation = executable.explain()
    data = {
        "model": request.model,
        "target": resolve_target(target).name,
        "precision": request.options.precision,
        "disabled": sorted(request.options.disable),
        "inputs": specs(executable.inputs),
        "outputs": specs(executable.outputs),
        "totals": explanation.totals,
        "hints": [hint.to_json() for hint in executable.hints],
        "cudnn_asked": executable.asked,
        "seconds": seconds,
    }
    steps = "\n  ".join(f"host step {printable(s.node)!r} ({s.op})" for r in explanation.segments for s in r.steps)
    return data, f"{explanation.summary}\n  {steps}"


def _summary(model: str, compiled: Compiled, seconds: float) -> tuple[dict[str, Any], str]:
    """Return the summary of a compilation as data, and its totals in words."""
    from fusec.diagnostics import hints
    from fusec.diagnostics.explain import explain

    def specs(names: Sequence[str], values: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {"name": name, "dtype": v.type.dtype.numpy.name, "shape": list(v.type.shape)}
            | ({"order": list(v.type.order)} if v.type.order else {})
            for name, v in zip(names, values, strict=True)
        ]

    graph = compiled.graph
    found = [hint.to_json() for hint in hints.hints(compiled)]
    explanation = replace(explain(compiled.program, compiled.target, cores=False), asked=compiled.asked)
    data = {
        "model": model,
        "target": compiled.target.name,
        "precision": compiled.options.precision,
        "disabled": compiled.options.disabled_names,
        "inputs": specs([v.name for v in graph.inputs], graph.inputs),
        "outputs": specs(graph.output_names, graph.outputs),
        "totals": explanation.totals,
        "engine_classes": explanation.engine_classes,
        "hints": found,
        "cudnn_asked": compiled.asked,
        "seconds": seconds,
    }
    return data, explanation.summary
