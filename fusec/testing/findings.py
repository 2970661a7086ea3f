"""Replay a saved finding; the replay.py of its folder calls this module."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fusec.system.printable import printable, printable_lines
from fusec.testing.failure import DIED, HUNG
from fusec.testing.finding_folder import check, load
from fusec.testing.runner.worker_process import check_apart


def replay(place: str | os.PathLike[str]) -> int:
    """Run a finding again, print the result, and return 1 if it still fails, else 0.

    place: the finding's folder, or a file in it.
    A finding that ended its process, or hung, is run in a separate process.
    """
    path = Path(place).absolute()
    finding = load(path.parent if path.is_file() else path)
    if finding.failure.how in (DIED, HUNG):
        failure = check_apart(finding)
    else:
        failure = check(finding)
    print(finding.graph)
    if failure is None:
        print(printable(f"{finding.property} holds: fixed"))
        return 0
    print(printable_lines(failure.traceback or failure.message), file=sys.stderr)
    print(printable_lines(f"{finding.property} still fails: {failure.message}"))
    return 1
