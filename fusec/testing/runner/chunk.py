"""A chunk of examples: one Hypothesis test over all properties; what fails is shrunk, reduced, told once.

What is like a finding already known is reduced alone, without Hypothesis, and after a few of them counted.
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
DUPLICATES = 2  # of one finding, reduced by one worker; more are counted
KINDS = 3  # of failures of one property, shrunk by Hypothesis in one worker
SEEDS = (0, 1, 2)  # of the inputs a smaller graph is tried on, beside those it was found with
WAITING = 3  # failures like a known one, kept for reduction from one chunk


class StopError(BaseException):
    """The parent wants no more examples. No Exception: neither Hypothesis nor a property takes it for a failure."""


class _FoundError(Exception):
    """The one exception Hypothesis sees: to it all failures of a hunt are the same."""


class _EnoughError(BaseException):
    """Time for shrinking is up: the way out of Hypothesis, which would try on."""


@dataclass
class Counts:
    """What happened since the last report."""

    examples: int = 0
    nodes: int = 0
    shrinking: int = 0  # examples run to shrink and reduce
    properties: dict[str, list[float]] = field(default_factory=dict[str, "list[float]"])  # runs, skips, failures, s
    again: Counter[str] = field(default_factory=Counter[str])  # failures taken for a known finding, by signature
    coverage: Coverage = field(default_factory=Coverage)

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "again": dict(self.again), "coverage": self.coverage.to_json()}


@dataclass
class _Hunt:
    """One failure, followed through Hypothesis' shrinking."""

    property: Property
    failure: Failure
    end: float
    best: tuple[Graph, Case, Failure]  # the lightest that fails
    failing: set[str]
    nodes: int


Watch = Callable[[int, Graph, Case], None]  # a property is about to run: its number, and on what


class Chunks:
    """Runs chunks. `tell` takes messages for the parent, `watch` is told what is about to run."""

    def __init__(self, task: Task, tell: Callable[[dict[str, Any]], None], watch: Watch | None = None):
        self.task = task
        self.tell = tell
        self.watch = watch
        self.properties: Sequence[Property] = [property_of(name) for name in task.properties]
        self.graphs = strategy_of(task.graphs)
        self.cases = strategy_of(task.cases)
        self.stopping = False
        self.without: set[str] = set()  # properties that are not to run any more
        self.counts_so_far = 0  # examples
        self.counts = Counts()
        self.observed: Coverage | None = None  # where the compiler's own counters go, while examples are generated
        self._reported = time.monotonic()
        self._kinds: dict[str, set[str]] = {}  # by property: failures that Hypothesis has shrunk, here or elsewhere
        self._known: list[tuple[str, str, Counter[str], str]] = []  # property, kind, ops, signature
        self._reduced: Counter[str] = Counter()  # by signature, here
        self._waiting: list[tuple[Property, Graph, Case, Failure]] = []
        self._chunk = 0

    # what the parent says ------------------------------------------------------------------------

    def met(self, property: str, kind: str) -> None:
        """Another worker is at a failure of this kind."""
        self._kinds.setdefault(property, set()).add(kind)

    def know(self, property: str, kind: str, ops: Mapping[str, int], signature: str) -> None:
        """There is a finding: what contains its ops and fails alike is taken for the same."""
        self.met(property, kind)
        self._known.append((property, kind, Counter(ops), signature))

    # chunks ----------------------------------------------------------------------------------------

    def run(self, index: int, count: int) -> int:
        """Run a chunk; how many examples it had. StopError if `stopping` was set."""
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
        """Examples until one fails in a new way, shrunk; None if all went well."""
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
        """Run all properties on a new example; True at a failure of a new kind."""
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
        self._report_now_and_then()
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
        """Whether Hypothesis shall shrink it. What is like a known finding waits, or is only counted."""
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
        """The signature of a known finding that the failure may well be."""
        for name, kind, known, found in self._known:
            if name == property and kind == failure.kind and known <= ops:
                return found
        return ""

    # shrinking -------------------------------------------------------------------------------------

    def _shrink(self, hunt: _Hunt, graph: Graph, case: Case) -> bool:
        """Whether the example fails as the hunted one does; once it did it always does, or Hypothesis cries flaky."""
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
        """The failure of an example, if it is like the wanted one."""
        self.counts.shrinking += 1
        self._report_now_and_then()
        try:
            failure = self._attempt(self.properties.index(property), property, graph, case)
        except SkippedError:
            return None
        return failure if failure is not None and failure.like(wanted) else None

    def _finish(self, hunt: _Hunt) -> None:
        self._tell(hunt.property, *self._minimal(hunt.property, *hunt.best), hunt.nodes)

    def _reduce(self, property: Property, graph: Graph, case: Case, failure: Failure) -> None:
        """A failure of a known kind: may be one of the known findings, or another."""
        same = self._same(property.name, failure, ops_of(graph))
        if same and self._reduced[same] >= DUPLICATES:
            self.counts.again[same] += 1
            return
        nodes = sum(ops_of(graph).values())
        self._tell(property, *self._minimal(property, graph, case, failure), nodes)

    def _minimal(self, property: Property, graph: Graph, case: Case, failure: Failure) -> tuple[Graph, Case, Failure]:
        """The example made plainer: its case, then its graph (on other data, if need be), then the case again."""
        best, held = failure, case
        patience = time.monotonic() + self.task.reduce_s / 4

        def fails(graph: Graph, case: Case) -> bool:
            nonlocal best, held
            if self.stopping and time.monotonic() > patience:
                return False
            found = self._like(property, failure, graph, case)
            if found is not None:
                best, held = found, case
            return found is not None

        def fails_somehow(graph: Graph) -> bool:
            """Another graph draws other inputs: what fails on one array in three is tried on some."""
            return any(fails(graph, replace(held, seed=seed)) for seed in dict.fromkeys((held.seed, *SEEDS)))

        reduce_case(case, lambda simpler: fails(graph, simpler))
        graph = reduce(graph, fails_somehow, self.task.reduce_s)
        reduce_case(held, lambda simpler: fails(graph, simpler))
        return graph, held, best

    def _tell(self, property: Property, graph: Graph, case: Case, failure: Failure, nodes: int) -> None:
        origin = {"seed": self.task.seed, "chunk": self._chunk, "hash_seed": self.task.hash_seed, "nodes": nodes}
        finding = Finding(property.name, graph, case, failure, origin)
        self._reduced[finding.signature] += 1
        self.know(property.name, failure.kind, ops_of(graph), finding.signature)
        self.tell({"finding": summary(finding, save(finding, Path(self.task.staging)))})

    # reports ---------------------------------------------------------------------------------------

    def _report_now_and_then(self) -> None:
        if time.monotonic() - self._reported > REPORT_S:
            self.report()

    def report(self) -> None:
        """Tell what was done since the last time."""
        counts, self.counts = self.counts, Counts()
        if self.observed is not None:
            self.observed = self.counts.coverage
        self._reported = time.monotonic()
        self.tell({"counts": counts.to_json()})


def _seed(*parts: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def _key(graph: Graph, case: Case) -> str:
    return f"{digest(graph)} {json.dumps(case.to_json())}"
