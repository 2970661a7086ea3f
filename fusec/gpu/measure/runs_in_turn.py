"""Tell if a run is faster than another one, by times of both in turn, because GPU clocks change."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

ROUNDS = 9  # runs of the whole model with each of two options
FIRST_ROUNDS = 3  # after these a clearly slower option is dropped
SLOWER = 1.01  # relative time that is clearly slower
GAIN = 0.998  # relative time that is faster: a smaller gain is noise
WINS = 7  # rounds that a faster option must win

Run = Callable[[], None]


class Timer(Protocol):
    """A clock for what runs on the GPU."""

    def time_us(self, run: Run) -> float:
        """Time one run."""
        ...


def is_faster(other: Run, best: Run, timer: Timer, gain: float = GAIN) -> bool:
    """Tell if a run is faster than another one, by times of both in turn. It has to win most rounds.

    gain: relative time that is faster; a smaller gain is noise.
    """
    rounds: list[tuple[float, float]] = []
    losses = 0
    for round in each_round((best, other), timer, ROUNDS):
        rounds.append(round)
        losses += round[1] >= round[0]
        clearly_slower = len(rounds) == FIRST_ROUNDS and _relative(rounds) > SLOWER
        if clearly_slower or losses > ROUNDS - WINS:  # it cannot win often enough any more
            return False
    return _relative(rounds) <= gain


def _relative(rounds: Sequence[tuple[float, float]]) -> float:
    """Return the median time of the second relative to the first; 1 where the first is too short for the clock."""
    return statistics.median(b / a if a else 1.0 for a, b in rounds)


def each_round(pair: tuple[Run, Run], timer: Timer, count: int) -> Iterator[tuple[float, float]]:
    """Time both alternately, because GPU clocks change, and swap their order each round; one run warms up."""
    timer.time_us(pair[1])
    for number in range(count):
        first, second = (timer.time_us(run) for run in (pair if number % 2 == 0 else pair[::-1]))
        yield (first, second) if number % 2 == 0 else (second, first)
