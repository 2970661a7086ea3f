"""Hold a lock as data: the candidate, plan or kernel that runs each step of a model on each target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fusec.plans.plan_record import Choice, Part

NAME = "fusec.lock"
FORMAT = 3


@dataclass(frozen=True)
class LockedPart:
    """One part of a step.

    choice: cuDNN's plan; None for a part that a neighbouring kernel runs.
    kernel: key of the kernel that runs the part, if it is a step of its own.
    """

    part: Part
    choice: Choice | None = None
    kernel: str = ""


@dataclass(frozen=True)
class Locked:
    """One entry of a lock, for one target.

    It is about a step of cuDNN, as partitioned, with the parts that replace it; or about a kernel, as it runs;
    or about the whole program, and says if steps run side by side.
    `name` and `shapes` are for people; `work` identifies the entry.
    """

    name: str
    work: str
    target: str
    shapes: str
    parts: tuple[LockedPart, ...]

    @property
    def form(self) -> tuple[Part, ...]:
        """Return how the step is split, as `step_candidates.arranged` takes it."""
        return tuple(each.part for each in self.parts)

    @property
    def choice(self) -> Choice | None:
        """Return the plan, if one plan runs the whole step."""
        return self.parts[0].choice if len(self.parts) == 1 else None

    def __str__(self) -> str:
        return f"{self.name} {self.shapes} on {self.target}"


@dataclass(frozen=True)
class Lock:
    """Entries in order of target, name, shapes and work, with the versions they were chosen with.

    origin: the file it was read from; format: the format of that file.
    """

    versions: Mapping[str, str]
    entries: tuple[Locked, ...]
    origin: str = field(default=NAME, compare=False)
    format: int = field(default=FORMAT, compare=False)

    @cached_property
    def _by_work(self) -> dict[tuple[str, str], Locked]:
        return {(entry.work, entry.target): entry for entry in self.entries}

    def entry(self, work: str, target: str) -> Locked | None:
        """Return the entry of a step (`lockfile.work_of`) on a target."""
        return self._by_work.get((work, target))

    def choice(self, work: str, target: str) -> Choice | None:
        """Return the plan of a step on a target, if one plan runs the whole step."""
        found = self.entry(work, target)
        return None if found is None else found.choice


def in_order(entries: object) -> tuple[Locked, ...]:
    """Sort entries as a lock does."""
    assert isinstance(entries, (list, tuple))
    return tuple(sorted(entries, key=lambda e: (e.target, e.name, e.shapes, e.work)))
