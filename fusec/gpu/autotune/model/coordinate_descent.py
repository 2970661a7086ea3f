"""Choose by coordinate descent among plans and kernels that are about as fast alone, timed within the whole model.

Timed alone, a plan runs on an idle GPU with an empty L2 cache. Within the model it finds in the cache what the step
before it wrote. Its first blocks run while the last blocks of that step still run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from fusec.gpu.measure.runs_in_turn import ROUNDS, Run, Timer, each_round, is_faster
from fusec.system.dataclass import dataclass

# Options are tried that take at most this many times the best alone. Operands come from memory there, and within the
# model often from the cache.
NEAR = 1.25
MAX_OPTIONS = 4  # for one graph or kernel
MIN_SHARE = 0.01  # of the time of all steps: options for less are not tried
SECONDS: Mapping[str, float] = {"quick": 2.0, "full": 20.0}  # by tuning level


@dataclass(frozen=True)
class Contest:
    """Options for one graph or kernel that are about as fast alone; option 0 is in use."""

    key: str
    options: int


class Whole(Timer, Protocol):
    """A model that can be captured and timed with any options."""

    def captured(self, options: Mapping[str, int]) -> Run | None:
        """Capture the model with these options, by key, and option 0 elsewhere; None if it is not one CUDA graph."""
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


def descend(contests: Sequence[Contest], whole: Whole, goes_on: Callable[[], bool]) -> dict[str, int] | None:
    """Try the options of each contest within the whole model, and return those that make it faster, by key.

    Returns None if the model cannot be captured as one CUDA graph.
    """
    first = whole.captured({})
    if first is None:
        return None
    best: Run = first
    options: dict[str, int] = {}
    for contest in contests:
        for option in range(1, contest.options):
            if not goes_on():
                break
            other = whole.captured({**options, contest.key: option})
            if other is None:
                continue
            if is_faster(other, best, whole):
                options[contest.key], best = option, other
    rounds = list(each_round((first, best), whole, ROUNDS))
    before_us, after_us = (statistics.median(times) for times in zip(*rounds, strict=True))
    return options if after_us < before_us else {}  # else the gains were noise
