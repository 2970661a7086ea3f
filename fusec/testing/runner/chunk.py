"""Run a chunk of examples: draw graphs and cases with Hypothesis, run all properties, and shrink new failures.

A failure like a known finding is shrunk, too, since it may have another cause. After a few such failures, they are
only counted. Hypothesis does not shrink, because it knows the choices that made a graph, but not the graph itself.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, cast

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings

from fusec.ir import Graph
from fusec.system.dataclass import dataclass
from fusec.testing.case import Case, Property
from fusec.testing.failure import Failure, SkippedError, attempt, ops_of
from fusec.testing.finding_folder import Finding, save, summary
from fusec.testing.generators.uniform_provider import register
from fusec.testing.resolve import property_of, strategy_of
from fusec.testing.runner.coverage import Coverage
from fusec.testing.runner.shrink import shrink
from fusec.testing.runner.task import Task

REPORT_S = 0.5
SHRUNK_PER_FINDING = 2  # failures of one finding that a worker shrinks; further ones are counted
SHRUNK_PER_CHUNK = 3
PATIENCE_S = 5.0  # time for a shrink in progress, from its start, once the run stops


class StopError(BaseException):
    """The parent wants no more examples. Not an Exception, so that neither Hypothesis nor a property catches it."""


@dataclass
class Counts:
    """Counts since the last report.

    shrinking: examples that ran in order to shrink.
    properties: number of runs, skips and failures of each property, and seconds.
    again: failures that match a known finding, by its signature.
    """

    examples: int = 0
    nodes: int = 0
    shrinking: int = 0
    properties: dict[str, list[float]] = field(default_factory=dict[str, "list[float]"])
    again: Counter[str] = field(default_factory=Counter[str])
    coverage: Coverage = field(default_factory=Coverage)

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "again": dict(self.again), "coverage": self.coverage.to_json()}


Watch = Callable[[int, Graph, Case], None]  # called before a property runs: its number (-1 after it), and the example


class Chunks:
    """Runner of chunks.

    tell: sends a message to the parent.
    watch: called before and after each property.
    """

    def __init__(self, task: Task, tell: Callable[[dict[str, Any]], None], watch: Watch | None = None):
        self.task = task
        self.tell = tell
        self.watch = watch
        self.properties: Sequence[Property] = [property_of(name) for name in task.properties]
        self.graphs = strategy_of(task.graphs)
        self.cases = strategy_of(task.cases)
        self.stopping = False
        self.without: set[str] = set()  # properties that do not run any more
        self.counts_so_far = 0  # examples of this process
        self.counts = Counts()
        self.observed: Coverage | None = None  # coverage for `instrument`, while examples are generated
        self._reported = time.monotonic()
        self._known: list[tuple[str, str, Counter[str], str]] = []  # property, kind, ops, signature
        self._shrunk: Counter[str] = Counter()  # by signature: failures that this worker has shrunk
        self._chunk = 0
        self._shrinks_left = 0  # in this chunk

    def know(self, property: str, kind: str, ops: Mapping[str, int], signature: str) -> None:
        """Record a finding. A failure of the same kind whose graph has all its ops counts as the same finding.

        property: the one that does not hold.
        kind: what failed. ops: how often each op is in the graph.
        signature: tells findings apart.
        """
        self._known.append((property, kind, Counter(ops), signature))

    # examples --------------------------------------------------------------------------------------

    def run(self, index: int, count: int) -> None:
        """Run a chunk of `count` examples. Raises StopError if `stopping` is set."""
        self._chunk, self._shrinks_left = index, SHRUNK_PER_CHUNK

        @hypothesis.seed(_seed(self.task.seed, index))
        @settings(
            max_examples=count,
            backend=register(),
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=cast("list[HealthCheck]", list(HealthCheck)),
            print_blob=False,
            verbosity=Verbosity.quiet,
        )
        @given(self.graphs, self.cases)
        def test(graph: Graph, case: Case) -> None:
            self._example(graph, replace(case, target=self.task.target))

        test()
        self.report()

    def _example(self, graph: Graph, case: Case) -> None:
        """Run all properties on a new example, and shrink its failures."""
        if self.stopping:
            raise StopError
        counts = self.counts
        self.counts_so_far += 1
        counts.examples += 1
        counts.nodes += ops_of(graph).total()
        counts.coverage.observe(graph, case)
        self.observed = counts.coverage
        try:
            failures = [
                (number, failure)
                for number, property in enumerate(self.properties)
                if property.name not in self.without and (failure := self._timed(number, graph, case)) is not None
            ]
        finally:
            self.observed = None
        self._report_if_due()
        for number, failure in failures:
            self._failed(number, graph, case, failure)

    def _timed(self, number: int, graph: Graph, case: Case) -> Failure | None:
        row = self.counts.properties.setdefault(self.properties[number].name, [0, 0, 0, 0.0])
        start = time.perf_counter()
        row[0] += 1
        failure = None
        try:
            failure = self._attempt(number, graph, case)
        except SkippedError:
            row[1] += 1
        row[2] += failure is not None
        row[3] += time.perf_counter() - start
        return failure

    def _attempt(self, number: int, graph: Graph, case: Case) -> Failure | None:
        if self.watch is not None:
            self.watch(number, graph, case)
        try:
            return attempt(self.properties[number], graph, case)
        finally:
            if self.watch is not None:
                self.watch(-1, graph, case)

    # failures --------------------------------------------------------------------------------------

    def _failed(self, number: int, graph: Graph, case: Case, failure: Failure) -> None:
        """Shrink and save a failure, or count it if it matches a finding that was shrunk often enough."""
        name, ops = self.properties[number].name, ops_of(graph)
        same = next((s for p, kind, o, s in self._known if p == name and kind == failure.kind and o <= ops), "")
        if self._shrunk[same] >= SHRUNK_PER_FINDING or not self._shrinks_left or self.stopping:
            if same:
                self.counts.again[same] += 1
            return
        self._shrinks_left -= 1
        patience = time.monotonic() + PATIENCE_S

        def attempt_again(graph: Graph, case: Case) -> Failure | None:
            self.counts.shrinking += 1
            self._report_if_due()
            if self.stopping and time.monotonic() > patience:
                return None
            try:
                return self._attempt(number, graph, case)
            except SkippedError:
                return None

        origin = {"seed": self.task.seed, "chunk": self._chunk, "hash_seed": self.task.hash_seed, "nodes": ops.total()}
        finding = shrink(Finding(name, graph, case, failure, origin), attempt_again, self.task.shrink_s)
        self._shrunk[finding.signature] += 1
        self.know(name, finding.failure.kind, ops_of(finding.graph), finding.signature)
        self.tell({"finding": summary(finding, save(finding, Path(self.task.staging)))})

    # reports ---------------------------------------------------------------------------------------

    def _report_if_due(self) -> None:
        if time.monotonic() - self._reported > REPORT_S:
            self.report()

    def report(self) -> None:
        """Send the counts since the last report to the parent."""
        counts, self.counts = self.counts, Counts()
        if self.observed is not None:
            self.observed = self.counts.coverage
        self._reported = time.monotonic()
        self.tell({"counts": counts.to_json()})


def _seed(*parts: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")
