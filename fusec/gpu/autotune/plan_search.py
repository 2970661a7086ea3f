"""Which plan of each graph, and which form of each step, is fastest: measured, within a budget.

What is measured on is a `PlanBench`: a GPU (plan_bench.py), or in tests a table of times.
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
KEPT = 4  # built plans of a graph: the best, and who may take its place: should it fail, or within the whole
HOPELESS = 3.0  # how many times the best a first run may take
CLOSE = 1.15  # who is timed to the end
TIE = 1.03  # cuDNN keeps a graph that another library, which takes most of a second to load, is not so much faster at


@dataclass(frozen=True)
class Offer:
    """A plan that cuDNN offers for a graph, not built yet."""

    place: int
    choice: Choice
    precompiled: bool


class PlanBench(Protocol):
    """What the tuner needs of a device."""

    def offers(self, graph: CudnnGraph) -> Sequence[Offer]:
        """cuDNN's plans, in its order, without those known to be wrong, and other libraries'. ExecutionError if it
        takes the graph for none."""
        ...

    def expect(self, orders: Sequence[tuple[CudnnGraph, Offer]]) -> None:
        """What will have to be built, in this order; what was expected before is forgotten."""
        ...

    def build(self, graph: CudnnGraph, offer: Offer) -> Any:
        """The plan, ready to run. ExecutionError if it does not build, or needs more memory than is free."""
        ...

    def time_us(self, graph: CudnnGraph, plan: Any) -> float:
        """One run, as it would go within the model. ExecutionError if it fails."""
        ...

    def error(self, graph: CudnnGraph, plan: Any, other: Any | None) -> float | None:
        """How far the results lie from the reference's (`other` is None; None if it would take too long), or from
        those of another plan: relative L2, NaN if any is."""
        ...

    def quarantine(self, graph: CudnnGraph, choice: Choice, reason: str) -> None:
        """Remember never to use this plan again."""
        ...


@dataclass
class RankedPlans:
    """The plans of one graph that were built, the best first, and what was turned down, with reasons. revived: the plan
    was not built, but read as it was serialized."""

    graph: CudnnGraph
    plans: list[tuple[Choice, Any]] = field(default_factory=list[tuple[Choice, Any]])
    rejected: list[str] = field(default_factory=list[str])
    revived: bool = False

    @property
    def time_us(self) -> float:
        """Of the best plan; infinite if there is none."""
        if not self.plans:
            return float("inf")
        time_us = self.plans[0][0].time_us
        return 0.0 if time_us is None else time_us


def tune(
    graphs: Mapping[str, CudnnGraph],
    bench: PlanBench,
    level: str,
    budget_s: float = float("inf"),
    known: Mapping[str, Choice] | None = None,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, RankedPlans]:
    """The plans of each graph, by key, fastest first.

    known: choices of earlier runs, by key; complete ones are built and not timed again. Every graph gets a plan,
    whatever the budget; what is left of it goes to the graphs whose first plan takes longest. A graph without any
    plan comes back with none.
    """
    end = clock() + budget_s
    known = known or {}
    tuned = {key: RankedPlans(graph) for key, graph in graphs.items()}
    offers: dict[str, list[Offer]] = {}
    for count, (key, result) in enumerate(tuned.items(), 1):
        offers[key] = _offers(bench, result, known.get(key))
        if count & (count - 1) == 0 or count == len(tuned):  # others build while this process asks on
            bench.expect([(graphs[key], offer) for key, offer in _expected(offers, known, level)])
    waiting: list[tuple[float, str, list[Offer]]] = []
    # those whose first plan is still being compiled come last
    order = sorted(graphs, key=lambda key: not (offers[key] and offers[key][0].precompiled))
    for count, key in enumerate(order):
        rest = _first(bench, tuned[key], offers[key], level, known.get(key))
        if rest is not None:
            waiting.append((-tuned[key].time_us, key, rest))
        if progress is not None:
            progress(count + 1, 2 * len(graphs))
    waiting.sort(key=lambda item: item[:2])
    bench.expect([(graphs[key], offer) for _, key, rest in waiting for offer in rest])
    rng = random.Random(0)
    for count, (_, key, rest) in enumerate(waiting):
        finished = not rest or (clock() < end and _rest(bench, tuned[key], rest, rng, lambda: clock() < end))
        tuned[key].plans = [(replace(choice, complete=finished), plan) for choice, plan in tuned[key].plans]
        _check(bench, tuned[key])
        del tuned[key].plans[KEPT:]
        if progress is not None:
            progress(len(graphs) + count + 1, len(graphs) + len(waiting))
    bench.expect([])
    return tuned


def _offers(bench: PlanBench, result: RankedPlans, known: Choice | None) -> list[Offer]:
    """What may be built of a graph, in this order; a known plan comes first, if it is offered."""
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
    """What will be built if all that is built first can be: that, of each graph, then what it is compared with."""
    for key, each in offers.items():
        yield from ((key, offer) for offer in each[:1])
    for key, each in offers.items():
        choice = known.get(key)
        if each and not (choice is not None and choice.complete and _is(each[0], choice)):
            yield from ((key, offer) for offer in _others(each[1:], level))


def _first(
    bench: PlanBench, result: RankedPlans, offers: Sequence[Offer], level: str, known: Choice | None
) -> list[Offer] | None:
    """Build one plan: the known one if it is offered, else the first that can be; the offers left to try, or None if
    there is nothing to measure."""
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
    """The plans that the first one is compared with."""
    if level == "none":
        return []
    if level == "full":
        return list(rest)
    others = [o for o in rest if o.choice.engine == BLAS]  # few, and built at once
    precompiled = [o for o in rest if o.precompiled and o not in others][:QUICK_PRECOMPILED]
    return [*others, *precompiled, *[o for o in rest if not o.precompiled][:QUICK_COMPILED]]


def _built(bench: PlanBench, result: RankedPlans, offer: Offer) -> bool:
    try:
        result.plans.append((offer.choice, bench.build(result.graph, offer)))
    except ExecutionError as error:
        result.rejected.append(_said(offer.choice, error))
        return False
    return True


def _timed(bench: PlanBench, result: RankedPlans) -> bool:
    """Time the plan built last: once to warm it up, then the better of two, since a run may be disturbed; it goes if
    it fails."""
    choice, plan = result.plans.pop()
    try:
        bench.time_us(result.graph, plan)
        time_us = min(bench.time_us(result.graph, plan) for _ in range(2))
    except ExecutionError as error:
        result.rejected.append(_said(choice, error))
        bench.quarantine(result.graph, choice, str(error))
        return False
    result.plans.append((replace(choice, time_us=time_us), plan))
    return True


def _rest(
    bench: PlanBench, result: RankedPlans, offers: Sequence[Offer], rng: random.Random, goes_on: Callable[[], bool]
) -> bool:
    """Build and time the offers, then those that come close in turns, in random order; False if time ran out."""
    finished = True
    for offer in offers:
        if not goes_on() and result.plans:
            finished = False
            break
        if _built(bench, result, offer):
            _timed(bench, result)
    best = result.time_us if not result.plans else min(_us(c) for c, _ in result.plans)
    hopeful = [p for p in result.plans if _us(p[0]) <= HOPELESS * best]
    times: dict[int, list[float]] = {id(plan): [_us(choice)] for choice, plan in hopeful}
    for turn in range(ROUNDS):
        rng.shuffle(hopeful)
        for choice, plan in hopeful:
            try:
                times[id(plan)].append(bench.time_us(result.graph, plan))
            except ExecutionError as error:
                result.rejected.append(_said(choice, error))
                bench.quarantine(result.graph, choice, str(error))
                result.plans = [p for p in result.plans if p[1] is not plan]
        hopeful = [p for p in hopeful if any(p[1] is q for _, q in result.plans)]
        if turn >= 2 and hopeful:
            least = min(statistics.median(times[id(plan)]) for _, plan in hopeful)
            hopeful = [p for p in hopeful if statistics.median(times[id(p[1])]) <= CLOSE * least]
    result.plans = [
        (replace(choice, time_us=statistics.median(times.get(id(plan), [_us(choice)]))), plan)
        for choice, plan in result.plans
    ]
    result.plans.sort(key=lambda item: _us(item[0]) * (TIE if item[0].engine == BLAS else 1.0))
    return finished


def _check(bench: PlanBench, result: RankedPlans) -> None:
    """Turn down what computes something else: by the reference, or by a vote of three plans; the best comes first."""
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
        result.rejected.append(_said(choice, reason))
        bench.quarantine(result.graph, choice, reason)
        del result.plans[0]


def _voters(result: RankedPlans) -> list[Any]:
    """At most two plans to compare the best with, of other engines if possible, since plans may share their mistakes:
    for cuDNN's one of another library as well, for another library's cuDNN's alone."""
    choice = result.plans[0][0]
    rest = sorted(result.plans[1:], key=lambda p: p[0].engine == choice.engine)
    same = [plan for c, plan in rest if c.library == choice.library]
    others = [plan for c, plan in rest if c.library != choice.library]
    if choice.engine == BLAS:
        return others[:2] or same[:2]
    return [*others[:1], *same, *others[1:]][:2]


def _us(choice: Choice) -> float:
    return float("inf") if choice.time_us is None else choice.time_us


def _said(choice: Choice, reason: object) -> str:
    return f"{choice.name} {dict(choice.knobs)}: {reason}"
