"""Compare two locks, or a lock with what this machine's cuDNN and fusec would choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.execution.compilation import Compiled
from fusec.gpu import kernels
from fusec.gpu.autotune.concat_choice import concat_choices, concats_in_place, copy_concats
from fusec.gpu.autotune.step_candidates import apply_choices, step_key
from fusec.lockfile.entries import (
    WHOLE,
    Builds,
    cudnn_parts,
    cudnn_steps,
    digest_of,
    first_of,
    formed_steps,
    is_order,
    is_unknown,
    library_of,
    other_kernel,
    plan_name,
    shapes_of,
    tries,
    unoffered,
    versions,
    whole_work,
    work_of,
)
from fusec.plans.lock_record import Lock, Locked, LockedPart
from fusec.plans.plan_record import ORDERS, Part
from fusec.schedule.program import Kind, Partition


def differences(old: Lock, new: Lock) -> list[str]:
    """Return what another lock says differently, a line each; measured figures do not count."""
    lines = [
        f"{name}: {old.versions.get(name) or 'none'} -> {new.versions.get(name) or 'none'}"
        for name in dict.fromkeys((*old.versions, *new.versions))
        if old.versions.get(name) != new.versions.get(name)
    ]
    for entry in old.entries:
        other = new.entry(entry.work, entry.target)
        if other is None:
            lines.append(f"- {entry}: is in {old.origin} alone")
            continue
        if entry.form != other.form:
            lines.append(f"~ {entry}: {_form(entry.form)} -> {_form(other.form)}")
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
    """Return what this machine's cuDNN and fusec would change of a lock, a line each.

    Lines name steps that fuse differently, spellings that were not measured, plans and kernels that no longer exist.
    builds: as for `lockfile.apply`.
    """
    target, cores, as_source = compiled.target, compiled.options.tensor_cores, compiled.options.as_source
    compiled.require_answers(f"{lock.origin}: comparing it for {target.name}")
    lines = [
        f"{name}: {lock.versions.get(name) or 'none'} -> {version or 'none'}"
        for name, version in versions().items()
        if lock.versions.get(name) != version
    ]
    try_ = builds or tries(target)
    if isinstance(compiled.tuned, Lock):  # of a file, whose program has its forms already
        return lines + _changes_of_file(lock, compiled, compiled.tuned, try_)
    forms: dict[str, tuple[Part, ...]] = {}
    seen: set[str] = set()

    def looked_up(step: Partition) -> tuple[Locked | None, str]:
        work, what = work_of(step, compiled.graph, cores), f"{step.signature} {shapes_of(step)} on {target.name}"
        entry = None if work in seen else lock.entry(work, target.name)
        if entry is None and work not in seen:
            lines.append(f"+ {what}: fuses so now")
        seen.add(work)
        return entry, what

    copies: set[str] = set()
    for work, each in concat_choices(concats_in_place(compiled.program), compiled.program).items():
        entry = lock.entry(digest_of(work, True), target.name)
        seen.add(digest_of(work, True))
        if entry is None:
            lines.append(f"+ concat {each.shapes} on {target.name}: is in place now")
        elif entry.form[0].runs == "copy":
            copies.add(work)
    compiled = replace(compiled, program=copy_concats(compiled.program, copies))
    for step in formed_steps(first_of(compiled.program, as_source)):
        entry, what = looked_up(step)
        if entry is None:
            continue
        try:
            parts = cudnn_parts(compiled.graph, step, entry.form)
        except (ValueError, StopIteration) as error:
            lines.append(f"~ {what}: {error}")
            continue
        forms[step_key(compiled.graph, step)] = entry.form
        unmeasured = entry.choice is not None and entry.choice.time_us is None
        spelling = next((part.spelling for part in entry.form), ())
        if unmeasured and spelling != step.spelling:
            lines.append(f"~ {what}: spelled {_words(spelling)} -> {_words(step.spelling)}")
            continue
        for place, part in parts:
            choice = entry.parts[place].choice
            if choice is not None and (problem := unoffered(part, choice, target, cores, try_)):
                lines.append(f"~ {what}: {problem}")
            elif choice is not None and is_unknown(part, choice, target):
                lines.append(f"? {what}: {plan_name(choice)}: {library_of(choice)} tells of it on the device alone")
    for step in apply_choices(compiled.program, forms, as_source).steps:
        entry, what = looked_up(step) if step.kind is Kind.KERNEL else (None, "")
        if entry is not None and (problem := other_kernel(kernels.find(step.nodes, step.outputs), entry)):
            lines.append(f"~ {what}: {problem}")
    if not any(entry.target == target.name for entry in lock.entries):
        lines.append(f"nothing is locked for {target.name}")
    lines += [
        f"- {entry}: fuses so no more"
        for entry in lock.entries
        if entry.target == target.name and entry.work not in seen and not is_order(entry)
    ]
    known = any(entry.target == target.name and is_order(entry) for entry in lock.entries)
    if known and lock.entry(whole_work(compiled.program, cores), target.name) is None:
        lines.append(f"~ {WHOLE} on {target.name}: its steps are others, or connected otherwise")
    return lines


def _changes_of_file(lock: Lock, compiled: Compiled, own: Lock, builds: Builds) -> list[str]:
    """Return how the lock of a file differs from another one, and which of its plans no longer exist."""
    target, cores = compiled.target, compiled.options.tensor_cores
    old, new = (
        Lock({}, tuple(e for e in each.entries if e.target == target.name), each.origin) for each in (lock, own)
    )
    lines = differences(old, new)
    for step in cudnn_steps(compiled.program):
        entry = old.entry(work_of(step, compiled.graph, cores), target.name)
        if entry is not None and entry.choice is not None:
            what = f"{step.signature} {shapes_of(step)} on {target.name}"
            if problem := unoffered(step, entry.choice, target, cores, builds):
                lines.append(f"~ {what}: {problem}")
            elif is_unknown(step, entry.choice, target):
                lines.append(
                    f"? {what}: {plan_name(entry.choice)}: {library_of(entry.choice)} tells of it on the device alone"
                )
    return list(dict.fromkeys(lines))


def _identity(locked: LockedPart) -> object:
    return None if locked.choice is None else locked.choice.identity


def _runner(locked: LockedPart) -> str:
    if locked.choice is not None:
        return plan_name(locked.choice)
    return f"kernel {locked.kernel}" if locked.kernel else "joined with a kernel"


def _form(form: Sequence[Part]) -> str:
    """Describe how a step is split: `spelled zero_bias`, `a kernel`, `1 op as it is, then 2 ops a kernel`."""
    words = {"kernel": "a kernel", "ops": "op by op", "in place": "in place", "copy": "a copy"} | {
        order: order for order in ORDERS
    }
    said = [words.get(part.runs) or f"spelled {_words(part.spelling)}" for part in form]
    if len(form) == 1:
        return said[0]
    return ", then ".join(
        f"{part.nodes} {'op' if part.nodes == 1 else 'ops'} {w}" for part, w in zip(form, said, strict=True)
    )


def _words(spelling: Sequence[str]) -> str:
    return ", ".join(spelling) or "as it is"
