"""Run the command `fusec`, and turn its errors into messages and exit statuses.

Exit statuses: 0 for success; 1 if a check failed or the machine lacks a piece; 2 for an error, with one message on
stderr; 130 if interrupted; 141 if the reader of the output is gone. Each command imports what it needs inside its
function, so that `--help` and `--version` answer fast.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from fusec import __version__
from fusec.cli import (
    atlas,
    bench,
    cache,
    compile,
    convert,
    explain,
    fuzz,
    lock,
    machine,
    quantize,
    report,
    repro,
    run,
    serve,
    verify,
)
from fusec.cli.common import output, verbosity
from fusec.errors import CheckError, FusecError
from fusec.system import interrupts

EXIT_CHECK, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, interrupts.EXIT_INTERRUPTED, 141


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
    rich_markup_mode=None,  # plain messages: a box would wrap file names
    pretty_exceptions_enable=False,
)

# typer brings its own click or takes the installed one, by its version
_UsageError: Any = typer.BadParameter.__bases__[0]


def main() -> NoReturn:
    """Run the command line of this process. This is the entry point of `fusec`."""
    interrupts.watch()
    try:
        with output.plain_warnings(), verbosity.restored():
            status = app(prog_name="fusec", standalone_mode=False)
        sys.stdout.flush()
    except _UsageError as error:
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
        output.say(f"fusec: error: {error.format_message().rstrip('.')}{hint}", file=sys.stderr)
        status = EXIT_ERROR
    except KeyboardInterrupt:  # while typer read the command line, or after the command
        output.say("fusec: interrupted", file=sys.stderr)
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        status = EXIT_PIPE
        with contextlib.suppress(typer.Exit):
            _reader_left()
    except OSError as error:  # from the last flush, for example on a full disk
        output.say(f"fusec: error: {_os_error(error)}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_ERROR
    sys.exit(status if isinstance(status, int) else 0)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from fusec.gpu.cudnn.without_driver.deviceless import cudnn_version
    from fusec.system.installed import installed_version

    installed = installed_version("nvidia-cudnn-frontend")
    frontend, cudnn = "" if installed is None else f" with frontend {installed}", cudnn_version()
    output.say(f"fusec {__version__}, {f'cuDNN {cudnn}{frontend}' if cudnn else 'no cuDNN'}")
    raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the versions of fusec and cuDNN and leave."
        ),
    ] = False,
    verbose: verbosity.Verbose = 0,
    quiet: verbosity.Quiet = False,
) -> None:
    """Compile exported models to fused NVIDIA cuDNN plans, and explain what fused and why the rest did not."""
    verbosity.begin(verbose, quiet)
    if context.invoked_subcommand is None:
        output.say(context.get_help())


for command in (
    *(compile.compile, run.run, explain.explain, verify.verify, repro.repro, bench.bench, convert.convert),
    quantize.quantize,
    *(serve.serve, serve.export_triton),
    *(machine.targets, machine.doctor, atlas.atlas),
):
    app.command()(verbosity.with_verbosity(command))
app.add_typer(fuzz.app, name="fuzz")
app.add_typer(cache.app, name="cache")
app.add_typer(lock.app, name="lock")
app.add_typer(report.app, name="report")


def _os_error(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def _reader_left() -> NoReturn:
    """Exit without a message, because the reader of our output closed it. The last flush goes to /dev/null."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(EXIT_PIPE)


def _fail(message: str, status: int) -> NoReturn:
    output.say(message, file=sys.stderr)
    raise typer.Exit(status)
