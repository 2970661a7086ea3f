"""Run a chunk of examples: one Hypothesis test of all properties, which shrinks and reports new failures.

A failure like a known finding is reduced without Hypothesis. After a few such failures, they are only counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings

from fusec.ir import Constant, Graph
from fusec.testing.case import Case, Property
from fusec.testing.failure import Failure, SkippedError, attempt, ops_of
from fusec.testing.finding_folder import Finding, save, summary
from fusec.testing.generators.uniform_provider import register
from fusec.testing.resolve import property_of, strategy_of
from fusec.testing.runner.coverage import Coverage
from fusec.testing.runner.shrink import digest, reduce, reduce_case, weight
from fusec.testing.runner.task import Task

REPORT_S = 0.5
DUPLICATES = 2  # failures of one finding that a worker reduces; further ones are counted
KINDS = 3  # kinds of failures of one property that Hypothesis shrinks in a worker
SEEDS = (0, 1, 2)  # seeds of inputs for smaller graphs, in addition to the seed of the failure
WAITING = 3  # failures like a known one that wait for reduction at the end of a chunk


class StopError(BaseException):
    """The parent wants no more examples. Not an Exception, so that neither Hypothesis nor a property catches it."""


class _FoundError(Exception):
    """A failure, for Hypothesis: one type for all, so that it treats all failures of a hunt as the same bug."""


class _EnoughError(BaseException):
    """The time for shrinking is over. Not an Exception, so that Hypothesis stops."""


@dataclass
class Counts:
    """Counts since the last report.

    shrinking: examples that ran in order to shrink and reduce.
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


@dataclass
class _Hunt:
    """One failure while Hypothesis shrinks it.

    end: time at which shrinking stops.
    best: smallest example that fails so far.
    failing: keys of all examples that failed.
    nodes: number of ops of the first example.
    """

    property: Property
    failure: Failure
    end: float
    best: tuple[Graph, Case, Failure]
    failing: set[str]
    nodes: int


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
        self._kinds: dict[str, set[str]] = {}  # by property: kinds of failures that any worker has shrunk
        self._known: list[tuple[str, str, Counter[str], str]] = []  # property, kind, ops, signature
        self._reduced: Counter[str] = Counter()  # by signature: failures that this worker has reduced
        self._waiting: list[tuple[Property, Graph, Case, Failure]] = []
        self._chunk = 0

    # messages of the parent ----------------------------------------------------------------------

    def met(self, property: str, kind: str) -> None:
        """Record that another worker shrinks a failure of this kind."""
        self._kinds.setdefault(property, set()).add(kind)

    def know(self, property: str, kind: str, ops: Mapping[str, int], signature: str) -> None:
        """Record a finding. A failure of the same kind whose graph has all its ops counts as the same finding."""
        self.met(property, kind)
        self._known.append((property, kind, Counter(ops), signature))

    # chunks ----------------------------------------------------------------------------------------

    def run(self, index: int, count: int) -> int:
        """Run a chunk and return its number of examples. Raises StopError: when `stopping` is set."""
        self._chunk = index
        left, part, total = count, 0, 0
        while left > 0:
            before = self.counts_so_far
            hunt = self._part(_seed(self.task.seed, index, part), left)
            ran = self.counts_so_far - before
            total += ran
            if hunt is None:
                break
            self._finish(hunt)
            left, part = left - ran, part + 1
        for waiting in self._waiting:
            self._reduce(*waiting)
        self._waiting.clear()
        self.report()
        return total

    def _part(self, seed: int, count: int) -> _Hunt | None:
        """Run examples until one fails in a new way, and shrink it. Returns None if all examples pass."""
        hunts: list[_Hunt] = []

        @hypothesis.seed(seed)
        @settings(
            max_examples=count,
            backend=register(),
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=cast("list[HealthCheck]", list(HealthCheck)),
            report_multiple_bugs=False,
            print_blob=False,
            verbosity=Verbosity.quiet,
        )
        @given(self.graphs, self.cases)
        def test(graph: Graph, case: Case) -> None:
            case = replace(case, target=self.task.target)
            if self._shrink(hunts[0], graph, case) if hunts else self._generate(hunts, graph, case):
                raise _FoundError

        with contextlib.suppress(_FoundError, _EnoughError):
            test()
        return hunts[0] if hunts else None

    def _generate(self, hunts: list[_Hunt], graph: Graph, case: Case) -> bool:
        """Run all properties on a new example. Returns True if one fails in a new way."""
        if self.stopping:
            raise StopError
        counts = self.counts
        self.counts_so_far += 1
        counts.examples += 1
        nodes = sum(not isinstance(n.op, Constant) for n in graph.nodes)
        counts.nodes += nodes
        counts.coverage.observe(graph, case)
        self.observed = counts.coverage
        found = False
        try:
            for number, property in enumerate(self.properties):
                if property.name in self.without:
                    continue
                failure = self._timed(number, property, graph, case)
                if failure is not None and self._is_new(property, graph, case, failure):
                    self.tell({"met": [property.name, failure.kind]})
                    self.met(property.name, failure.kind)
                    end = time.monotonic() + self.task.shrink_s
                    best = (graph, case, failure)
                    hunts.append(_Hunt(property, failure, end, best, {_key(graph, case)}, nodes))
                    found = True
                    break
        finally:
            self.observed = None
        self._report_if_due()
        return found

    def _timed(self, number: int, property: Property, graph: Graph, case: Case) -> Failure | None:
        row = self.counts.properties.setdefault(property.name, [0, 0, 0, 0.0])
        start = time.perf_counter()
        row[0] += 1
        failure = None
        try:
            failure = self._attempt(number, property, graph, case)
        except SkippedError:
            row[1] += 1
        row[2] += failure is not None
        row[3] += time.perf_counter() - start
        return failure

    def _attempt(self, number: int, property: Property, graph: Graph, case: Case) -> Failure | None:
        if self.watch is not None:
            self.watch(number, graph, case)
        try:
            return attempt(property, graph, case)
        finally:
            if self.watch is not None:
                self.watch(-1, graph, case)

    def _is_new(self, property: Property, graph: Graph, case: Case, failure: Failure) -> bool:
        """Tell if Hypothesis should shrink a failure. One like a known finding waits for reduction, or is counted."""
        kinds = self._kinds.get(property.name, set())
        if failure.kind not in kinds and len(kinds) < KINDS:
            return True
        same = self._same(property.name, failure, ops_of(graph))
        if same and self._reduced[same] >= DUPLICATES:
            self.counts.again[same] += 1
        elif len(self._waiting) < WAITING:
            self._waiting.append((property, graph, case, failure))
        elif same:
            self.counts.again[same] += 1
        return False

    def _same(self, property: str, failure: Failure, ops: Counter[str]) -> str:
        """Return the signature of a known finding that the failure matches, or ""."""
        for name, kind, known, found in self._known:
            if name == property and kind == failure.kind and known <= ops:
                return found
        return ""

    # shrinking -------------------------------------------------------------------------------------

    def _shrink(self, hunt: _Hunt, graph: Graph, case: Case) -> bool:
        """Tell if an example fails like the first one.

        The answer for an example never changes, because Hypothesis would otherwise report a flaky test.
        """
        if self.stopping or time.monotonic() > hunt.end:
            raise _EnoughError
        key = _key(graph, case)
        if key in hunt.failing:
            return True
        failure = self._like(hunt.property, hunt.failure, graph, case)
        if failure is None:
            return False
        hunt.failing.add(key)
        if weight(graph) <= weight(hunt.best[0]):
            hunt.best = (graph, case, failure)
        return True

    def _like(self, property: Property, wanted: Failure, graph: Graph, case: Case) -> Failure | None:
        """Return the failure of an example if it is like the wanted one."""
        self.counts.shrinking += 1
        self._report_if_due()
        try:
            failure = self._attempt(self.properties.index(property), property, graph, case)
        except SkippedError:
            return None
        return failure if failure is not None and failure.like(wanted) else None

    def _finish(self, hunt: _Hunt) -> None:
        self._tell(hunt.property, *self._minimal(hunt.property, *hunt.best), hunt.nodes)

    def _reduce(self, property: Property, graph: Graph, case: Case, failure: Failure) -> None:
        """Reduce a failure of a known kind, unless it matches a finding that was reduced often enough."""
        same = self._same(property.name, failure, ops_of(graph))
        if same and self._reduced[same] >= DUPLICATES:
            self.counts.again[same] += 1
            return
        nodes = sum(ops_of(graph).values())
        self._tell(property, *self._minimal(property, graph, case, failure), nodes)

    def _minimal(self, property: Property, graph: Graph, case: Case, failure: Failure) -> tuple[Graph, Case, Failure]:
        """Reduce an example: its case, then its graph (with other input data, if needed), then the case again."""
        best, best_case = failure, case
        patience = time.monotonic() + self.task.reduce_s / 4

        def fails(graph: Graph, case: Case) -> bool:
            nonlocal best, best_case
            if self.stopping and time.monotonic() > patience:
                return False
            found = self._like(property, failure, graph, case)
            if found is not None:
                best, best_case = found, case
            return found is not None

        def fails_with_some_seed(graph: Graph) -> bool:
            """Try several seeds, because a smaller graph draws other inputs, and some failures depend on them."""
            return any(fails(graph, replace(best_case, seed=seed)) for seed in dict.fromkeys((best_case.seed, *SEEDS)))

        reduce_case(case, lambda simpler: fails(graph, simpler))
        graph = reduce(graph, fails_with_some_seed, self.task.reduce_s)
        reduce_case(best_case, lambda simpler: fails(graph, simpler))
        return graph, best_case, best

    def _tell(self, property: Property, graph: Graph, case: Case, failure: Failure, nodes: int) -> None:
        origin = {"seed": self.task.seed, "chunk": self._chunk, "hash_seed": self.task.hash_seed, "nodes": nodes}
        finding = Finding(property.name, graph, case, failure, origin)
        self._reduced[finding.signature] += 1
        self.know(property.name, failure.kind, ops_of(graph), finding.signature)
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


def _key(graph: Graph, case: Case) -> str:
    return f"{digest(graph)} {json.dumps(case.to_json())}"
