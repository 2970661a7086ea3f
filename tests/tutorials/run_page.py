"""Run the code of a page of the tutorials: Python, commands with the output they show, and files to save."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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


def blocks(page: Path, others: Mapping[str, str] | None = None) -> Iterator[Block]:
    """Yield the blocks of a page. others: what stands in the place of some texts."""
    text = page.read_text()
    for old, new in (others or {}).items():
        text = text.replace(old, new)
    for found in _BLOCK.finditer(text):
        yield Block(found[1], found[2], text.count("\n", 0, found.start()) + 2)


def run(page: Path, folder: Path) -> None:
    """Run all blocks of a page in order, with `folder` as the current folder.

    `python` blocks share their names. `console` blocks hold commands after `$ `, and output in which `...` stands for
    any text. A command that ends in `&` runs until `kill %1`, or until the page ends; port 8000 is then any free one. A
    block whose first line is `# save as NAME` is a file. Other languages are not run.
    """
    with ExitStack() as background:
        _run(page, folder, background)


def _run(page: Path, folder: Path, background: ExitStack) -> None:
    names: dict[str, Any] = {"__name__": "tutorial"}
    status, port = 0, str(_free_port())
    for block in blocks(page, {"8000": port}):
        where = f"{page.name}:{block.line}"
        if saved := _SAVED.match(block.text):
            (folder / saved[1]).write_text(block.text[saved.end() :])
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
        elif block.language == "console":
            for command, wanted in _commands(block.text):
                if command.endswith(" &"):
                    background.enter_context(_running(command.removesuffix(" &"), wanted, where))
                elif command == "kill %1":
                    background.close()
                else:
                    status = _compare(command, wanted, status, where)


def _commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command and the output shown after it."""
    _, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    for part in parts:
        command, _, output = part.partition("\n")
        yield command, output


@contextmanager
def _running(command: str, wanted: str, where: str) -> Generator[None]:
    """Run a command in a process of its own, which must end without an error when it is asked to.

    wanted: its first lines, for which this waits.
    """
    program, *arguments = shlex.split(command)
    assert program == "fusec", f"{where}: only `fusec` is run, not {program}"
    process = subprocess.Popen(
        [sys.executable, "-m", "fusec", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FUSEC_DEVICE": "none", "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        printed = [process.stdout.readline().rstrip("\n") for _ in wanted.splitlines()]
        assert _matches(wanted.splitlines(), printed), f"{where}: {command}\nshown:\n{wanted}\nprinted:\n{printed}"
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, f"{where}: {command}: it ended with status {process.returncode}"
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


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
