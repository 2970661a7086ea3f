"""Record a lock: the candidate, plan or kernel that runs each step of a model on each target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from functools import cached_property

from fusec.plans.plan_record import Choice, Part
from fusec.system.dataclass import dataclass

NAME = "fusec.lock"
FORMAT = 3


@dataclass(frozen=True)
class LockedPart:
    """One part of a step in a lock.

    choice: the plan of cuDNN; None for a part that a kernel runs.
    kernel: key of the kernel, if the part is a step of its own and not fused into the kernel of another step.
    """

    part: Part
    choice: Choice | None = None
    kernel: str = ""


@dataclass(frozen=True)
class Locked:
    """One entry of a lock, for one target.

    There are three kinds: a step as partitioned, with the parts that replace it; a kernel that runs; and the whole
    program, which says if steps run side by side. `work` identifies the entry; `name` and `shapes` are for people.
    """

    name: str
    work: str
    target: str
    shapes: str
    parts: tuple[LockedPart, ...]

    @property
    def split(self) -> tuple[Part, ...]:
        """Return the parts of the step, as `step_choices.steps_of_choice` takes them."""
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
    timed: False for the lock in a `.fusec` file that was made without a GPU. It names the first variant of each kernel.
    """

    versions: Mapping[str, str]
    entries: tuple[Locked, ...]
    origin: str = field(default=NAME, compare=False)
    format: int = field(default=FORMAT, compare=False)
    timed: bool = field(default=True, compare=False)

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


def in_order(entries: Iterable[Locked]) -> tuple[Locked, ...]:
    """Sort entries as a lock does."""
    return tuple(sorted(entries, key=lambda e: (e.target, e.name, e.shapes, e.work)))
