"""Colour a report on a terminal, and find how wide that terminal is."""

from __future__ import annotations

import os
import re
import shutil
import sys

WIDTH = 118  # of reports that go to a file or a pipe
_NARROWEST = 60

_BOLD, _DIM, _GREEN, _YELLOW, _CYAN = "1", "2", "32", "33", "36"
_ROW = re.compile(r"^[ \d×┌│└]*\d+  ")  # of a table of steps
_RUNS_AS = {
    re.compile(r"(?<=  )precompiled (?:single|fused)(?=  )"): _GREEN,
    re.compile(r"(?<=  )(?:runtime (?:generic|special)|cublaslt|proposed)(?=  )"): _CYAN,
    re.compile(r"(?<=  )kernel(?=  )"): _YELLOW,
    re.compile(r"(?<=  )view(?=  )"): _DIM,
}
_LINES = {
    re.compile(r"^(?:Not in a cuDNN step|Fusions declined|In floats, in a quantised model):$"): _BOLD,
    re.compile(r"^[─ ]+$"): _DIM,
    re.compile(r"^ *hint: "): _YELLOW,
    re.compile(r"^    accepted "): _GREEN,
}


def wanted() -> bool:
    """Tell if stdout is a terminal that shows colours, and the user did not set NO_COLOR (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Return the width of a line of a report: that of the terminal, or WIDTH where there is none."""
    return max(shutil.get_terminal_size((WIDTH, 24)).columns, _NARROWEST) if sys.stdout.isatty() else WIDTH


def coloured(text: str) -> str:
    """Colour a text whose control characters are escaped. The result has those of the colours alone."""
    return "\n".join(map(_line, text.split("\n")))


def _line(line: str) -> str:
    for pattern, colour in _LINES.items():
        if pattern.search(line):
            return _in_colour(line, colour)
    if _ROW.match(line):
        for pattern, colour in _RUNS_AS.items():
            if pattern.search(line):
                return pattern.sub(lambda found, colour=colour: _in_colour(found.group(), colour), line, count=1)
    return line


def _in_colour(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"
