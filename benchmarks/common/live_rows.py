"""Print figures as soon as they are measured, and write them to rows of a result file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.result_files import date_and_commit, write_row


class LiveRows:
    """Rows of a result file that grow while their figures are measured. Any thread may call it."""

    def __init__(self, output: Path | None, commit: str, machine: Mapping[str, Any], key: Sequence[str]):
        """Begin. Mistakes in the arguments are found now, where they cost no time on a GPU.

        output: result file; None writes none.
        machine: the GPU and the libraries.
        key: the names whose values identify a row.
        """
        self._output, self._machine = output, machine
        self._key = key
        self._commit = date_and_commit(commit)["commit"] if output else ""
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
        self._start, self._lock = time.perf_counter(), threading.Lock()
        self._rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._replaced: dict[tuple[Any, ...], Mapping[str, Any] | None] = {}

    def __call__(self, name: str, row: Mapping[str, Any], **figures: Any) -> None:
        """Print figures, and add them to a row.

        name: what is printed before the figures.
        row: the keys and values that identify the row; empty: the figures are printed alone.
        """
        shown = {key: _short(value) if isinstance(value, float) else value for key, value in figures.items()}
        with self._lock:
            print(f"{time.perf_counter() - self._start:6.1f} s  {name}: {shown}", flush=True)
            if self._output and row:
                case = self._case(row)
                if case not in self._rows:
                    self._rows[case], self._replaced[case] = dict(row), self._in_file(case)
                self._rows[case] |= figures
                write_row(self._output, self._machine, self._commit, self._rows[case], self._key)

    def give_up(self, row: Mapping[str, Any]) -> None:
        """Put back the row that this one replaced, because not all figures could be measured; without one, it stays."""
        with self._lock:
            replaced = self._replaced.pop(self._case(row), None)
            if self._output and replaced is not None:
                write_row(self._output, self._machine, self._commit, replaced, self._key)

    def _case(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(part) for part in self._key)

    def _in_file(self, case: tuple[Any, ...]) -> Mapping[str, Any] | None:
        """Return the row that the file has of a case, of the same machine."""
        if self._output is None or not self._output.exists():
            return None
        data = json.loads(self._output.read_text())
        if any(data.get(name) != value for name, value in self._machine.items()):
            return None
        return next((row for row in data["rows"] if self._case(row) == case), None)


def _short(value: float) -> float:
    """Round to four decimals, or to two digits what would be 0: an error of 1e-6 is not an exact result."""
    return round(value, 4) or float(f"{value:.1e}")
