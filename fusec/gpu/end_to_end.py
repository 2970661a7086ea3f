"""Which of the plans that are about as fast by themselves is fastest within the whole: coordinate descent, measured.

By itself a plan runs on a rested chip and finds the cache swept; within the model it finds what the step before left
there, and its first blocks run beside the last ones of that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from fusec.gpu.calls import Streams
from fusec.gpu.capture import in_order
from fusec.gpu.tune import CLOSE, Tuned

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
    """A graph with so many plans that are about as fast, the one in use first; `share_us` of the steps that run it."""

    key: str
    share_us: float
    options: int


@dataclass(frozen=True)
class Found:
    """The plans, by place, of graphs that have another one now; how long the whole took before and after, and how many
    wholes were tried."""

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


def contests(tuned: Mapping[str, Tuned], counts: Mapping[str, int]) -> list[Contest]:
    """The graphs worth a try, the heaviest first. counts: how many steps run a graph."""
    shares_us = {key: tuned[key].time_us * count for key, count in counts.items() if tuned[key].plans}
    least_us = LEAST_SHARE * sum(shares_us.values())
    found: list[Contest] = []
    for key, share_us in sorted(shares_us.items(), key=lambda item: -item[1]):
        options = _close(tuned[key])
        if share_us >= least_us and options > 1:
            found.append(Contest(key, share_us, options))
    return found


def _close(tuned: Tuned) -> int:
    """How many plans, from the first on, were measured to take about as long."""
    count = 0
    for choice, _ in tuned.plans:
        if choice.time_us is None or choice.time_us > CLOSE * tuned.time_us:
            break
        count += 1
    return count


def descend(contests: Sequence[Contest], whole: Whole, goes_on: Callable[[], bool]) -> Found | None:
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
        return Found({}, before_us, before_us, tried)
    return Found(options, before_us, after_us, tried)


def _is_faster(other: Run, best: Run, whole: Whole) -> bool:
    rounds = _rounds((best, other), whole, FIRST)
    if statistics.median(b / a for a, b in rounds) > SLOWER:
        return False
    rounds += _rounds((best, other), whole, TURNS - FIRST)
    wins = sum(b < a for a, b in rounds)
    return wins >= WINS and statistics.median(b / a for a, b in rounds) <= GAIN


def _rounds(pair: tuple[Run, Run], whole: Whole, count: int) -> list[tuple[float, float]]:
    """Both in turns, since clocks change, and now the one first, now the other; one run warms up."""
    whole.time_us(pair[1])
    rounds: list[tuple[float, float]] = []
    for number in range(count):
        first, second = (whole.time_us(run) for run in (pair if number % 2 == 0 else pair[::-1]))
        rounds.append((first, second) if number % 2 == 0 else (second, first))
    return rounds


@dataclass
class Captured:
    """The steps of a model, as `runs` that were called before, in CUDA graphs. places: by graph, which of them it is.
    bound: what runs such a step by another plan of its graph."""

    streams: Streams
    runs: Sequence[Run]
    places: Mapping[str, Sequence[int]]
    bound: Callable[[str, int, int], Run]
    scratch: Callable[[], AbstractContextManager[None]]
    timed: Callable[[Run, int], list[float]]
    _others: dict[tuple[str, int, int], Run] = field(default_factory=dict[tuple[str, int, int], Any])

    def recorded(self, options: Mapping[str, int]) -> Run | None:
        runs = list(self.runs)
        for key, option in options.items():
            for place in self.places[key]:
                if (key, option, place) not in self._others:
                    self._others[key, option, place] = self.bound(key, option, place)
                runs[place] = self._others[key, option, place]
        replay = in_order(self.streams, runs, self.scratch)
        return replay if replay.at_once else None

    def time_us(self, run: Run) -> float:
        return self.timed(run, 1)[0]
