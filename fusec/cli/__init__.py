"""The command line: `fusec compile | run | explain | verify | targets | doctor`.

Exit status: 0, 1 if a check the user asked for does not hold, 2 for any error (one clear line on stderr),
130 after Ctrl-C. What is heavy to import is imported by the command that needs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fusec import __version__
from fusec.cli import build, machine, reports
from fusec.errors import CheckError, FusecError

# typer brings its own click or uses the installed one, by its version; the base of its error is the same
USAGE_ERROR: Any = typer.BadParameter.__bases__[0]
INTERRUPTED = 130  # as shells have it: 128 + SIGINT

app = typer.Typer(
    name="fusec",
    help="Compile ONNX models to fused cuDNN plans, for the GPU of this machine or for another one.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fusec {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Compile ONNX models to fused cuDNN plans, for the GPU of this machine or for another one."""


app.command("compile")(build.compile)
app.command("run")(build.run)
app.command("explain")(reports.explain)
app.command("verify")(reports.verify)
app.command("targets")(machine.targets)
app.command("doctor")(machine.doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        status = app(list(arguments) if arguments is not None else None, standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except CheckError as error:
        return _fail(str(error), 1)
    except FusecError as error:
        return _fail(str(error))
    except USAGE_ERROR as error:
        return _fail(error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except MemoryError:
        return _fail("out of memory: the model, or a tensor it makes, is too large for this machine")
    except BrokenPipeError:
        # whoever read the output has gone: nothing more is written, nor complained about at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _fail(message: str, status: int = 2) -> int:
    sys.stdout.flush()
    print(f"fusec: error: {message}", file=sys.stderr)
    return status
