"""Search the fastest plan of each cuDNN graph by timing, within a budget."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusec.errors import DeviceLostError, ExecutionError
from fusec.gpu.autotune.plans.plan_check import reject_wrong_plans
from fusec.gpu.autotune.ranked_plans import Offer, PlanBench, RankedPlans
from fusec.ir import HALVES
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.engine_numbers import GENERIC
from fusec.plans.plan_record import BLAS, Choice

LEVELS = ("none", "quick", "full")
# Takes the times of first plans, by key, and returns for a graph the time of the fastest other way to run its steps.
RivalTimes = Callable[[Mapping[str, float]], Mapping[str, float]]
# The best plan was among the first dozen of every layer measured on an H200; building one that is compiled at run
# time takes long (benchmarks/compile_time/plan_builds.py).
QUICK_PRECOMPILED, QUICK_COMPILED = 16, 2
ROUNDS = 7
MAX_PLANS = 4  # built plans of a graph: the best, and those that replace it if it fails or is slower within the model
HOPELESS = 3.0  # relative time of two runs after which a plan is not timed again
# Relative time of the first run, and of the faster of the first two, after which a plan is not timed again, nor, with
# level quick, another plan of its engine. The first run may wait for another process that uses the GPU, for some
# milliseconds.
ABSURD, ABSURD_US = 10.0, 5000.0
SLOW = 1.5  # relative time of two measurements after which a plan is not timed in rounds
ONE_RUN_US = 10.0  # by which a single run may look longer than one of several
CLOSE = 1.15  # relative time up to which plans are timed in every round
BEATEN = (
    2.0  # time of a graph's first plan, relative to another way to run its step, beyond which no other plan is tried
)
LOSING = 1.5  # the same of a graph's best plan, beyond which its plans are not timed in rounds
TIE = 1.03  # cuBLASLt must be faster than cuDNN by this factor, because it takes most of a second to load


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
    end, level = clock() + options.budget_s, options.level
    known = known or {}

    def report(done: int, total: int) -> None:
        if options.progress is not None:
            options.progress("plans", done, total)

    ranked = {key: RankedPlans(graph) for key, graph in graphs.items()}
    offers: dict[str, list[Offer]] = {}
    for count, (key, result) in enumerate(ranked.items(), 1):
        offers[key] = _offers(bench, result, known.get(key), level)
        if count & (count - 1) == 0 or count == len(ranked):  # workers build meanwhile
            bench.expect([(graphs[key], offer) for key, offer in _expected(graphs, offers, known, level)])
    waiting: list[tuple[float, str, list[Offer]]] = []
    # Graphs whose first plan is compiled at run time come last, because workers still compile it.
    order = sorted(graphs, key=lambda key: not (offers[key] and offers[key][0].precompiled))
    late = sum(not (offers[key] and offers[key][0].precompiled) for key in order)
    for count, key in enumerate(order):
        if late and count == len(order) - late and level != "none":
            rivals_us({})  # to time kernels meanwhile
        rest = _first(bench, ranked[key], offers[key], level, known.get(key))
        if rest is not None:
            waiting.append((-ranked[key].time_us, key, rest))
        report(count + 1, 2 * len(graphs))
    if waiting:
        _drop_beaten(ranked, waiting, rivals_us)
    waiting.sort(key=lambda item: item[:2])
    bench.expect([(graphs[key], offer) for _, key, rest in waiting for offer in rest])
    rng = random.Random(0)

    def goes_on() -> bool:
        return clock() < end

    began: set[str] = set()
    finished: dict[str, bool] = {}
    for _, key, rest in waiting:  # meanwhile workers compile the other plans
        if rest and goes_on():
            began.add(key)
            ready = [offer for offer in rest if offer.precompiled]
            finished[key] = _time_others(bench, ranked[key], ready, goes_on, level)
        else:
            finished[key] = not rest
    for count, (_, key, rest) in enumerate(waiting):
        if key in began:
            late = [offer for offer in rest if not offer.precompiled]
            finished[key] = finished[key] and _time_others(bench, ranked[key], late, goes_on, level)
            finished[key] = _rank_by_time(bench, ranked[key], rng) and finished[key]
        ranked[key].plans = [(replace(choice, complete=finished[key]), plan) for choice, plan in ranked[key].plans]
        if not ranked[key].is_beaten:
            reject_wrong_plans(bench, ranked[key])
        ranked[key].plans = _to_keep(ranked[key].plans)
        report(len(graphs) + count + 1, len(graphs) + len(waiting))
    bench.expect([])
    return ranked


def _to_keep(plans: Sequence[tuple[Choice, Any]]) -> list[tuple[Choice, Any]]:
    """Select the best plans, sorted by time, with at least one of each engine that is about as fast.

    Plans of one engine often take the same time. Within the model, those of another may be faster.
    """
    close_us = CLOSE * min((_us(choice) for choice, _ in plans), default=0.0)
    first: dict[int, int] = {}  # place of the first plan of each engine
    for place, (choice, _) in enumerate(plans):
        if _us(choice) <= close_us:
            first.setdefault(choice.engine, place)
    places = sorted(range(len(plans)), key=lambda place: (place not in first.values(), place))
    return [plans[place] for place in sorted(places[:MAX_PLANS])]


def _drop_beaten(
    ranked: Mapping[str, RankedPlans], waiting: list[tuple[float, str, list[Offer]]], rivals_us: RivalTimes
) -> None:
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
    if known is not None and known.complete and rest and _is(rest[0], known) and _built(bench, result, rest[0]):
        result.plans = [(known, result.plans[0][1])]
        return None
    while rest and not result.plans:
        tried = [rest.pop(0)]
        _built(bench, result, *tried)
    if level == "none" or not result.plans:
        return None
    _time_last(bench, result)
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


def _built(bench: PlanBench, result: RankedPlans, offer: Offer) -> bool:
    try:
        result.plans.append((offer.choice, bench.build(result.graph, offer)))
    except ExecutionError as error:
        result.reject(offer.choice, error)
        return False
    return True


def _time_last(bench: PlanBench, result: RankedPlans) -> None:
    """Time the plan built last, and drop it if it fails.

    One run warms up. One or two more tell if the plan is far slower than the best, because some plans take
    milliseconds. If not, two measurements follow. The better one counts, because one may be disturbed.
    """
    choice, plan = result.plans.pop()
    best_us = min([result.rival_us, *(_us(other) for other, _ in result.plans)])
    absurd_us, hopeless_us = ABSURD * best_us + ONE_RUN_US, HOPELESS * best_us + ONE_RUN_US
    try:
        time_us = _time_us(bench, result.graph, choice, plan, once=True)
        if time_us <= max(absurd_us, ABSURD_US):
            again_us = _time_us(bench, result.graph, choice, plan, once=True)
            time_us = min(time_us, again_us)
            if time_us <= absurd_us:
                time_us = again_us
                if again_us > hopeless_us:
                    time_us = min(again_us, _time_us(bench, result.graph, choice, plan, once=True))
        if time_us <= hopeless_us:
            time_us = min(_time_us(bench, result.graph, choice, plan) for _ in range(2))
    except ExecutionError as error:
        result.reject(choice, error)
        bench.quarantine(result.graph, choice, str(error))
        return
    result.plans.append((replace(choice, time_us=time_us), plan))


def _time_us(bench: PlanBench, graph: CudnnGraph, choice: Choice, plan: Any, once: bool = False) -> float:
    """Time a plan. One that costs the process its GPU goes into quarantine, so that the next process avoids it.

    once: a single run
    """
    try:
        return bench.once_us(graph, plan) if once else bench.time_us(graph, plan)
    except DeviceLostError as error:
        bench.quarantine(graph, choice, str(error))
        raise DeviceLostError(
            f"{choice.name} failed so that the GPU runs nothing more for this process ({error}). "
            f"The plan is in quarantine now: compile again in a new process. It ran\n{graph}"
        ) from error


def _time_others(
    bench: PlanBench, result: RankedPlans, offers: Sequence[Offer], goes_on: Callable[[], bool], level: str
) -> bool:
    """Build and time the offers; False if time ran out before."""
    for offer in offers:
        if not goes_on() and result.plans:
            return False
        if level == "quick" and _is_of_slow_engine(result, offer):
            continue
        if _built(bench, result, offer):
            _time_last(bench, result)
    return True


def _rank_by_time(bench: PlanBench, result: RankedPlans, rng: random.Random) -> bool:
    """Sort the plans by time, after close ones were timed again; False if a rival is faster, so that none was."""
    result.is_beaten = min((_us(choice) for choice, _ in result.plans), default=0.0) > LOSING * result.rival_us
    if not result.is_beaten:
        _time_in_rounds(bench, result, rng)
    result.plans.sort(key=lambda item: _us(item[0]) * (TIE if item[0].engine == BLAS else 1.0))
    return not result.is_beaten


def _is_of_slow_engine(result: RankedPlans, offer: Offer) -> bool:
    """Tell if all plans of an offer's engine that were timed are far slower than the best, because others will be.

    Such engines launch a kernel for each group of a convolution, for example, and other knobs do not change that.
    cuBLASLt is no engine: its plans have nothing in common.
    """
    times_us = [_us(choice) for choice, _ in result.plans if choice.engine == offer.choice.engine != BLAS]
    best_us = min([result.rival_us, *(_us(choice) for choice, _ in result.plans)])
    return bool(times_us) and min(times_us) > ABSURD * best_us + ONE_RUN_US


def _time_in_rounds(bench: PlanBench, result: RankedPlans, rng: random.Random) -> None:
    """Time close plans several times, in random order, because clocks change; the median counts."""
    best = min((_us(choice) for choice, _ in result.plans), default=0.0)
    close = [p for p in result.plans if _us(p[0]) <= SLOW * best]
    times: dict[int, list[float]] = {id(plan): [_us(choice)] for choice, plan in close}
    for number in range(ROUNDS):
        rng.shuffle(close)
        for choice, plan in close:
            try:
                times[id(plan)].append(_time_us(bench, result.graph, choice, plan))
            except ExecutionError as error:
                result.reject(choice, error)
                bench.quarantine(result.graph, choice, str(error))
                result.plans = [p for p in result.plans if p[1] is not plan]
        close = [p for p in close if any(p[1] is q for _, q in result.plans)]
        if number >= 2 and close:
            least = min(statistics.median(times[id(plan)]) for _, plan in close)
            close = [p for p in close if statistics.median(times[id(p[1])]) <= CLOSE * least]
    result.plans = [
        (replace(choice, time_us=statistics.median(times.get(id(plan), [_us(choice)]))), plan)
        for choice, plan in result.plans
    ]


def _us(choice: Choice) -> float:
    return float("inf") if choice.time_us is None else choice.time_us
