"""Run the command `fusec`: options to calls of the library, results to text or JSON, errors to exit statuses.

0: fine; 1: a check did not hold, or the machine lacks a piece; 2: an error, with one message on stderr; 130:
interrupted. Each command imports what it needs inside its function, so that `--help` and `--version` answer fast.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from fusec import __version__
from fusec.cli import bench, cache, convert, fuzz, lock, machine, repro, signals
from fusec.cli import files as cli_io
from fusec.cli.request import Request
from fusec.errors import CheckError, FusecError
from fusec.system.printable import printable

if TYPE_CHECKING:
    from fusec.execution.compilation import Compiled

EXIT_CHECK, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, signals.EXIT_INTERRUPTED, 141
TOLERANCE = 1e-3  # relative L2 distance from onnxruntime that `run --compare` lets pass


class _Commands(TyperGroup):
    """Commands whose errors become one message on stderr and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CheckError as error:
            _fail(f"fusec: {error}", EXIT_CHECK)
        except FusecError as error:
            _fail(f"fusec: error: {error}", EXIT_ERROR)
        except MemoryError as error:
            reason = str(error)
            _fail(f"fusec: error: out of memory{f': {reason}' if reason else ''}", EXIT_ERROR)
        except KeyboardInterrupt:
            _fail("fusec: interrupted", EXIT_INTERRUPTED)
        except BrokenPipeError:
            _reader_left()
        except OSError as error:
            _fail(f"fusec: error: {_os_error(error)}", EXIT_ERROR)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    rich_markup_mode=None,  # plain messages: a box would wrap file names
    pretty_exceptions_enable=False,
)

Seed = Annotated[int, typer.Option(min=0, help="Of the random numbers.")]


# typer brings its own click or takes the installed one, by its version
_UsageError: Any = typer.BadParameter.__bases__[0]


def main() -> NoReturn:
    """The entry point: run the command line of this process."""
    signals.watch()
    try:
        with cli_io.plain_warnings():
            status = app(prog_name="fusec", standalone_mode=False)
        sys.stdout.flush()
    except _UsageError as error:
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
        cli_io.say(f"fusec: error: {error.format_message().rstrip('.')}{hint}", file=sys.stderr)
        status = EXIT_ERROR
    except KeyboardInterrupt:  # while the command line was read, or after the command
        cli_io.say("fusec: interrupted", file=sys.stderr)
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        status = EXIT_PIPE
        with contextlib.suppress(typer.Exit):
            _reader_left()
    except OSError as error:  # the last of the output: a full disk
        cli_io.say(f"fusec: error: {_os_error(error)}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_ERROR
    sys.exit(status if isinstance(status, int) else 0)


def _print_version(wanted: bool) -> None:
    if wanted:
        cli_io.say(f"fusec {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Compile exported models to fused NVIDIA cuDNN plans, and say what fused and why the rest did not."""


@app.command()
def compile(
    model: cli_io.Model,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="A GPU of `fusec targets`; may be repeated for a .fusec file. auto: this machine's, or an H200."
        ),
    ] = None,
    precision: cli_io.Precision = "fp32",
    shape: cli_io.Shapes = None,
    disable: cli_io.Disable = None,
    deterministic: cli_io.Deterministic = False,
    rounding: cli_io.Rounding = "fused",
    channels_last: cli_io.ChannelsLast = False,
    as_json: cli_io.AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the compiled model to this .fusec file; else the summary, as JSON."),
    ] = None,
    locked: cli_io.Locked = None,
) -> None:
    """Compile a model and print what it became."""
    from fusec.execution.compile_options import CompileOptions

    cli_io.check_writable(output)
    options = CompileOptions(
        precision=precision,
        disable=disable or (),
        rounding=rounding,
        deterministic=deterministic,
        channels_last=channels_last,
    )
    request = Request(model, shape, options)
    start = time.perf_counter()
    with cli_io.progress() as report:
        goals = list(dict.fromkeys(target or ["auto"]))
        saves = output is not None and output.suffix == ".fusec"
        if len(goals) > 1 and not saves:
            raise FusecError("several targets need -o FILE.fusec, which holds them all")
        all_compiled = [request.build(goal, report) for goal in goals]
        compiled = all_compiled[0]
        programs = lock.required(locked, all_compiled) if locked is not None else None
        compiled = compiled if programs is None else programs[0].compiled
        if output is not None and saves:
            lock.save(output, all_compiled, report, programs)
    summary, words = _summary(request, compiled, time.perf_counter() - start)
    if output is not None and not saves:
        text = cli_io.json_text(summary) + "\n"
        cli_io.write_whole(output, lambda file: file.write(text.encode()))
    if as_json:
        cli_io.say(cli_io.json_text(summary))
        return
    cli_io.say(f"{model} for {summary['target']} in {summary['precision']}, compiled in {summary['seconds']:.1f} s")
    for kind in ("inputs", "outputs"):
        for spec in summary[kind]:
            lies = ", channels last" if "order" in spec else ""
            cli_io.say(f"  {kind[:-1]:7}{printable(spec['name'])}: {spec['dtype']} {spec['shape']}{lies}")
    cli_io.say(f"  {words}")
    cli_io.print_note(compiled.note)


@app.command()
def run(
    model: cli_io.Model,
    target: cli_io.Target = "auto",
    precision: cli_io.Precision = "fp32",
    shape: cli_io.Shapes = None,
    disable: cli_io.Disable = None,
    deterministic: cli_io.Deterministic = False,
    rounding: cli_io.Rounding = "fused",
    channels_last: cli_io.ChannelsLast = False,
    input: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE.npy", help="An input; those not given are random. May be repeated."),
    ] = None,
    seed: Seed = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the outputs to this .npz file.")] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="onnxruntime", help="Run the file in onnxruntime, too, and compare.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Relative L2 distance that --compare lets pass.")
    ] = TOLERANCE,
    tune: cli_io.Tune = "quick",
    budget: cli_io.Budget = None,
    locked: cli_io.Locked = None,
    as_json: cli_io.AsJson = False,
) -> None:
    """Compile a model and run it once: on the GPU if it is this machine's, else in simulation."""
    from fusec.cli import run as running
    from fusec.execution.compile_options import CompileOptions

    cli_io.check_writable(output)
    if compare is not None:
        running.need_onnxruntime(compare)
    arrays = cli_io.arrays_of(input or ())
    options = CompileOptions(
        precision=precision,
        tune=tune,
        budget_s=cli_io.budget_of(budget),
        disable=disable or (),
        rounding=rounding,
        deterministic=deterministic,
        channels_last=channels_last,
        lock=locked,
    )
    request = Request(model, shape, options)
    with cli_io.progress() as report:
        executable = request.executable(target, report)
        feeds = running.feeds(executable, arrays, seed)
        report("run", 0, 0)
        start = time.perf_counter()
        results = executable.run(None, feeds)
        seconds = time.perf_counter() - start
        named = {spec.name: array for spec, array in zip(executable.outputs, results, strict=True)}
        if output is not None:
            cli_io.write_npz(output, named)
        report("onnxruntime", 0, 0)
        errors = running.distances(model, feeds, named) if compare is not None else {}
    rows = [{**running.statistics(name, array), "error": errors.get(name)} for name, array in named.items()]
    if as_json:
        told = {"model": model, "device": executable.device, "cudnn_asked": executable.compiled.asked}
        cli_io.say(cli_io.json_text({**told, "seconds": seconds, "outputs": rows}))
    else:
        for row in rows:
            name = printable(str(row["name"]))
            cli_io.say(f"{name}: {row['dtype']} {row['shape']} mean {row['mean']:.6g} std {row['std']:.6g}")
        cli_io.say(f"ran on {executable.device} in {seconds:.3f} s")
        cli_io.print_note(executable.compiled.note)
        for name, error in errors.items():
            cli_io.say(f"relative L2 distance from {compare}: {printable(name)} {error:.1e} (allowed {tolerance:.0e})")
    bad = [f"{printable(name)} {error:.1e}" for name, error in errors.items() if not error <= tolerance]  # NaN is bad
    if bad:
        raise CheckError(f"{model}: differs from {compare} by more than {tolerance:.0e}: {', '.join(bad)}")


@app.command()
def explain(
    model: cli_io.Model,
    target: Annotated[str, typer.Option(help="GPUs of `fusec targets`, joined by commas.")] = "auto",
    precision: cli_io.Precision = "fp32",
    shape: cli_io.Shapes = None,
    disable: cli_io.Disable = None,
    deterministic: cli_io.Deterministic = False,
    rounding: cli_io.Rounding = "fused",
    channels_last: cli_io.ChannelsLast = False,
    must_fuse: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Fail unless chains like 'conv*+add+relu' are one step each."),
    ] = None,
    cudnn_only: Annotated[
        bool, typer.Option("--cudnn-only", help="With --must-fuse: only steps that cuDNN runs count.")
    ] = False,
    cores: Annotated[bool, typer.Option(help="Reduce each refusal to its smallest core (asks cuDNN more).")] = True,
    as_json: cli_io.AsJson = False,
) -> None:
    """Show what fuses into which step on each GPU and, for what does not, why."""
    from fusec import driver
    from fusec.diagnostics import explain as explaining
    from fusec.diagnostics.must_fuse import assert_fused
    from fusec.execution.compile_options import CompileOptions

    goals = [driver.resolve_target(name).name for name in dict.fromkeys(target.split(","))]
    options = CompileOptions(
        precision=precision,
        disable=disable or (),
        rounding=rounding,
        deterministic=deterministic,
        channels_last=channels_last,
    )
    request = Request(model, shape, options)
    explained: list[tuple[str, explaining.Explanation]] = []
    checks: list[dict[str, Any]] = []
    with cli_io.progress() as report:
        for goal in goals:
            compiled = request.build(goal, report)
            explained.append(
                (goal, explaining.explain(compiled.program, compiled.target, compiled.judge, cores, report))
            )
            precision = compiled.options.precision
            for pattern in must_fuse or ():
                compiled.require_answers(f"--must-fuse {pattern!r}")
                miss = ""
                try:
                    assert_fused(compiled.program, pattern, cudnn_only)
                except CheckError as error:
                    miss = str(error)
                checks.append({"target": goal, "pattern": pattern, "ok": not miss, "message": miss})
    if as_json:
        targets = [explanation.to_json() for _, explanation in explained]
        cli_io.say(cli_io.json_text({"model": model, "precision": precision, "targets": targets, "must_fuse": checks}))
    else:
        if len(explained) > 1:
            reasons = [f"{goal}\n{explanation.reasons()}" for goal, explanation in explained]
            cli_io.say("\n\n".join([explaining.compare(explained), *reasons]))
        else:
            cli_io.say(explained[0][1])
    missed = [f"{check['target']}: {check['message']}" for check in checks if not check["ok"]]
    if missed:
        raise CheckError("must-fuse does not hold\n" + "\n".join(missed))


@app.command()
def verify(
    model: cli_io.Model,
    target: cli_io.Target = "auto",
    precision: cli_io.Precision = "fp32",
    shape: cli_io.Shapes = None,
    disable: cli_io.Disable = None,
    deterministic: cli_io.Deterministic = False,
    rounding: cli_io.Rounding = "fused",
    channels_last: cli_io.ChannelsLast = False,
    seed: Seed = 0,
    tune: cli_io.Tune = "quick",
    budget: cli_io.Budget = None,
    as_json: cli_io.AsJson = False,
) -> None:
    """Check passes and partitions against the reference on random inputs; the steps as they run on this machine's GPU,
    if that is the target, else the lowered graphs in simulation."""
    from fusec import driver
    from fusec.diagnostics import verify as verifying
    from fusec.execution.compile_options import CompileOptions
    from fusec.gpu import device

    options = CompileOptions(
        precision=precision,
        tune=tune,
        budget_s=cli_io.budget_of(budget),
        disable=disable or (),
        rounding=rounding,
        deterministic=deterministic,
        channels_last=channels_last,
    )
    request = Request(model, shape, options)
    with cli_io.progress() as report:
        ready = None
        if device.is_present(driver.resolve_target(target)):
            ready = request.executable(target, report)
        compiled = request.build(target, report) if ready is None else ready.compiled

        def done(steps: int, total: int) -> None:
            report("verify", steps, total)

        result = verifying.verify(compiled, seed, progress=done) if ready is None else ready.verify(seed, done)
    told = {"model": model, "target": compiled.target.name, "cudnn_asked": compiled.asked}
    cli_io.say(cli_io.json_text({**told, **result.to_json()}) if as_json else result)
    cli_io.print_note("" if as_json else compiled.note)
    if not result.ok:
        bad = sum(not check.ok for check in result.checks)
        raise CheckError(f"{model}: {bad} of {len(result.checks)} checks failed")


app.command()(repro.repro)
app.command()(bench.bench)
app.command()(convert.convert)
app.command()(machine.targets)
app.command()(machine.doctor)
app.add_typer(fuzz.app, name="fuzz")
app.add_typer(cache.app, name="cache")
app.add_typer(lock.app, name="lock")


def _os_error(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def _reader_left() -> NoReturn:
    """End quietly because the reader of our output closed it: the flush at exit then writes to /dev/null."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(EXIT_PIPE)


def _fail(message: str, status: int) -> NoReturn:
    cli_io.say(message, file=sys.stderr)
    raise typer.Exit(status)


def _summary(request: Request, compiled: Compiled, seconds: float) -> tuple[dict[str, Any], str]:
    """Return the summary of a compilation as data, and its totals in words."""
    from fusec.diagnostics.explain import explain as explained

    def specs(names: Sequence[str], values: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {"name": name, "dtype": v.type.dtype.numpy.name, "shape": list(v.type.shape)}
            | ({"order": list(v.type.order)} if v.type.order else {})
            for name, v in zip(names, values, strict=True)
        ]

    graph = compiled.graph
    explanation = replace(explained(compiled.program, compiled.target, cores=False), asked=compiled.asked)
    data = {
        "model": request.model,
        "target": compiled.target.name,
        "precision": compiled.options.precision,
        "disabled": compiled.options.disabled_names,
        "inputs": specs([v.name for v in graph.inputs], graph.inputs),
        "outputs": specs(graph.output_names, graph.outputs),
        "totals": explanation.totals,
        "cudnn_asked": compiled.asked,
        "seconds": seconds,
    }
    return data, explanation.summary
