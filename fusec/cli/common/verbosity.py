"""Give commands -v and -q: log records on stderr, or nothing but results and errors."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Generator
from typing import Annotated, Any

import typer

from fusec.cli.common import output
from fusec.system.printable import printable

Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        show_default=False,
        help="Print what fusec does on stderr; -vv: each pass and stage.",
    ),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print results and errors alone.")]

_LOG = logging.getLogger("fusec")


class _Handler(logging.StreamHandler[Any]):
    """Print records on the current stderr, with control characters escaped."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return printable(f"{record.relativeCreated / 1e3:9.3f} s  {record.name}: {record.getMessage()}")


_handler = _Handler()
_global = 0  # number of -v before the command
_global_quiet = False


@contextlib.contextmanager
def restored() -> Generator[None]:
    """Undo the options after a command, because one process may run several."""
    try:
        with warnings.catch_warnings():
            yield
    finally:
        begin(0, False)


def begin(verbose: int, quiet: bool) -> None:
    """Apply the options before the command."""
    global _global, _global_quiet
    _global, _global_quiet = verbose, quiet
    apply(0, False)


def apply(verbose: int, quiet: bool) -> None:
    """Apply the options after the command, together with those before it. -q wins."""
    count, output.quiet = verbose + _global, quiet or _global_quiet
    _LOG.removeHandler(_handler)
    _LOG.setLevel(logging.NOTSET)
    if count and not output.quiet:
        _LOG.addHandler(_handler)
        _LOG.setLevel(logging.INFO if count == 1 else logging.DEBUG)
    if output.quiet:
        warnings.simplefilter("ignore")


def with_verbosity(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options -v and -q."""

    @functools.wraps(command)
    def run(verbose: int, quiet: bool, **given: Any) -> None:
        apply(verbose, quiet)
        command(**given)

    # typer makes the options of a command from the signature and the annotations of its function
    parameters = dict(inspect.signature(command, eval_str=True).parameters)
    for name, type, default in (("verbose", Verbose, 0), ("quiet", Quiet, False)):
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters[name] = inspect.Parameter(name, kind, default=default, annotation=type)
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters.values()]
    run.__dict__["__signature__"] = inspect.Signature(keywords)
    return run
