"""Make a `fusec.lock`, and apply one. A lock names the candidate, plan or kernel that runs each step on each target.

A step is identified by a digest of what it computes, its `work`. Names and places do not matter, so the same layer in
another model has the same entry. With one lock, all machines make the same choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fusec.errors import CheckError, LoweringError
from fusec.execution.compilation import Compiled
from fusec.gpu import kernels
from fusec.gpu.autotune.step_choices import TunedChoices, apply_choices, before_choices, step_key
from fusec.gpu.autotune.steps.concat_choice import concat_choices, concats_in_place, copy_concats
from fusec.lockfile.entries import (
    WHOLE,
    Builds,
    cudnn_parts,
    digest_of,
    interface_of,
    is_order,
    other_kernel,
    shapes_of,
    steps_with_candidates,
    tries,
    unoffered,
    versions,
    whole_work,
    work_of,
)
from fusec.lockfile.precision import other_precision
from fusec.lower_cudnn import lower
from fusec.plans.lock_record import FORMAT, Lock, Locked, LockedPart, in_order
from fusec.plans.plan_record import ORDERS, Choice, Entry, Part
from fusec.schedule.program import Kind, Partition, Program
from fusec.system.dataclass import dataclass
from fusec.targets.target import Target

_REMEDY = "write a new lock with `fusec lock`"

Plans = Mapping[tuple[str, str], Sequence[Entry]]  # by target and key of the cuDNN graph, best first


def make(compiled: Sequence[Compiled], plans: Plans | None = None) -> Lock:
    """Make the lock of a model from its choices on each target; without tuning, from what a device would run.

    plans: the plans to lock; for other graphs the lock names the first plan that cuDNN built when it was asked.
    """
    entries: dict[tuple[str, str], Locked] = {}
    for c in compiled:
        c.require_answers(f"a lock for {c.target.name}")
        if isinstance(c.tuned, Lock):
            found = [entry for entry in c.tuned.entries if entry.target == c.target.name]
        else:
            ready = with_choices(c)
            assert isinstance(ready.tuned, TunedChoices)
            found = _entries(ready, ready.tuned, plans or {})
        for entry in found:
            entries.setdefault((entry.work, entry.target), entry)
    return Lock(versions(), in_order(list(entries.values())))


def with_choices(compiled: Compiled) -> Compiled:
    """Return a program with the choices of a device that tunes nothing; a program that has choices is unchanged."""
    if compiled.tuned is not None:
        return compiled
    concats = concat_choices(concats_in_place(compiled.program), compiled.program)
    program = apply_choices(compiled.program, {}, compiled.figures, compiled.options.as_source)
    return replace(compiled, program=program, tuned=TunedChoices(compiled.program, {}, {}, concats))


def _entries(c: Compiled, tuned: TunedChoices, plans: Plans) -> Iterator[Locked]:
    """Yield the entries of the concats, the kernels that run, the steps with candidates, and the whole program."""
    cores, target = c.options.tensor_cores, c.target.name

    def entry(step: Partition, parts: tuple[LockedPart, ...]) -> Locked:
        return Locked(step.signature, work_of(step, c.graph, cores), target, shapes_of(step), parts)

    for work, each in tuned.concats.items():
        part = LockedPart(Part(0, "in place" if each.in_place else "copy"))
        yield Locked("concat", digest_of(work, True), target, each.shapes, (part,))
    for step in c.program.steps:
        if step.kind is Kind.KERNEL:
            kernel = kernels.find(step.nodes, step.outputs, c.figures)
            key = "" if kernel is None else tuned.variants.get(kernel.key, kernel.key)
            yield entry(step, (LockedPart(Part(0, "ops" if kernel is None else "kernel"), None, key),))
    for step in steps_with_candidates(before_choices(tuned.partitioned, c.figures, c.options.as_source)):
        split = tuned.steps.get(step_key(c.graph, step), (Part(0, step.kind.value, step.spelling),))
        split = (replace(split[0], nodes=0),) if len(split) == 1 else split
        choices = _choices(step, c, split, plans)
        yield entry(step, tuple(LockedPart(part, choices.get(place)) for place, part in enumerate(split)))
    order = LockedPart(Part(0, ORDERS[tuned.side_by_side]))
    yield Locked(WHOLE, whole_work(tuned.partitioned, cores), target, interface_of(c.graph), (order,))


def _choices(step: Partition, c: Compiled, split: Sequence[Part], plans: Plans) -> dict[int, Choice]:
    """Return the known plans of the parts that cuDNN runs, by the number of the part."""
    found: dict[int, Choice] = {}
    for place, part in cudnn_parts(c.graph, step, split, c.figures):
        chosen = plans.get((c.target.name, lower(part.body, c.options.tensor_cores).graph.key))
        offered = () if part.verdict is None else part.verdict.plans
        if chosen:
            choice = chosen[0].choice
        elif offered:
            choice = Choice.of(next((p for p in offered if p.built), offered[0]))
        else:
            continue
        found[place] = replace(choice, complete=True)  # no further plan is timed for a locked step
    return found


@dataclass(frozen=True, eq=False)
class LockedProgram:
    """A program with the choices of a lock.

    choices: plans by key of the cuDNN graph.
    variants: for the key of a kernel, the key of the variant to run.
    """

    compiled: Compiled
    choices: Mapping[str, Choice]
    variants: Mapping[str, str]
    side_by_side: bool = False


def apply(lock: Lock, compiled: Compiled, builds: Builds | None = None) -> LockedProgram:
    """Give a program the choices of a lock. Layouts change where the lock copies the operands of a concat.

    builds: tells if cuDNN builds a plan that it did not list (default: let cuDNN try, without a device).
    Raises CheckError unless the lock has a fitting entry for each step, and its plans and kernels still exist.
    """
    target, cores, as_source = compiled.target, compiled.options.tensor_cores, compiled.options.as_source
    compiled.require_answers(f"{lock.origin}: keeping to a lock for {target.name}")
    builds = builds or tries(target, compiled.options.plan_filter)
    if other := other_precision(lock, compiled):
        raise CheckError(f"{lock.origin}: {other}")
    splits: dict[str, tuple[Part, ...]] = {}
    choices: dict[str, Choice] = {}
    used: dict[str, Locked] = {}
    compiled = _apply_to_concats(lock, compiled, used)
    for step in steps_with_candidates(before_choices(compiled.program, compiled.figures, as_source)):
        entry = _required(lock, step, compiled)
        used[entry.work] = entry
        splits[step_key(compiled.graph, step)] = entry.split
        try:
            for place, part in cudnn_parts(compiled.graph, step, entry.split, compiled.figures):
                if (choice := entry.parts[place].choice) is not None:
                    if problem := unoffered(part, choice, target, compiled.options, builds):
                        raise _broken(lock, step, target, problem)
                    choices[lower(part.body, cores).graph.key] = choice
        except (ValueError, StopIteration, LoweringError) as error:
            raise _broken(lock, step, target, str(error)) from error
    try:
        program = apply_choices(compiled.program, splits, compiled.figures, as_source)
    except ValueError as error:
        raise CheckError(f"{lock.origin}: {error}; {_REMEDY}") from error
    kernel_variants: dict[str, str] = {}
    for step in program.steps:
        if step.kind is Kind.KERNEL:
            entry = _required(lock, step, compiled)
            used[entry.work] = entry
            kernel = kernels.find(step.nodes, step.outputs, compiled.figures)
            if problem := other_kernel(kernel, entry):
                raise _broken(lock, step, target, problem)
            if kernel is not None:
                kernel_variants[kernel.key] = entry.parts[0].kernel
        elif step.kind is Kind.CUDNN and lower(step.body, cores).graph.key not in choices:
            raise _broken(lock, step, target, "has no plan")
    order = _order(lock, compiled)
    used[order.work] = order
    tuned = replace(lock, entries=in_order(list(used.values())), format=FORMAT)
    parallel = order.split[0].runs == ORDERS[True]
    return LockedProgram(replace(compiled, program=program, tuned=tuned), choices, kernel_variants, parallel)


def _apply_to_concats(lock: Lock, compiled: Compiled, used: dict[str, Locked]) -> Compiled:
    """Copy the operands of concats that the lock does not run in place; add the entries of all concats to `used`."""
    copies: set[str] = set()
    for work, concat in concat_choices(concats_in_place(compiled.program), compiled.program).items():
        entry = lock.entry(digest_of(work, True), compiled.target.name)
        if entry is None:
            what = f"concat {concat.shapes} on {compiled.target.name}"
            raise CheckError(f"{lock.origin}: {what}: has no entry; {_REMEDY}")
        used[entry.work] = entry
        if entry.split[0].runs == "copy":
            copies.add(work)
    return replace(compiled, program=copy_concats(compiled.program, copies))


def _order(lock: Lock, partitioned: Compiled) -> Locked:
    """Return the entry of the whole program; steps run in order if the lock's format has no such entry."""
    target, interface = partitioned.target.name, interface_of(partitioned.graph)
    own = partitioned.tuned.entries if isinstance(partitioned.tuned, Lock) else ()  # of the `.fusec` file it is from
    known = (entry.work for entry in own if entry.target == target and is_order(entry))
    work = next(known, "") or whole_work(partitioned.program, partitioned.options.tensor_cores)
    entry = lock.entry(work, target)
    if entry is None and lock.format >= FORMAT:
        what = f"{WHOLE} {interface} on {target}"
        raise CheckError(f"{lock.origin}: {what}: nothing says whether its steps run side by side; {_REMEDY}")
    return entry or Locked(WHOLE, work, target, interface, (LockedPart(Part(0, ORDERS[False])),))


def side_by_side(lock: Lock, target: Target) -> bool:
    """Tell if the lock of one model runs its steps side by side on a target."""
    return any(entry.target == target.name and entry.split[0].runs == ORDERS[True] for entry in lock.entries)


def variants(lock: Lock, program: Program, target: Target, tensor_cores: bool = True) -> dict[str, str]:
    """Return the key of the variant that a lock names for each kernel of a program, by the key of the kernel."""
    found: dict[str, str] = {}
    figures = kernels.GpuFigures.of(target)
    for step in program.steps:
        kernel = kernels.find(step.nodes, step.outputs, figures) if step.kind is Kind.KERNEL else None
        if kernel is not None and kernel.others:
            entry = lock.entry(work_of(step, program.graph, tensor_cores), target.name)
            if entry is not None and entry.parts[0].kernel:
                found[kernel.key] = entry.parts[0].kernel
    return found


def _required(lock: Lock, step: Partition, compiled: Compiled) -> Locked:
    work = work_of(step, compiled.graph, compiled.options.tensor_cores)
    entry = lock.entry(work, compiled.target.name)
    if entry is None:
        raise _broken(lock, step, compiled.target, "has no entry")
    return entry


def _broken(lock: Lock, step: Partition, target: Target, problem: str) -> CheckError:
    what = f"{step.signature} {shapes_of(step)}"
    return CheckError(f"{lock.origin}: {what} on {target.name}: {problem}; {_REMEDY}")
