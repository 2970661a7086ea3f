"""Which of plans or kernels that are about as fast alone is fastest within the whole: coordinate descent, measured.

By itself a plan runs on a rested chip and finds the cache swept; within the model it finds what the step before left
there, and its first blocks run beside the last ones of that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

NEAR = (
    1.25  # of the best, how long a plan may take by itself: there operands come from memory, here often from the cache
)
MOST = 4  # ways to run one graph or kernel
TURNS = 9  # of the whole with one plan and with another
FIRST = 3  # turns after which one that is clearly slower is let go
SLOWER = 1.01
GAIN = 0.998  # of the time that is left: less is noise
WINS = 7  # of the turns
LEAST_SHARE = 0.01  # of all steps: what graphs take that are tried
SECONDS: Mapping[str, float] = {"quick": 2.0, "full": 20.0}  # by tuning level

Run = Callable[[], None]


@dataclass(frozen=True)
class Contest:
    """A graph or kernel with so many ways to run it that are about as fast, the one in use first; `share_us` of the
    steps that do."""

    key: str
    share_us: float
    options: int


@dataclass(frozen=True)
class DescentResult:
    """By place, the plans of graphs and the ways of kernels that have another one now; how long the whole took before
    and after, and how many wholes were tried."""

    options: Mapping[str, int]
    before_us: float
    after_us: float
    tried: int


class Whole(Protocol):
    """The steps of a model as one call runs them, with any plans."""

    def recorded(self, options: Mapping[str, int]) -> Run | None:
        """With these plans, by graph, and the first one of others; None if it cannot be recorded in one piece."""
        ...

    def time_us(self, run: Run) -> float:
        """One run."""
        ...


def contests(times_us: Mapping[str, Sequence[float]], counts: Mapping[str, int]) -> list[Contest]:
    """What is worth a try, the heaviest first. times_us: of the ways to run a graph or kernel by themselves, the one in
    use first, then as fast as they are; counts: how many steps run it."""
    shares_us = {key: times[0] * counts[key] for key, times in times_us.items() if times}
    least_us = LEAST_SHARE * sum(shares_us.values())
    found: list[Contest] = []
    for key, share_us in sorted(shares_us.items(), key=lambda item: -item[1]):
        first, *rest = times_us[key]
        options = 1 + sum(time <= NEAR * first for time in rest[: MOST - 1])
        if share_us >= least_us and options > 1:
            found.append(Contest(key, share_us, options))
    return found


def descend(contests: Sequence[Contest], whole: Whole, goes_on: Callable[[], bool]) -> DescentResult | None:
    """Try the plans of one graph after the other within the whole, and keep what makes that faster; None if it cannot
    be recorded."""
    first = whole.recorded({})
    if first is None:
        return None
    best: Run = first
    options: dict[str, int] = {}
    tried = 0
    for contest in contests:
        for option in range(1, contest.options):
            if not goes_on():
                break
            other = whole.recorded({**options, contest.key: option})
            if other is None:
                continue
            tried += 1
            if _is_faster(other, best, whole):
                options[contest.key], best = option, other
    rounds = _rounds((first, best), whole, TURNS)
    before_us, after_us = (statistics.median(times) for times in zip(*rounds, strict=True))
    if not options or after_us >= before_us:  # what seemed faster was noise
        return DescentResult({}, before_us, before_us, tried)
    return DescentResult(options, before_us, after_us, tried)


def _is_faster(other: Run, best: Run, whole: Whole) -> bool:
    rounds = _rounds((best, other), whole, FIRST)
    if _relative(rounds) > SLOWER:
        return False
    rounds += _rounds((best, other), whole, TURNS - FIRST)
    wins = sum(b < a for a, b in rounds)
    return wins >= WINS and _relative(rounds) <= GAIN


def _relative(rounds: Sequence[tuple[float, float]]) -> float:
    """What the second takes for each unit of the first; a first too short for the clock says nothing."""
    return statistics.median(b / a if a else 1.0 for a, b in rounds)


def _rounds(pair: tuple[Run, Run], whole: Whole, count: int) -> list[tuple[float, float]]:
    """Both in turns, since clocks change, and now the one first, now the other; one run warms up."""
    whole.time_us(pair[1])
    rounds: list[tuple[float, float]] = []
    for number in range(count):
        first, second = (whole.time_us(run) for run in (pair if number % 2 == 0 else pair[::-1]))
        rounds.append((first, second) if number % 2 == 0 else (second, first))
    return rounds
