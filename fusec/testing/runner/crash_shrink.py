"""Shrink an example that killed a worker. Each attempt runs in its own process, because it can die again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusec.ir import Graph
from fusec.testing.case import Case
from fusec.testing.failure import HUNG, Failure
from fusec.testing.finding_folder import Finding, save, summary
from fusec.testing.runner.shrink import shrink
from fusec.testing.runner.worker_process import Prober

SECONDS = 60.0
HANG_S = 10.0  # time limit of one attempt while a hang is shrunk


class CrashShrinker:
    """Thread that shrinks one crash or hang, saves it in `folder` and passes its summary to `report`.

    hurried: finish with the smallest example so far.
    """

    def __init__(self, crash: Finding, hang_s: float, folder: Path, report: Callable[[dict[str, Any]], None]):
        self.crash = crash
        self.folder = folder
        self.hurried = False
        self._closed = False
        self._prober = Prober(crash.property, min(hang_s, HANG_S) if crash.failure.how == HUNG else hang_s)
        self._report = report
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            smallest = shrink(self.crash, self._attempt, SECONDS)
        finally:
            self._prober.close()
        if not self._closed:
            self._report(summary(smallest, save(smallest, self.folder)))

    def _attempt(self, graph: Graph, case: Case) -> Failure | None:
        return None if self.hurried else self._prober.check(graph, case)

    def close(self) -> None:
        """Stop the thread without a result."""
        self.hurried = self._closed = True
        self._prober.end()
        self._thread.join(timeout=10)
