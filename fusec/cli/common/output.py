"""Print results, notes, warnings and progress of a command, with control characters escaped."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fusec.cli.common import colour
from fusec.errors import CudnnNotAskedWarning
from fusec.system.printable import printable, printable_lines

Report = Callable[[str, int, int], None]  # stage, done, total (0: not known)
quiet = False  # print results and errors alone; verbosity.py sets it


def result(data: Any, text: object, as_json: bool) -> None:
    """Print a result: its data as JSON, or its text."""
    say(json_text(data) if as_json else text)


def print_note(note: str) -> None:
    """Print the note that goes with a result, if there is one."""
    if note and not quiet:
        say(note)


def print_hints(hints: Sequence[Mapping[str, Any]]) -> None:
    """Print what the user may want to know about a program."""
    for hint in () if quiet else hints:
        show(f"  hint: {hint['text']}")


def json_text(data: Any) -> str:
    """Return one JSON document, with escapes for all characters that a terminal could obey."""
    return json.dumps(_plain(data), indent=1, allow_nan=False).replace("\x7f", "\\u007f")


def say(text: object, file: IO[str] | None = None, flush: bool = False) -> None:
    """Print a text that may contain names from a model or a file, with control characters escaped."""
    print(_escaped(text), file=file, flush=flush)


def show(text: object) -> None:
    """Print a report, in colours if stdout is a terminal that has them."""
    escaped = _escaped(text)
    print(colour.coloured(escaped) if colour.wanted() else escaped)


def wrote(path: Path, as_json: bool) -> None:
    """Print which file or folder was written and how large it is; nothing next to a JSON document."""
    if quiet or as_json:
        return
    from fusec.diagnostics.text_table import bytes_text  # here, because it would triple the time of `fusec --help`

    size = path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    say(f"wrote {printable(str(path))}, {bytes_text(size)}")


def _escaped(text: object) -> str:
    """Escape control characters.

    Line breaks stay, because fusec wrote them, except those in arguments of the command line, such as names.
    """
    words = printable_lines(str(text))
    for given in (part for argument in sys.argv[1:] for part in (argument, *argument.split("=")) if "\n" in part):
        words = words.replace(printable_lines(given), printable(given))
    return words


def _plain(data: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    return [_plain(value) for value in data] if isinstance(data, list | tuple) else data


@contextlib.contextmanager
def plain_warnings() -> Generator[None]:
    """Escape control characters in warnings, because they name files and nodes and Python prints them unchanged."""
    standard = warnings.formatwarning

    def escaped(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        return standard(printable(str(message)), category, filename, lineno, line)

    warnings.formatwarning = escaped
    try:
        yield
    finally:
        warnings.formatwarning = standard


@contextlib.contextmanager
def without_cudnn_warning() -> Generator[None]:
    """Suppress the warning that cuDNN was not asked, because the command prints it with its result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CudnnNotAskedWarning)
        yield


@contextlib.contextmanager
def progress() -> Generator[Report]:
    """Return a function to report progress to; it shows bars on stderr if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from fusec.cli.common.bars import bars

    with bars() as report:
        yield report
