"""Run the code of a page of the tutorials: Python, commands with the output they show, and files to save."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.command import fusec

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVED = re.compile(r"# save as (\S+)\n")


@dataclass(frozen=True)
class Block:
    """A block of code: its language, its text, and the line of the page on which it begins."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page."""
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        yield Block(found[1], found[2], text.count("\n", 0, found.start()) + 2)


def run(page: Path, folder: Path) -> None:
    """Run all blocks of a page in order, with `folder` as the current folder.

    `python` blocks share their names. `console` blocks hold commands after `$ `, and output in which `...` stands for
    any text. A block whose first line is `# save as NAME` is a file. Other languages are not run.
    """
    names: dict[str, Any] = {"__name__": "tutorial"}
    status = 0
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if saved := _SAVED.match(block.text):
            (folder / saved[1]).write_text(block.text[saved.end() :])
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
        elif block.language == "console":
            for command, wanted in _commands(block.text):
                status = _compare(command, wanted, status, where)


def _commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command and the output shown after it."""
    _, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    for part in parts:
        command, _, output = part.partition("\n")
        yield command, output


def _compare(command: str, wanted: str, before: int, where: str) -> int:
    """Run a command and compare its output with the one shown; return its status."""
    if command == "echo $?":
        assert int(wanted) == before, f"{where}: the status is {before}"
        return 0
    program, *arguments = shlex.split(command)
    assert program == "fusec", f"{where}: only `fusec` is run, not {program}"
    result = fusec(*arguments)
    assert not wanted or _matches(wanted.splitlines(), result.stdout.splitlines()), (
        f"{where}: {command}\nshown:\n{wanted}\nprinted:\n{result.stdout}\n{result.stderr}"
    )
    return result.exit_code


def _matches(shown: list[str], printed: list[str]) -> bool:
    """Return True if the lines shown stand for the lines printed: a line of `...` for any lines."""
    ends = {0}  # how many printed lines the shown lines so far may stand for
    for line in shown:
        if line.strip() == "...":
            ends = set(range(min(ends, default=len(printed) + 1), len(printed) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(printed) and _is_line(line, printed[end])}
    return len(printed) in ends


def _is_line(shown: str, printed: str) -> bool:
    """Return True if one line stands for another: `...` for any text, spaces for any number of spaces."""
    first, *others = [" ".join(piece.split()) for piece in shown.split("...")]
    text = " ".join(printed.split())
    if not others:
        return first == text
    if not text.startswith(first) or not text.endswith(others[-1]):
        return False
    place, end = len(first), len(text) - len(others[-1])
    for piece in others[:-1]:
        place = text.find(piece, place, end) + len(piece)
        if place < len(piece):
            return False
    return place <= end
