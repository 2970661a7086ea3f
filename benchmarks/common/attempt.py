"""Measure within a time limit: print each figure as soon as it is known, and write rows that are not complete yet."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.result_files import KEYS, gpu_and_torch, write_row


class TooLongError(BaseException):
    """A time limit was reached. No `Exception`, because torch's autotuning catches all of these."""


@contextmanager
def within(seconds: float) -> Generator[None]:
    """Raise TooLongError when the block takes longer; 0 is no limit."""

    def stop(number: int, frame: Any) -> None:
        raise TooLongError(f"not ready after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Attempt:
    """A run of a script, which may end before all cases are measured.

    output: the result file.
    commit: the measured commit; git is asked if it is empty.
    """

    output: Path
    commit: str = ""
    started: float = field(default_factory=time.perf_counter)

    def say(self, text: str) -> None:
        """Print a line, with the seconds since the start."""
        print(f"[{time.perf_counter() - self.started:6.1f} s] {text}", flush=True)

    def keep(self, row: Mapping[str, Any]) -> None:
        """Write what is known of a row, in place of what was known before."""
        write_row(self.output, gpu_and_torch(), self.commit, row, KEYS[self.output.name])


def add_limit(options: argparse.ArgumentParser) -> None:
    """Add the option for the limit of a whole run."""
    options.add_argument("--seconds", type=float, default=0.0, help="stop after this many seconds; 0: no limit")
