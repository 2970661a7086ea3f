"""Search the fastest plan of each cuDNN graph by timing, within a budget.

Plans are timed on a `PlanBench`: a GPU (plan_bench.py), or in tests a table of times.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fusec.errors import ExecutionError
from fusec.gpu.measure.tolerance import TOLERANCE
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import BLAS, Choice

LEVELS = ("none", "quick", "full")
# The best plan was among the first dozen of every layer measured on an H200; building one that is compiled at run
# time takes long (benchmarks/builds.py).
QUICK_PRECOMPILED, QUICK_COMPILED = 16, 2
ROUNDS = 7
MAX_PLANS = 4  # built plans of a graph: the best, and those that replace it if it fails or is slower within the model
HOPELESS = 3.0  # relative time of a first run after which a plan is not timed again
CLOSE = 1.15  # relative time up to which plans are timed in every round
TIE = 1.03  # cuBLASLt must be faster than cuDNN by this factor, because it takes most of a second to load


@dataclass(frozen=True)
class TuningOptions:
    """Tuning level (one of LEVELS), its budget in seconds, and a function told (stage, done, total)."""

    level: str = "none"
    budget_s: float = float("inf")
    progress: Callable[[str, int, int], None] | None = None


@dataclass(frozen=True)
class Offer:
    """Plan that cuDNN or cuBLASLt offers for a graph, before it is built."""

    place: int
    choice: Choice
    precompiled: bool


class PlanBench(Protocol):
    """Device that builds, times and compares plans."""

    def offers(self, graph: CudnnGraph) -> Sequence[Offer]:
        """List cuDNN's plans in its order, without those known to be wrong, then those of cuBLASLt.

        Raises ExecutionError if there are none.
        """
        ...

    def expect(self, orders: Sequence[tuple[CudnnGraph, Offer]]) -> None:
        """Announce the plans to build, in order; they replace those announced before."""
        ...

    def build(self, graph: CudnnGraph, offer: Offer) -> Any:
        """Build a plan. Raises ExecutionError if it does not build, or needs more memory than is free."""
        ...

    def time_us(self, graph: CudnnGraph, plan: Any) -> float:
        """Time one run as within the model, in microseconds. Raises ExecutionError if it fails."""
        ...

    def error(self, graph: CudnnGraph, plan: Any, other: Any | None) -> float | None:
        """Compare a plan's results with another plan's, or with the reference where `other` is None.

        Returns the relative L2 error, NaN if an element is NaN; None if the reference would take too long.
        """
        ...

    def quarantine(self, graph: CudnnGraph, choice: Choice, reason: str) -> None:
        """Never use this plan again."""
        ...


@dataclass
class RankedPlans:
    """Built plans of one graph, the best first, and the reasons why others were rejected.

    revived: the plan was not built, but read from its serialized form
    """

    graph: CudnnGraph
    plans: list[tuple[Choice, Any]] = field(default_factory=list[tuple[Choice, Any]])
    rejected: list[str] = field(default_factory=list[str])
    revived: bool = False

    @property
    def time_us(self) -> float:
        """Return the time of the best plan; infinite if there is none."""
        if not self.plans:
            return float("inf")
        time_us = self.plans[0][0].time_us
        return 0.0 if time_us is None else time_us


def rank_plans(
    graphs: Mapping[str, CudnnGraph],
    bench: PlanBench,
    options: TuningOptions,
    known: Mapping[str, Choice] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, RankedPlans]:
    """Build and time plans of each graph, and rank them by time.

    known: choices of earlier runs, by key; a complete one is built and not timed again

    Each graph gets a plan, whatever the budget. The rest of the budget goes to the graphs whose first plan is slowest.
    The result for a graph without any plan has no plans.
    """
    end, level = clock() + options.budget_s, options.level
    known = known or {}

    def report(done: int, total: int) -> None:
        if options.progress is not None:
            options.progress("plans", done, total)

    ranked = {key: RankedPlans(graph) for key, graph in graphs.items()}
    offers: dict[str, list[Offer]] = {}
    for count, (key, result) in enumerate(ranked.items(), 1):
        offers[key] = _offers(bench, result, known.get(key))
        if count & (count - 1) == 0 or count == len(ranked):  # workers build meanwhile
            bench.expect([(graphs[key], offer) for key, offer in _expected(offers, known, level)])
    waiting: list[tuple[float, str, list[Offer]]] = []
    # Graphs whose first plan is compiled at run time come last, because workers still compile it.
    order = sorted(graphs, key=lambda key: not (offers[key] and offers[key][0].precompiled))
    for count, key in enumerate(order):
        rest = _first(bench, ranked[key], offers[key], level, known.get(key))
        if rest is not None:
            waiting.append((-ranked[key].time_us, key, rest))
        report(count + 1, 2 * len(graphs))
    waiting.sort(key=lambda item: item[:2])
    bench.expect([(graphs[key], offer) for _, key, rest in waiting for offer in rest])
    rng = random.Random(0)
    for count, (_, key, rest) in enumerate(waiting):
        finished = not rest or (clock() < end and _rest(bench, ranked[key], rest, rng, lambda: clock() < end))
        ranked[key].plans = [(replace(choice, complete=finished), plan) for choice, plan in ranked[key].plans]
        _check(bench, ranked[key])
        del ranked[key].plans[MAX_PLANS:]
        report(len(graphs) + count + 1, len(graphs) + len(waiting))
    bench.expect([])
    return ranked


def _offers(bench: PlanBench, result: RankedPlans, known: Choice | None) -> list[Offer]:
    """List the offers for a graph; a known plan comes first if it is offered."""
    try:
        offers = list(bench.offers(result.graph))
    except ExecutionError as error:
        result.rejected.append(str(error))
        return []
    same = [o for o in offers if _is(o, known)]
    return [*same, *(o for o in offers if o not in same)]


def _is(offer: Offer, known: Choice | None) -> bool:
    return known is not None and offer.choice.identity == known.identity


def _expected(
    offers: Mapping[str, Sequence[Offer]], known: Mapping[str, Choice], level: str
) -> Iterator[tuple[str, Offer]]:
    """Yield the offers that will be built if each first one builds: the first of each graph, then the others."""
    for key, each in offers.items():
        yield from ((key, offer) for offer in each[:1])
    for key, each in offers.items():
        choice = known.get(key)
        if each and not (choice is not None and choice.complete and _is(each[0], choice)):
            yield from ((key, offer) for offer in _others(each[1:], level))


def _first(
    bench: PlanBench, result: RankedPlans, offers: Sequence[Offer], level: str, known: Choice | None
) -> list[Offer] | None:
    """Build one plan: the known one if it is offered, else the first that builds.

    Returns the offers left to time, or None if there is nothing to time.
    """
    rest = list(offers)
    if known is not None and known.complete and rest and _is(rest[0], known) and _built(bench, result, rest[0]):
        result.plans = [(known, result.plans[0][1])]
        return None
    while rest and not result.plans:
        _built(bench, result, rest.pop(0))
    if level == "none" or not result.plans:
        return None
    _timed(bench, result)
    return _others(rest, level)


def _others(rest: Sequence[Offer], level: str) -> list[Offer]:
    """List the offers to time against the first one."""
    if level == "none":
        return []
    if level == "full":
        return list(rest)
    others = [o for o in rest if o.choice.engine == BLAS]  # few, and quickly built
    precompiled = [o for o in rest if o.precompiled and o not in others][:QUICK_PRECOMPILED]
    return [*others, *precompiled, *[o for o in rest if not o.precompiled][:QUICK_COMPILED]]


def _built(bench: PlanBench, result: RankedPlans, offer: Offer) -> bool:
    try:
        result.plans.append((offer.choice, bench.build(result.graph, offer)))
    except ExecutionError as error:
        result.rejected.append(_rejection(offer.choice, error))
        return False
    return True


def _timed(bench: PlanBench, result: RankedPlans) -> bool:
    """Time the plan built last, and drop it if it fails.

    One run warms up. The better of two more runs counts, because a run may be disturbed.
    """
    choice, plan = result.plans.pop()
    try:
        bench.time_us(result.graph, plan)
        time_us = min(bench.time_us(result.graph, plan) for _ in range(2))
    except ExecutionError as error:
        result.rejected.append(_rejection(choice, error))
        bench.quarantine(result.graph, choice, str(error))
        return False
    result.plans.append((replace(choice, time_us=time_us), plan))
    return True


def _rest(
    bench: PlanBench, result: RankedPlans, offers: Sequence[Offer], rng: random.Random, goes_on: Callable[[], bool]
) -> bool:
    """Build and time the offers, then time close ones in rounds, in random order; False if time ran out."""
    finished = True
    for offer in offers:
        if not goes_on() and result.plans:
            finished = False
            break
        if _built(bench, result, offer):
            _timed(bench, result)
    best = result.time_us if not result.plans else min(_us(c) for c, _ in result.plans)
    close = [p for p in result.plans if _us(p[0]) <= HOPELESS * best]
    times: dict[int, list[float]] = {id(plan): [_us(choice)] for choice, plan in close}
    for turn in range(ROUNDS):
        rng.shuffle(close)
        for choice, plan in close:
            try:
                times[id(plan)].append(bench.time_us(result.graph, plan))
            except ExecutionError as error:
                result.rejected.append(_rejection(choice, error))
                bench.quarantine(result.graph, choice, str(error))
                result.plans = [p for p in result.plans if p[1] is not plan]
        close = [p for p in close if any(p[1] is q for _, q in result.plans)]
        if turn >= 2 and close:
            least = min(statistics.median(times[id(plan)]) for _, plan in close)
            close = [p for p in close if statistics.median(times[id(p[1])]) <= CLOSE * least]
    result.plans = [
        (replace(choice, time_us=statistics.median(times.get(id(plan), [_us(choice)]))), plan)
        for choice, plan in result.plans
    ]
    result.plans.sort(key=lambda item: _us(item[0]) * (TIE if item[0].engine == BLAS else 1.0))
    return finished


def _check(bench: PlanBench, result: RankedPlans) -> None:
    """Reject plans whose results are wrong, by the reference or by a vote of three plans, until the best is right."""
    while result.plans:
        choice, plan = result.plans[0]
        error = bench.error(result.graph, plan, None)
        others = _voters(result)
        if error is None and others:
            errors: list[float | None] = []
            for other in others:  # until one agrees
                errors.append(bench.error(result.graph, plan, other))
                if (last := errors[-1]) is not None and last <= TOLERANCE:
                    break
            agreeing = [e for e in errors if e is not None and e <= TOLERANCE]
            error = agreeing[0] if agreeing else errors[0]
        if error is None or error <= TOLERANCE:
            result.plans[0] = (replace(choice, error=error), plan)
            return
        reason = f"its results are off by {error:.2g}"
        result.rejected.append(_rejection(choice, reason))
        bench.quarantine(result.graph, choice, reason)
        del result.plans[0]


def _voters(result: RankedPlans) -> list[Any]:
    """Choose at most two plans to compare the best with.

    They use other engines if possible, because plans of one engine may share an error. One of them is of the other
    library if there is one.
    """
    choice = result.plans[0][0]
    rest = sorted(result.plans[1:], key=lambda p: p[0].engine == choice.engine)
    same = [plan for c, plan in rest if c.library == choice.library]
    others = [plan for c, plan in rest if c.library != choice.library]
    if choice.engine == BLAS:
        return others[:2] or same[:2]
    return [*others[:1], *same, *others[1:]][:2]


def _us(choice: Choice) -> float:
    return float("inf") if choice.time_us is None else choice.time_us


def _rejection(choice: Choice, reason: object) -> str:
    return f"{choice.name} {dict(choice.knobs)}: {reason}"
