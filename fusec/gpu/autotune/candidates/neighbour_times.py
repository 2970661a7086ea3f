"""Choose between candidates that are about as fast alone by their times between the steps around them.

Alone, a launch begins on an idle GPU. Within a program it may begin while the launch before it still runs, and the next
one may begin before it ends. Kernels of fusec do so, and plans of cuDNN do not. So two launches that are faster alone
than one may be slower there, and a kernel may be slower than a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fusec.gpu.autotune.candidates.step_candidates import Candidate
from fusec.gpu.autotune.step_choices import StepChoice, kernel_of, steps_of_choice
from fusec.gpu.kernels import GpuFigures
from fusec.schedule.program import Kind, Partition, Program
from fusec.system.dataclass import dataclass

NEAR = 1.25  # relative time alone up to which a candidate is tried
MAX_OTHERS = 2  # candidates that are tried against the fastest alone
GAIN = 0.98  # relative time of a few steps that is faster: a smaller gain is noise
MIN_SHARE = 0.01  # of the time of all steps: candidates of steps that take less are not tried
Faster = Callable[[Candidate, Candidate], bool]  # tells if the first sequence of steps is faster than the second


@dataclass(frozen=True)
class Timed:
    """Candidates of a step as choices, their times alone, and the number of steps that they run."""

    choices: Sequence[StepChoice]
    times_us: Sequence[float]
    count: int

    @property
    def least_us(self) -> float:
        return min(self.times_us)

    @property
    def rivals(self) -> list[StepChoice]:
        """The fastest choice alone, and near it the fastest of those by other libraries, or in other launches."""
        order = sorted(range(len(self.choices)), key=self.times_us.__getitem__)
        found: dict[tuple[str, ...], StepChoice] = {}
        for i in order:
            if self.times_us[i] <= NEAR * self.least_us:
                found.setdefault(tuple(part.runs for part in self.choices[i] if part.runs != "ops"), self.choices[i])
        return list(found.values())[: 1 + MAX_OTHERS]


def decide(
    program: Program,
    keys: Sequence[str | None],
    timed: Mapping[str, Timed],
    chosen: Mapping[str, StepChoice],
    figures: GpuFigures,
    is_faster: Faster,
) -> dict[str, StepChoice]:
    """Return the choices that are faster between their neighbours than the fastest alone, by key.

    keys: key of each step of the program; None for a step without candidates
    timed: the candidates that were timed, by key
    chosen: the choices so far, by key
    figures: figures of the GPU
    """
    least_us = MIN_SHARE * sum(each.least_us * each.count for each in timed.values())
    found = dict(chosen)

    def steps_of(number: int, choice: StepChoice | None) -> Candidate:
        step = program.steps[number]
        return (step,) if choice is None else tuple(steps_of_choice(program.graph, step, choice, figures))

    def neighbour(numbers: Sequence[int]) -> Candidate:
        """Return the first of these steps that is a launch, with its choice; nothing if it cannot run."""
        number = next((i for i in numbers if program.steps[i].kind is not Kind.VIEW), None)
        if number is None:
            return ()
        key = keys[number]
        steps = steps_of(number, found.get(key) if key is not None else None)
        return steps if all(_runs(step, figures) for step in steps) else ()

    changed: dict[str, StepChoice] = {}
    for key, each in timed.items():
        best, *others = each.rivals
        if not others or each.least_us * each.count < least_us or each.least_us == float("inf"):
            continue
        numbers = [i for i, k in enumerate(keys) if k == key]
        number = numbers[len(numbers) // 2]  # the first and last may have other neighbours
        before = neighbour(range(number - 1, -1, -1))
        after = neighbour(range(number + 1, len(keys)))
        for other in others:
            windows = [(*before, *steps_of(number, choice), *after) for choice in (other, best)]
            if is_faster(*windows):
                changed[key] = found[key] = best = other
    return changed


def _runs(step: Partition, figures: GpuFigures) -> bool:
    return step.kind is not Kind.KERNEL or kernel_of(step.nodes, figures) is not None
