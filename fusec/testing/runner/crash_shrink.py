"""Shrink an example that killed a worker. Each attempt runs in its own process, because it can die again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusec.ir import Graph
from fusec.testing.case import Case
from fusec.testing.example_codec import decode
from fusec.testing.failure import HUNG, Failure
from fusec.testing.finding_folder import Finding, save, summary
from fusec.testing.runner.shrink import reduce, reduce_case
from fusec.testing.runner.worker_process import Prober

SECONDS = 60.0
HANG_S = 10.0  # time limit of one attempt while a hang is reduced


@dataclass(frozen=True)
class Crash:
    """A property that killed its process or hung, with the example (as `example_codec.encode` gives it)."""

    property: str
    example: Mapping[str, Any]
    failure: Failure
    origin: Mapping[str, Any]


class CrashReducer:
    """Reducer of one crash, in a thread. It saves the finding in `folder` and passes its summary to `told`.

    hurried: finish with the best example so far.
    """

    def __init__(self, crash: Crash, hang_s: float, folder: Path, told: Callable[[dict[str, Any]], None]):
        self.property = crash.property
        self.failure = crash.failure
        self.origin = crash.origin
        self.folder = folder
        self.hurried = False
        self._closed = False
        self._graph, self._case = decode(crash.example)
        self._prober = Prober(crash.property, min(hang_s, HANG_S) if crash.failure.how == HUNG else hang_s)
        self._told = told
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            graph, case, failure = self._minimal()
        finally:
            self._prober.close()
        if not self._closed:
            finding = Finding(self.property, graph, case, failure, self.origin)
            self._told(summary(finding, save(finding, self.folder)))

    def _minimal(self) -> tuple[Graph, Case, Failure]:
        best = [self.failure]
        end = time.monotonic() + SECONDS

        def fails(graph: Graph, case: Case) -> bool:
            if self.hurried or time.monotonic() > end:
                return False
            failure = self._prober.check(graph, case)
            same = failure is not None and failure.like(self.failure)
            if failure is not None and same and not self._closed:
                best[0] = failure
            return same

        graph, case = self._graph, self._case
        graph = reduce(graph, lambda smaller: fails(smaller, case), SECONDS)
        case = reduce_case(case, lambda simpler: fails(graph, simpler))
        return graph, case, best[0]

    def close(self) -> None:
        """Stop the thread without a result."""
        self.hurried = self._closed = True
        self._prober.end()
        self._thread.join(timeout=10)
