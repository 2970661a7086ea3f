"""Compare two locks, or a lock with what this machine's cuDNN and fusec would choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusec.execution.compilation import Compiled
from fusec.gpu import kernels
from fusec.gpu.autotune.step_choices import apply_choices, before_choices, step_key
from fusec.gpu.autotune.steps.concat_choice import concat_choices, concats_in_place, copy_concats
from fusec.lockfile.entries import (
    WHOLE,
    Builds,
    cudnn_parts,
    cudnn_steps,
    digest_of,
    is_order,
    is_unknown,
    library_of,
    other_kernel,
    plan_name,
    shapes_of,
    steps_with_candidates,
    tries,
    unoffered,
    versions,
    whole_work,
    work_of,
)
from fusec.lockfile.precision import locks_differ, other_precision
from fusec.plans.lock_record import Lock, Locked, LockedPart
from fusec.plans.plan_record import ORDERS, Choice, Part
from fusec.schedule.program import Kind, Partition


def differences(old: Lock, new: Lock) -> list[str]:
    """Compare two locks: return a line for each difference. Measured times and errors are not compared."""
    lines = _version_lines(old.versions, new.versions)
    if other := locks_differ(old, new):
        return [*lines, other]
    for entry in old.entries:
        other = new.entry(entry.work, entry.target)
        if other is None:
            lines.append(f"- {entry}: is in {old.origin} alone")
            continue
        if entry.split != other.split:
            lines.append(f"~ {entry}: {_split_text(entry.split)} -> {_split_text(other.split)}")
            continue
        for mine, theirs in zip(entry.parts, other.parts, strict=True):
            if (mine.kernel, _identity(mine)) != (theirs.kernel, _identity(theirs)):
                lines.append(f"~ {entry}: {_runner(mine)} -> {_runner(theirs)}")
            elif mine.choice and theirs.choice and mine.choice.workspace_bytes != theirs.choice.workspace_bytes:
                sizes = mine.choice.workspace_bytes, theirs.choice.workspace_bytes
                lines.append(f"~ {entry}: workspace {sizes[0]} -> {sizes[1]} bytes")
    known = {(entry.work, entry.target) for entry in old.entries}
    lines += [f"+ {e}: is in {new.origin} alone" for e in new.entries if (e.work, e.target) not in known]
    return lines


def changes(lock: Lock, compiled: Compiled, builds: Builds | None = None) -> list[str]:
    """Compare a lock with this machine: return a line for each thing that its cuDNN and fusec would change.

    Lines name steps that fuse differently, spellings that were not measured, plans and kernels that no longer exist.
    builds: as for `lockfile.apply`.
    """
    compiled.require_answers(f"{lock.origin}: comparing it for {compiled.target.name}")
    here = versions()
    lines = _version_lines({name: lock.versions.get(name, "") for name in here}, here)
    if other := other_precision(lock, compiled):  # because every step would be a difference
        return [*lines, other]
    comparison = _Comparison(lock, compiled, builds or tries(compiled.target, compiled.options.plan_filter), lines)
    if isinstance(compiled.tuned, Lock):  # the program of a `.fusec` file is split into parts already
        comparison.compare_file(compiled.tuned)
        return list(dict.fromkeys(lines))
    comparison.compare_concats()
    comparison.compare_cudnn_steps()
    comparison.compare_kernels()
    comparison.compare_whole()
    return lines


class _Comparison:
    """Adds lines about a program that differs from its entries in a lock.

    seen: the `work` of entries that were looked up. splits: how the lock splits steps, by `step_key`.
    """

    def __init__(self, lock: Lock, compiled: Compiled, builds: Builds, lines: list[str]):
        self.lock, self.compiled, self.builds, self.lines = lock, compiled, builds, lines
        self.target, self.cores = compiled.target, compiled.options.tensor_cores
        self.figures = compiled.figures
        self.program = compiled.program
        self.seen: set[str] = set()
        self.splits: dict[str, tuple[Part, ...]] = {}

    def compare_concats(self) -> None:
        """Compare the concats, and copy the operands of those that the lock does not run in place."""
        copies: set[str] = set()
        for work, concat in concat_choices(concats_in_place(self.program), self.program).items():
            entry = self.lock.entry(digest_of(work, True), self.target.name)
            self.seen.add(digest_of(work, True))
            if entry is None:
                self.lines.append(f"+ concat {concat.shapes} on {self.target.name}: is in place now")
            elif entry.split[0].runs == "copy":
                copies.add(work)
        self.program = copy_concats(self.program, copies)

    def compare_cudnn_steps(self) -> None:
        """Compare the steps that have candidates: how they are split and spelled, and the plans of cuDNN."""
        for step in steps_with_candidates(before_choices(self.program, self.figures, self.compiled.options.as_source)):
            entry = self._entry(step)
            if entry is None:
                continue
            try:
                parts = cudnn_parts(self.compiled.graph, step, entry.split, self.figures)
            except (ValueError, StopIteration) as error:
                self.lines.append(f"~ {self._what(step)}: {error}")
                continue
            self.splits[step_key(self.compiled.graph, step)] = entry.split
            unmeasured = entry.choice is not None and entry.choice.time_us is None
            spelling = entry.split[0].spelling
            if unmeasured and spelling != step.spelling:
                self.lines.append(f"~ {self._what(step)}: spelled {_words(spelling)} -> {_words(step.spelling)}")
                continue
            for place, part in parts:
                self._compare_plan(self._what(step), part, entry.parts[place].choice)

    def compare_kernels(self) -> None:
        """Compare the kernels, after the steps of cuDNN are split as the lock says."""
        for step in apply_choices(self.program, self.splits, self.figures, self.compiled.options.as_source).steps:
            entry = self._entry(step) if step.kind is Kind.KERNEL else None
            if entry is None:
                continue
            if problem := other_kernel(kernels.find(step.nodes, step.outputs, self.figures), entry):
                self.lines.append(f"~ {self._what(step)}: {problem}")

    def compare_whole(self) -> None:
        """Name the entries that no step of the program has, and compare how all steps are connected."""
        entries = [entry for entry in self.lock.entries if entry.target == self.target.name]
        if not entries:
            self.lines.append(f"nothing is locked for {self.target.name}")
        unused = (entry for entry in entries if entry.work not in self.seen and not is_order(entry))
        self.lines += [f"- {entry}: fuses so no more" for entry in unused]
        work = whole_work(self.program, self.cores)
        if any(map(is_order, entries)) and self.lock.entry(work, self.target.name) is None:
            self.lines.append(f"~ {WHOLE} on {self.target.name}: its steps are others, or connected otherwise")

    def compare_file(self, own: Lock) -> None:
        """Compare the lock with the one of a file, and its plans with those of cuDNN here."""
        old, new = (
            Lock({}, tuple(e for e in each.entries if e.target == self.target.name), each.origin)
            for each in (self.lock, own)
        )
        self.lines += differences(old, new)
        for step in cudnn_steps(self.program):
            entry = old.entry(work_of(step, self.compiled.graph, self.cores), self.target.name)
            self._compare_plan(self._what(step), step, None if entry is None else entry.choice)

    def _entry(self, step: Partition) -> Locked | None:
        """Return the entry of a step the first time it is looked up; name a step that has none."""
        work = work_of(step, self.compiled.graph, self.cores)
        if work in self.seen:
            return None
        self.seen.add(work)
        entry = self.lock.entry(work, self.target.name)
        if entry is None:
            self.lines.append(f"+ {self._what(step)}: fuses so now")
        return entry

    def _compare_plan(self, what: str, step: Partition, choice: Choice | None) -> None:
        if choice is None:
            return
        if problem := unoffered(step, choice, self.target, self.compiled.options, self.builds):
            self.lines.append(f"~ {what}: {problem}")
        elif is_unknown(step, choice, self.target):
            self.lines.append(f"? {what}: {plan_name(choice)}: {library_of(choice)} tells of it on the device alone")

    def _what(self, step: Partition) -> str:
        return f"{step.signature} {shapes_of(step)} on {self.target.name}"


def _version_lines(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: {old.get(name) or 'none'} -> {new.get(name) or 'none'}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def _identity(locked: LockedPart) -> object:
    return None if locked.choice is None else locked.choice.identity


def _runner(locked: LockedPart) -> str:
    if locked.choice is not None:
        return plan_name(locked.choice)
    return f"kernel {locked.kernel}" if locked.kernel else "joined with a kernel"


def _split_text(split: Sequence[Part]) -> str:
    """Describe how a step is split: `spelled zero_bias`, `a kernel`, `1 op as it is, then 2 ops a kernel`."""
    words = {"kernel": "a kernel", "ops": "op by op", "in place": "in place", "copy": "a copy"} | {
        order: order for order in ORDERS
    }
    said = [words.get(part.runs) or f"spelled {_words(part.spelling)}" for part in split]
    if len(split) == 1:
        return said[0]
    return ", then ".join(
        f"{part.nodes} {'op' if part.nodes == 1 else 'ops'} {w}" for part, w in zip(split, said, strict=True)
    )


def _words(spelling: Sequence[str]) -> str:
    return ", ".join(spelling) or "as it is"
