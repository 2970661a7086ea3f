"""A lock as data: in which form, and by which plans or kernels, each step of a model runs on each target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fusec.plans.plan_record import Choice, Part

NAME = "fusec.lock"
FORMAT = 3


@dataclass(frozen=True)
class LockedPart:
    """One part of a form. `choice`: cuDNN's plan; None for a part that is joined with a kernel beside it. `kernel`: key
    of the kernel that runs it, where it is a step of its own."""

    part: Part
    choice: Choice | None = None
    kernel: str = ""


@dataclass(frozen=True)
class Locked:
    """One step on one target: of cuDNN's, as partitioned, and the parts that take its place; or a kernel's, as it runs;
    or all steps, of which it says whether they run side by side.

    `name` and `shapes` are for people; `work` identifies it."""

    name: str
    work: str
    target: str
    shapes: str
    parts: tuple[LockedPart, ...]

    @property
    def form(self) -> tuple[Part, ...]:
        """What `step_candidates.replace_steps` takes."""
        return tuple(each.part for each in self.parts)

    @property
    def choice(self) -> Choice | None:
        """The plan, where one runs the whole step."""
        return self.parts[0].choice if len(self.parts) == 1 else None

    def __str__(self) -> str:
        return f"{self.name} {self.shapes} on {self.target}"


@dataclass(frozen=True)
class Lock:
    """Entries in order of target, name, shapes and work; the versions they were chosen with; where it was read, and in
    which format."""

    versions: Mapping[str, str]
    entries: tuple[Locked, ...]
    origin: str = field(default=NAME, compare=False)
    format: int = field(default=FORMAT, compare=False)

    @cached_property
    def _by_work(self) -> dict[tuple[str, str], Locked]:
        return {(entry.work, entry.target): entry for entry in self.entries}

    def entry(self, work: str, target: str) -> Locked | None:
        """The entry of a step (`lockfile.work_of`) on a target."""
        return self._by_work.get((work, target))

    def choice(self, work: str, target: str) -> Choice | None:
        """The plan of a step on a target, where one runs the whole."""
        found = self.entry(work, target)
        return None if found is None else found.choice


def in_order(entries: object) -> tuple[Locked, ...]:
    """Entries as a lock has them."""
    assert isinstance(entries, (list, tuple))
    return tuple(sorted(entries, key=lambda e: (e.target, e.name, e.shapes, e.work)))
