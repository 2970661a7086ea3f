"""Time the plans of one cuDNN graph: give up those that are far slower soon, and rank close ones in rounds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fusec.errors import DeviceLostError, ExecutionError
from fusec.gpu.autotune.ranked_plans import Offer, PlanBench, RankedPlans
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import BLAS, Choice

ROUNDS = 7  # in which close plans are timed
HOPELESS = 3.0  # relative time of two runs after which a plan is not timed again
# Relative time of the first run, and of the faster of the first two, after which a plan is not timed again, nor, with
# level quick, another plan of its engine. The first run may wait for another process that uses the GPU, for some
# milliseconds.
ABSURD, ABSURD_US = 10.0, 5000.0
SLOW = 1.5  # relative time of two measurements after which a plan is not timed in rounds
ONE_RUN_US = 10.0  # by which a single run may look longer than one of several
CLOSE = 1.15  # relative time up to which plans are timed in every round
LOSING = 1.5  # time of a graph's best plan, relative to a rival, beyond which its plans are not timed in rounds
TIE = 1.03  # cuBLASLt must be faster than cuDNN by this factor, because it takes most of a second to load


def build_offer(bench: PlanBench, result: RankedPlans, offer: Offer) -> bool:
    """Build the plan of an offer; reject it and return False if it does not build."""
    try:
        result.plans.append((offer.choice, bench.build(result.graph, offer)))
    except ExecutionError as error:
        result.reject(offer.choice, error)
        return False
    return True


def time_last(bench: PlanBench, result: RankedPlans) -> None:
    """Time the plan built last, and drop it if it fails.

    One run warms up. One or two more tell if the plan is far slower than the best, because some plans take
    milliseconds. If not, two measurements follow. The better one counts, because one may be disturbed.
    """
    choice, plan = result.plans.pop()
    best_us = min([result.rival_us, *(measured_us(other) for other, _ in result.plans)])
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


def time_others(
    bench: PlanBench, result: RankedPlans, offers: Sequence[Offer], goes_on: Callable[[], bool], level: str
) -> bool:
    """Build and time the offers; False if time ran out before."""
    for offer in offers:
        if not goes_on() and result.plans:
            return False
        if level == "quick" and _is_of_slow_engine(result, offer):
            continue
        if build_offer(bench, result, offer):
            time_last(bench, result)
    return True


def rank_by_time(bench: PlanBench, result: RankedPlans, rng: random.Random) -> bool:
    """Sort the plans by time, after close ones were timed again; False if a rival is faster, so that none was."""
    result.is_beaten = min((measured_us(choice) for choice, _ in result.plans), default=0.0) > LOSING * result.rival_us
    if not result.is_beaten:
        _time_in_rounds(bench, result, rng)
    result.plans.sort(key=lambda item: measured_us(item[0]) * (TIE if item[0].engine == BLAS else 1.0))
    return not result.is_beaten


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


def _is_of_slow_engine(result: RankedPlans, offer: Offer) -> bool:
    """Tell if all plans of an offer's engine that were timed are far slower than the best, because others will be.

    Such engines launch a kernel for each group of a convolution, for example, and other knobs do not change that.
    cuBLASLt is no engine: its plans have nothing in common.
    """
    times_us = [measured_us(choice) for choice, _ in result.plans if choice.engine == offer.choice.engine != BLAS]
    best_us = min([result.rival_us, *(measured_us(choice) for choice, _ in result.plans)])
    return bool(times_us) and min(times_us) > ABSURD * best_us + ONE_RUN_US


def _time_in_rounds(bench: PlanBench, result: RankedPlans, rng: random.Random) -> None:
    """Time close plans several times, in random order, because clocks change; the median counts."""
    best = min((measured_us(choice) for choice, _ in result.plans), default=0.0)
    close = [p for p in result.plans if measured_us(p[0]) <= SLOW * best]
    times: dict[int, list[float]] = {id(plan): [measured_us(choice)] for choice, plan in close}
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
        (replace(choice, time_us=statistics.median(times.get(id(plan), [measured_us(choice)]))), plan)
        for choice, plan in result.plans
    ]


def measured_us(choice: Choice) -> float:
    """Return the time of a plan; infinite if it was not timed."""
    return float("inf") if choice.time_us is None else choice.time_us
