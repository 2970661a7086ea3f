"""Choose by coordinate descent among plans and kernels that are about as fast alone, timed within the whole model.

Timed alone, a plan runs on an idle GPU with an empty L2 cache. Within the model it finds in the cache what the step
before it wrote. Its first blocks run while the last blocks of that step still run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# Options are tried that take at most this many times the best alone. Operands come from memory there, and within the
# model often from the cache.
NEAR = 1.25
MAX_OPTIONS = 4  # for one graph or kernel
ROUNDS = 9  # runs of the whole model with each of two options
FIRST_ROUNDS = 3  # after these a clearly slower option is dropped
SLOWER = 1.01  # relative time that is clearly slower
GAIN = 0.998  # relative time that is faster: a smaller gain is noise
WINS = 7  # rounds that a faster option must win
MIN_SHARE = 0.01  # of the time of all steps: options for less are not tried
SECONDS: Mapping[str, float] = {"quick": 2.0, "full": 20.0}  # by tuning level

Run = Callable[[], None]


@dataclass(frozen=True)
class Contest:
    """Options for one graph or kernel that are about as fast alone; option 0 is in use."""

    key: str
    options: int


@dataclass(frozen=True)
class DescentResult:
    """Options that make the whole model faster, by key, its times before and after, and how many were tried."""

    options: Mapping[str, int]
    before_us: float
    after_us: float
    tried: int


class Whole(Protocol):
    """A model that can be captured and timed with any options."""

    def captured(self, options: Mapping[str, int]) -> Run | None:
        """Capture the model with these options, by key, and option 0 elsewhere; None if it is not one CUDA graph."""
        ...

    def time_us(self, run: Run) -> float:
        """Time one run."""
        ...


def contests(times_us: Mapping[str, Sequence[float]], counts: Mapping[str, int]) -> list[Contest]:
    """List the graphs and kernels with options worth trying, the largest share of time first.

    times_us: times alone of the options of a graph or kernel; option 0 is in use, the others are sorted
    counts: number of steps that run it
    """
    shares_us = {key: times[0] * counts[key] for key, times in times_us.items() if times}
    least_us = MIN_SHARE * sum(shares_us.values())
    found: list[Contest] = []
    for key, share_us in sorted(shares_us.items(), key=lambda item: -item[1]):
        first, *rest = times_us[key]
        options = 1 + sum(time <= NEAR * first for time in rest[: MAX_OPTIONS - 1])
        if share_us >= least_us and options > 1:
            found.append(Contest(key, options))
    return found


def descend(contests: Sequence[Contest], whole: Whole, goes_on: Callable[[], bool]) -> DescentResult | None:
    """Try the options of each contest within the whole model, and take those that make it faster.

    Returns None if the model cannot be captured as one CUDA graph.
    """
    first = whole.captured({})
    if first is None:
        return None
    best: Run = first
    options: dict[str, int] = {}
    tried = 0
    for contest in contests:
        for option in range(1, contest.options):
            if not goes_on():
                break
            other = whole.captured({**options, contest.key: option})
            if other is None:
                continue
            tried += 1
            if _is_faster(other, best, whole):
                options[contest.key], best = option, other
    rounds = list(_each_round((first, best), whole, ROUNDS))
    before_us, after_us = (statistics.median(times) for times in zip(*rounds, strict=True))
    if not options or after_us >= before_us:  # the gains were noise
        return DescentResult({}, before_us, before_us, tried)
    return DescentResult(options, before_us, after_us, tried)


def _is_faster(other: Run, best: Run, whole: Whole) -> bool:
    rounds: list[tuple[float, float]] = []
    losses = 0
    for round in _each_round((best, other), whole, ROUNDS):
        rounds.append(round)
        losses += round[1] >= round[0]
        clearly_slower = len(rounds) == FIRST_ROUNDS and _relative(rounds) > SLOWER
        if clearly_slower or losses > ROUNDS - WINS:  # it cannot win often enough any more
            return False
    return _relative(rounds) <= GAIN


def _relative(rounds: Sequence[tuple[float, float]]) -> float:
    """Return the median time of the second relative to the first; 1 where the first is too short for the clock."""
    return statistics.median(b / a if a else 1.0 for a, b in rounds)


def _each_round(pair: tuple[Run, Run], whole: Whole, count: int) -> Iterator[tuple[float, float]]:
    """Time both alternately, because GPU clocks change, and swap their order each round; one run warms up."""
    whole.time_us(pair[1])
    for number in range(count):
        first, second = (whole.time_us(run) for run in (pair if number % 2 == 0 else pair[::-1]))
        yield (first, second) if number % 2 == 0 else (second, first)
