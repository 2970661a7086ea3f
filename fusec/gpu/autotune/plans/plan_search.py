"""Search the fastest plan of each cuDNN graph within a budget: decide which plans are built and timed, and when."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusec.errors import ExecutionError
from fusec.gpu.autotune.plans.plan_check import reject_wrong_plans
from fusec.gpu.autotune.plans.plan_timing import CLOSE, build_offer, measured_us, rank_by_time, time_last, time_others
from fusec.gpu.autotune.ranked_plans import Offer, PlanBench, RankedPlans
from fusec.ir import HALVES
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.engine_numbers import GENERIC
from fusec.plans.plan_record import BLAS, Choice
from fusec.system.dataclass import dataclass

LEVELS = ("none", "quick", "full")
# Takes the times of first plans, by key, and returns for a graph the time of the fastest other way to run its steps.
RivalTimes = Callable[[Mapping[str, float]], Mapping[str, float]]
# The best plan was among the first dozen of every layer measured on an H200; building one that is compiled at run
# time takes long (benchmarks/compile_time/plan_builds.py).
QUICK_PRECOMPILED, QUICK_COMPILED = 16, 2
MAX_PLANS = 4  # built plans of a graph: the best, and those that replace it if it fails or is slower within the model
# Time of a graph's first plan, relative to another way to run its step, beyond which no other plan is tried.
BEATEN = 2.0


@dataclass(frozen=True)
class TuningOptions:
    """Tuning level, one of LEVELS, its budget in seconds, and a function that receives (stage, done, total)."""

    level: str = "none"
    budget_s: float = float("inf")
    progress: Callable[[str, int, int], None] | None = None


def no_rivals(first_us: Mapping[str, float]) -> Mapping[str, float]:
    """Return no rivals, so that the plans of all graphs are tried."""
    return {}


def rank_plans(
    graphs: Mapping[str, CudnnGraph],
    bench: PlanBench,
    options: TuningOptions,
    known: Mapping[str, Choice] | None = None,
    clock: Callable[[], float] = time.monotonic,
    rivals_us: RivalTimes = no_rivals,
) -> dict[str, RankedPlans]:
    """Build and time plans of each graph, and rank them by time.

    known: choices of earlier runs, by key; a complete one is built and not timed again
    rivals_us: called once all first plans are timed; no other plan of a graph is tried whose rival is far faster

    Each graph gets a plan, also beyond the budget. The rest of the budget goes to graphs whose first plan is slowest.
    The result for a graph without any plan has no plans.
    """
    end, search = clock() + options.budget_s, _Search(graphs, bench, options, known or {})
    waiting = search.build_first(search.offers(), rivals_us)
    if waiting:
        _drop_beaten(search.ranked, waiting, rivals_us)
    waiting.sort(key=lambda item: item[:2])
    bench.expect([(graphs[key], offer) for _, key, rest in waiting for offer in rest])
    search.time_others(waiting, lambda: clock() < end)
    bench.expect([])
    return search.ranked


Waiting = list[tuple[float, str, list[Offer]]]  # negative time of a graph's first plan, its key, and offers to time


class _Search:
    """Graphs with their ranked plans, and the steps of the search: list offers, build first plans, time the others."""

    def __init__(
        self, graphs: Mapping[str, CudnnGraph], bench: PlanBench, options: TuningOptions, known: Mapping[str, Choice]
    ):
        self.ranked = {key: RankedPlans(graph) for key, graph in graphs.items()}
        self._graphs, self._bench, self._known = graphs, bench, known
        self._level, self._progress = options.level, options.progress

    def _report(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress("plans", done, total)

    def offers(self) -> dict[str, list[Offer]]:
        """List the offers for each graph. Workers build those that come first meanwhile."""
        offers: dict[str, list[Offer]] = {}
        for count, (key, result) in enumerate(self.ranked.items(), 1):
            offers[key] = _offers(self._bench, result, self._known.get(key), self._level)
            if count & (count - 1) == 0 or count == len(self.ranked):
                expected = _expected(self._graphs, offers, self._known, self._level)
                self._bench.expect([(self._graphs[of], offer) for of, offer in expected])
        return offers

    def build_first(self, offers: Mapping[str, list[Offer]], rivals_us: RivalTimes) -> Waiting:
        """Build and time a first plan of each graph, and return the graphs with other plans to time."""
        waiting: Waiting = []
        # Graphs whose first plan is compiled at run time come last, because workers still compile it.
        order = sorted(offers, key=lambda key: not (offers[key] and offers[key][0].precompiled))
        late = sum(not (offers[key] and offers[key][0].precompiled) for key in order)
        for count, key in enumerate(order):
            if late and count == len(order) - late and self._level != "none":
                rivals_us({})  # to time kernels meanwhile
            rest = _first(self._bench, self.ranked[key], offers[key], self._level, self._known.get(key))
            if rest is not None:
                waiting.append((-self.ranked[key].time_us, key, rest))
            self._report(count + 1, 2 * len(order))
        return waiting

    def time_others(self, waiting: Waiting, goes_on: Callable[[], bool]) -> None:
        """Time the other plans, those compiled at run time last, and rank the plans of each graph.

        goes_on: tells if the budget is left
        """
        bench, rng = self._bench, random.Random(0)
        began: set[str] = set()
        finished: dict[str, bool] = {}
        for _, key, rest in waiting:  # meanwhile workers compile the other plans
            if rest and goes_on():
                began.add(key)
                ready = [offer for offer in rest if offer.precompiled]
                finished[key] = time_others(bench, self.ranked[key], ready, goes_on, self._level)
            else:
                finished[key] = not rest
        for count, (_, key, rest) in enumerate(waiting):
            result = self.ranked[key]
            if key in began:
                late = [offer for offer in rest if not offer.precompiled]
                finished[key] = finished[key] and time_others(bench, result, late, goes_on, self._level)
                finished[key] = rank_by_time(bench, result, rng) and finished[key]
            result.plans = [(replace(choice, complete=finished[key]), plan) for choice, plan in result.plans]
            if not result.is_beaten:
                reject_wrong_plans(bench, result)
            result.plans = _to_keep(result.plans)
            self._report(len(self._graphs) + count + 1, len(self._graphs) + len(waiting))


def _to_keep(plans: Sequence[tuple[Choice, Any]]) -> list[tuple[Choice, Any]]:
    """Select the best plans, sorted by time, with at least one of each engine that is about as fast.

    Plans of one engine often take the same time. Within the model, those of another may be faster.
    """
    close_us = CLOSE * min((measured_us(choice) for choice, _ in plans), default=0.0)
    first: dict[int, int] = {}  # place of the first plan of each engine
    for place, (choice, _) in enumerate(plans):
        if measured_us(choice) <= close_us:
            first.setdefault(choice.engine, place)
    places = sorted(range(len(plans)), key=lambda place: (place not in first.values(), place))
    return [plans[place] for place in sorted(places[:MAX_PLANS])]


def _drop_beaten(ranked: Mapping[str, RankedPlans], waiting: Waiting, rivals_us: RivalTimes) -> None:
    """Leave graphs out of the search whose first plan is far slower than another way to run their steps."""
    rivals = rivals_us({key: result.time_us for key, result in ranked.items() if result.plans})
    for _, key, _ in waiting:
        result = ranked[key]
        result.rival_us = rivals.get(key, float("inf"))
        result.is_beaten = result.time_us > BEATEN * result.rival_us
        if result.is_beaten:
            result.plans = [(replace(choice, complete=False), plan) for choice, plan in result.plans]
    waiting[:] = [item for item in waiting if not ranked[item[1]].is_beaten]


def _offers(bench: PlanBench, result: RankedPlans, known: Choice | None, level: str) -> list[Offer]:
    """List the offers for a graph; a known plan comes first if it is offered.

    Where plans are timed, those that take long to compile come last, because a rival may be far faster.
    """
    try:
        offers = list(bench.offers(result.graph))
    except ExecutionError as error:
        result.rejected.append(str(error))
        return []
    if level != "none":
        offers.sort(key=lambda offer: offer.is_slow)
    same = [o for o in offers if _is(o, known)]
    return [*same, *(o for o in offers if o not in same)]


def _is(offer: Offer, known: Choice | None) -> bool:
    return known is not None and offer.choice.identity == known.identity


def _expected(
    graphs: Mapping[str, CudnnGraph], offers: Mapping[str, Sequence[Offer]], known: Mapping[str, Choice], level: str
) -> Iterator[tuple[str, Offer]]:
    """Yield the offers that will be built if each first one builds: the first of each graph, then the others.

    Plans that take long to compile are not built before rivals are known.
    """
    for key, each in offers.items():
        yield from ((key, offer) for offer in each[:1])
    for key, each in offers.items():
        choice = known.get(key)
        if each and not (choice is not None and choice.complete and _is(each[0], choice)):
            yield from ((key, offer) for offer in _others(graphs[key], each, level) if not offer.is_slow)


def _first(
    bench: PlanBench, result: RankedPlans, offers: Sequence[Offer], level: str, known: Choice | None
) -> list[Offer] | None:
    """Build one plan: the known one if it is offered, else the first that builds.

    Returns the offers left to time, or None if there is nothing to time.
    """
    rest, tried = list(offers), list[Offer]()
    if known is not None and known.complete and rest and _is(rest[0], known) and build_offer(bench, result, rest[0]):
        result.plans = [(known, result.plans[0][1])]
        return None
    while rest and not result.plans:
        tried = [rest.pop(0)]
        build_offer(bench, result, *tried)
    if level == "none" or not result.plans:
        return None
    time_last(bench, result)
    return _others(result.graph, [*tried, *rest], level)


def _others(graph: CudnnGraph, offers: Sequence[Offer], level: str) -> list[Offer]:
    """List the offers to time against the first one.

    Level quick compiles no plan of a plain convolution with precompiled plans, which were always faster on an H200.
    """
    first, *rest = offers
    if level == "none":
        return []
    if level == "full":
        return rest
    others = [o for o in rest if o.choice.engine == BLAS]  # few, and quickly built
    precompiled = [o for o in rest if o.precompiled and o not in others]
    fast = [o for o in (first, *precompiled) if o.precompiled and o.choice.engine not in (BLAS, GENERIC)]
    compiled = [] if fast and is_plain_convolution(graph) else [o for o in rest if not o.precompiled]
    return [*others, *precompiled[:QUICK_PRECOMPILED], *compiled[:QUICK_COMPILED]]


def is_plain_convolution(graph: CudnnGraph) -> bool:
    """Tell if a graph has a convolution of one group in 16 bits, for which cuDNN's precompiled engines are fast."""
    for call in graph.calls:
        if call.op == "conv_fprop":
            image, filters = (graph.tensor(uid) for uid in call.inputs[:2])
            return image.dims[1] == filters.dims[1] and image.dtype in HALVES
    return False
