"""Run a saved finding again; its folder's replay.py calls this."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fusec.system.printable import printable, printable_lines
from fusec.testing.failure import DIED, HUNG
from fusec.testing.finding_folder import check, load
from fusec.testing.runner.worker_process import check_apart


def replay(place: str | os.PathLike[str]) -> int:
    """Run a finding again, by its folder or a file in it, and print how it goes; 1 while it still fails.

    One that ended its process is run in a process of its own.
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
