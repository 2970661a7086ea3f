"""Test commands that are ended from outside: soon, at any moment, and without a process that stays."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from cli.command import tiny
from helpers import quick

SOON_S = 2.0
MOMENTS_S = ((0.6, 1.8), (1.8, 4.0))  # after the start: while workers come up, and while they answer
# what runs when a signal comes: commands that start workers, and one that starts workers of workers
COMMANDS = {
    "compile": ("compile", "MODEL", "--shape", "x=1,8,8,8", "--target", "h200", "-o", "out.fusec"),
    "explain": ("explain", "MODEL", "--shape", "x=1,8,8,8", "--target", "h200,l4"),
    "fuzz": ("fuzz", "--time", "60s", "--workers", "2", "--database", "database"),
}


def marked(mark: str) -> list[str]:
    """The command lines of the processes that have this mark in their environment."""
    found: list[str] = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                if f"FUSEC_MARK={mark}".encode() in (place / "environ").read_bytes():
                    found.append(f"{place.name}: {(place / 'cmdline').read_bytes()!r}")
            except OSError:  # it ended, or is a zombie of another's
                continue
    return found


def ended(folder: Path, command: tuple[str, ...], number: int, after_s: float) -> tuple[int, str]:
    """Start a command with an empty cache, send it a signal, and check that all of it ends; its status and stderr."""
    mark, model = uuid.uuid4().hex, str(folder / "tiny.onnx")
    own = {"FUSEC_MARK": mark, "FUSEC_CACHE": str(folder / mark), "FUSEC_DEVICE": "none", "FUSEC_WORKERS": "2"}
    # a job in the background starts with interrupts ignored
    program = "import signal; signal.signal(2, signal.default_int_handler); from fusec.cli import main; main()"
    arguments = [model if word == "MODEL" else word for word in command]
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **own},
    ) as process:
        time.sleep(after_s)
        process.send_signal(number)
        start = time.monotonic()
        _, said = process.communicate(timeout=30)
        took = time.monotonic() - start
    while marked(mark) and time.monotonic() - start < SOON_S:
        time.sleep(0.01)
    assert marked(mark) == [], f"{after_s:.3f} s after the start"
    assert took < SOON_S, f"{took:.1f} s, {after_s:.3f} s after the start: {said}"
    return process.returncode, said


@pytest.mark.cudnn
@pytest.mark.parametrize(
    "number", quick([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], [signal.SIGINT]), ids=["INT", "TERM", "KILL"]
)
@pytest.mark.parametrize("command", quick(COMMANDS, ["compile"]))
def test_a_signal_ends_a_command_and_its_workers(command: str, number: signal.Signals, tmp_path: Path) -> None:
    draw, statuses = random.Random(number), set[int]()
    tiny(tmp_path)
    for moment in MOMENTS_S:
        status, said = ended(tmp_path, COMMANDS[command], number, draw.uniform(*moment))
        statuses.add(status)
        assert "Traceback" not in said or "in main" not in said  # Python's own, before the command began
    # -SIGINT: it came before the command had begun
    assert statuses <= {0, -number, 130 if number == signal.SIGINT else 0}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".") and number == signal.SIGINT]
