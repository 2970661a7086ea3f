"""`fusec.lock`: in which form each step runs on each target, and by which plan or kernel: made, kept to, compared.

A step is known by what it computes (its work), not by its place or names: the same layer in another
model finds the same entry. The same lock gives the same forms and plans anywhere.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusec import __version__
from fusec.compiled import Compiled
from fusec.cudnn_graph import CudnnGraph
from fusec.errors import CheckError, LoweringError
from fusec.gpu import blobs, device, kernels
from fusec.gpu.deviceless import cudnn_version
from fusec.gpu.forms import Decided, arrange, canonical_of, has_forms, parts_of
from fusec.gpu.joins import copied, families, placed
from fusec.gpu.kernels import Kernel
from fusec.gpu.kernels.group import grouped
from fusec.ir import Graph
from fusec.lock_text import parse, read, text_of, write
from fusec.locked import FORMAT, NAME, Lock, Locked, LockedPart, in_order
from fusec.lower_cudnn import lower
from fusec.plans import BLAS, ORDERS, Choice, Entry, Part
from fusec.program import Kind, Partition, Program
from fusec.target import Target

__all__ = ["NAME", "Lock", "Locked", "LockedPart", "in_order", "parse", "read", "text_of", "write"]

WHOLE = "model"  # the name of the entry for all steps
_ANEW = "write a new lock with `fusec lock`"

Builds = Callable[[CudnnGraph, Choice], bool]  # whether cuDNN builds a plan
Plans = Mapping[tuple[str, str], Sequence[Entry]]  # by target and key of the cuDNN graph, best first


def work_of(step: Partition, graph: Graph, tensor_cores: bool = True) -> str:
    """What a step computes, as a digest: ops, attributes, types, wiring; no names, no weights, not its form."""
    return _digest(canonical_of(graph, step), tensor_cores)


def _digest(work: str, tensor_cores: bool) -> str:
    return hashlib.sha256((work + ("" if tensor_cores else "\nno tensor cores")).encode()).hexdigest()


def shapes_of(step: Partition) -> str:
    """Types read and written, for people: `f16[8,64,28,28]{0,2,3,1} -> f16[8,64,28,28]{0,2,3,1}`."""
    read, made = (", ".join(str(v.type) for v in values) for values in (step.inputs, step.outputs))
    return f"{read} -> {made}"


def formed_steps(program: Program) -> list[Partition]:
    """The steps that can take other forms."""
    return [step for step in program.steps if has_forms(step)]


def cudnn_steps(program: Program) -> list[Partition]:
    """The steps that cuDNN runs."""
    return [step for step in program.steps if step.kind is Kind.CUDNN]


def versions() -> dict[str, str]:
    """Of fusec, cuDNN and its frontend here; empty where there is none."""
    try:
        frontend = importlib.metadata.version("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError:
        frontend = ""
    return {"fusec": __version__, "cudnn": cudnn_version(), "frontend": frontend}


# making --------------------------------------------------------------------------------------------


def make(compiled: Sequence[Compiled], plans: Plans | None = None) -> Lock:
    """The lock of a model on its targets: what was decided of each; else what would run without measuring. Plans are
    the first of `plans`, else the first that cuDNN built when it was asked."""
    entries: dict[tuple[str, str], Locked] = {}
    for c in compiled:
        if isinstance(c.decided, Lock):
            found = [entry for entry in c.decided.entries if entry.target == c.target.name]
        else:
            ready = as_it_runs(c)
            assert isinstance(ready.decided, Decided)
            found = _entries(ready, ready.decided, plans or {})
        for entry in found:
            entries.setdefault((entry.work, entry.target), entry)
    return Lock(versions(), in_order(list(entries.values())))


def as_it_runs(c: Compiled) -> Compiled:
    """With the program a device would run, if it measured nothing; as it is, if something was decided."""
    if c.decided is not None:
        return c
    concats = placed(families(c.program), c.program)
    program = arrange(c.program, {}, c.options.as_source)
    return replace(c, program=program, decided=Decided(c.program, {}, {}, concats))


def _entries(c: Compiled, decided: Decided, plans: Plans) -> Iterator[Locked]:
    """Of the kernels as they run, then of cuDNN's steps as partitioned."""
    cores, target = c.options.tensor_cores, c.target.name

    def entry(step: Partition, parts: tuple[LockedPart, ...]) -> Locked:
        return Locked(step.signature, work_of(step, c.graph, cores), target, shapes_of(step), parts)

    for work, each in decided.concats.items():
        part = LockedPart(Part(0, "in place" if each.in_place else "copy"))
        yield Locked("concat", _digest(work, True), target, each.shapes, (part,))
    for step in c.program.steps:
        if step.kind is Kind.KERNEL:
            kernel = kernels.find(step.nodes, step.outputs)
            key = "" if kernel is None else decided.ways.get(kernel.key, kernel.key)
            yield entry(step, (LockedPart(Part(0, "ops" if kernel is None else "kernel"), None, key),))
    for step in formed_steps(_first(decided.partitioned, c.options.as_source)):
        form = decided.forms.get(canonical_of(c.graph, step), (Part(0, step.kind.value, step.spelling),))
        form = (replace(form[0], nodes=0),) if len(form) == 1 else form
        choices = _choices(step, c, form, plans)
        yield entry(step, tuple(LockedPart(part, choices.get(place)) for place, part in enumerate(form)))
    order = LockedPart(Part(0, ORDERS[decided.side_by_side]))
    yield Locked(WHOLE, whole_work(decided.partitioned, cores), target, _interface(c.graph), (order,))


def whole_work(program: Program, tensor_cores: bool = True) -> str:
    """What all steps compute, as they were partitioned, and how they are connected, as a digest."""
    number: dict[str, int] = {}
    lines: list[str] = []
    for step in program.steps:
        places = [number.setdefault(v.name, len(number)) for v in (*step.inputs, *step.outputs)]
        lines += [canonical_of(program.graph, step), str(places)]
    return _digest("\n".join(lines), tensor_cores)


def _interface(graph: Graph) -> str:
    given, made = (", ".join(str(v.type) for v in values) for values in (graph.inputs, graph.outputs))
    return f"{given} -> {made}"


def _first(program: Program, as_source: bool) -> Program:
    """The program whose steps are given forms: see `forms.arrange`."""
    return program if as_source else grouped(program, products=True)


def _choices(step: Partition, c: Compiled, form: Sequence[Part], plans: Plans) -> dict[int, Choice]:
    """The plans of the parts that cuDNN runs, by their places, as far as they are known."""
    found: dict[int, Choice] = {}
    for place, part in _cudnn_parts(c.graph, step, form):
        chosen = plans.get((c.target.name, lower(part.body, c.options.tensor_cores).graph.key))
        offered = () if part.verdict is None else part.verdict.plans
        if chosen:
            choice = chosen[0].choice
        elif offered:
            choice = Choice.of(next((p for p in offered if p.built), offered[0]))
        else:
            continue
        found[place] = replace(choice, complete=True)  # a lock leaves nothing to be tried
    return found


def _cudnn_parts(graph: Graph, step: Partition, form: Sequence[Part]) -> list[tuple[int, Partition]]:
    """The steps of a form that cuDNN runs, each with the place of its part. ValueError if the form does not fit."""
    made = iter(parts_of(graph, step, tuple(form)))
    found: list[tuple[int, Partition]] = []
    for place, part in enumerate(form):
        if part.runs == "cudnn":
            found.append((place, next(made)))
        elif part.runs == "kernel":
            next(made)
        else:  # each op by itself
            for _ in range(part.nodes):
                next(made)
    return found


# keeping to it -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Kept:
    """A program as a lock has it: its plans by key of the cuDNN graph, for the key of a kernel, that of the one to take
    of those that do the same, and whether steps run side by side."""

    compiled: Compiled
    choices: Mapping[str, Choice]
    ways: Mapping[str, str]
    side_by_side: bool = False


def apply(lock: Lock, compiled: Compiled, builds: Builds | None = None) -> Kept:
    """The program with every step in the form that the lock names. Where concats are copies there, types of its graph
    change.

    CheckError unless it has an entry for each, which fits, and its plans and kernels are still to be had. `builds` is
    asked about plans that cuDNN did not list (default: it is let try, without a device).
    """
    target, cores, as_source = compiled.target, compiled.options.tensor_cores, compiled.options.as_source
    try_ = builds or _tries(target)
    forms: dict[str, tuple[Part, ...]] = {}
    choices: dict[str, Choice] = {}
    used: dict[str, Locked] = {}
    copies: set[str] = set()
    for work, each in placed(families(compiled.program), compiled.program).items():
        entry = lock.entry(_digest(work, True), target.name)
        if entry is None:
            raise CheckError(f"{lock.origin}: concat {each.shapes} on {target.name}: has no entry; {_ANEW}")
        used[entry.work] = entry
        copies |= {work} if entry.form[0].runs == "copy" else set[str]()
    compiled = replace(compiled, program=copied(compiled.program, copies))
    for step in formed_steps(_first(compiled.program, as_source)):
        entry = _required(lock, step, compiled)
        used[entry.work] = entry
        forms[canonical_of(compiled.graph, step)] = entry.form
        try:
            for place, part in _cudnn_parts(compiled.graph, step, entry.form):
                if (choice := entry.parts[place].choice) is not None:
                    if problem := _unoffered(part, choice, target, cores, try_):
                        raise _broken(lock, step, target, problem)
                    choices[lower(part.body, cores).graph.key] = choice
        except (ValueError, StopIteration, LoweringError) as error:
            raise _broken(lock, step, target, str(error)) from error
    try:
        program = arrange(compiled.program, forms, as_source)
    except ValueError as error:
        raise CheckError(f"{lock.origin}: {error}; {_ANEW}") from error
    ways: dict[str, str] = {}
    for step in program.steps:
        if step.kind is Kind.KERNEL:
            entry = _required(lock, step, compiled)
            used[entry.work] = entry
            kernel = kernels.find(step.nodes, step.outputs)
            if problem := _other_kernel(kernel, entry):
                raise _broken(lock, step, target, problem)
            if kernel is not None:
                ways[kernel.key] = entry.parts[0].kernel
        elif step.kind is Kind.CUDNN and lower(step.body, cores).graph.key not in choices:
            raise _broken(lock, step, target, "has no plan")
    order = _order(lock, compiled)
    used[order.work] = order
    decided = replace(lock, entries=in_order(list(used.values())), format=FORMAT)
    beside = order.form[0].runs == ORDERS[True]
    return Kept(replace(compiled, program=program, decided=decided), choices, ways, beside)


def _order(lock: Lock, partitioned: Compiled) -> Locked:
    """The entry for all steps; in order where the lock's format knew nothing else."""
    target, interface = partitioned.target.name, _interface(partitioned.graph)
    own = partitioned.decided.entries if isinstance(partitioned.decided, Lock) else ()  # of a file
    known = (entry.work for entry in own if entry.target == target and _is_order(entry))
    work = next(known, "") or whole_work(partitioned.program, partitioned.options.tensor_cores)
    entry = lock.entry(work, target)
    if entry is None and lock.format >= FORMAT:
        what = f"{WHOLE} {interface} on {target}"
        raise CheckError(f"{lock.origin}: {what}: nothing says whether its steps run side by side; {_ANEW}")
    return entry or Locked(WHOLE, work, target, interface, (LockedPart(Part(0, ORDERS[False])),))


def side_by_side(lock: Lock, target: Target) -> bool:
    """Whether the lock of one model, as a file holds it, says that its steps run side by side on a target."""
    return any(entry.target == target.name and entry.form[0].runs == ORDERS[True] for entry in lock.entries)


def ways(lock: Lock, program: Program, target: Target, tensor_cores: bool = True) -> dict[str, str]:
    """For the kernels of a program that can be had in several ways, by their keys: the key of the one a lock names."""
    found: dict[str, str] = {}
    for step in program.steps:
        kernel = kernels.find(step.nodes, step.outputs) if step.kind is Kind.KERNEL else None
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
    return CheckError(f"{lock.origin}: {what} on {target.name}: {problem}; {_ANEW}")


def _other_kernel(kernel: Kernel | None, entry: Locked) -> str:
    """Why a kernel is not the one of an entry; empty if it is, or can be."""
    named = entry.parts[0].kernel
    if kernel is None:
        return f"no kernel runs it any more, {named} did" if named else ""
    if not named:
        return f"kernel {kernel.key} runs it now, none did"
    if named in (kernel.key, *(other.key for other in kernel.others)):
        return ""
    return f"kernel {named} is not what fusec makes now, {kernel.key} is"


# comparing -----------------------------------------------------------------------------------------


def differences(old: Lock, new: Lock) -> list[str]:
    """What another lock says otherwise, a line each; measured figures are no difference."""
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
    """What this machine's cuDNN and fusec would change of a lock, a line each: steps that fuse otherwise, spellings
    that were not measured, plans and kernels no longer to be had. `builds` as for `apply`."""
    target, cores, as_source = compiled.target, compiled.options.tensor_cores, compiled.options.as_source
    lines = [
        f"{name}: {lock.versions.get(name) or 'none'} -> {version or 'none'}"
        for name, version in versions().items()
        if lock.versions.get(name) != version
    ]
    try_ = builds or _tries(target)
    if isinstance(compiled.decided, Lock):  # of a file, whose program has its forms already
        return lines + _changes_of_file(lock, compiled, compiled.decided, try_)
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
    for work, each in placed(families(compiled.program), compiled.program).items():
        entry = lock.entry(_digest(work, True), target.name)
        seen.add(_digest(work, True))
        if entry is None:
            lines.append(f"+ concat {each.shapes} on {target.name}: is in place now")
        elif entry.form[0].runs == "copy":
            copies.add(work)
    compiled = replace(compiled, program=copied(compiled.program, copies))
    for step in formed_steps(_first(compiled.program, as_source)):
        entry, what = looked_up(step)
        if entry is None:
            continue
        try:
            parts = _cudnn_parts(compiled.graph, step, entry.form)
        except (ValueError, StopIteration) as error:
            lines.append(f"~ {what}: {error}")
            continue
        forms[canonical_of(compiled.graph, step)] = entry.form
        unmeasured = entry.choice is not None and entry.choice.time_us is None
        spelling = next((part.spelling for part in entry.form), ())
        if unmeasured and spelling != step.spelling:
            lines.append(f"~ {what}: spelled {_words(spelling)} -> {_words(step.spelling)}")
            continue
        for place, part in parts:
            choice = entry.parts[place].choice
            if choice is not None and (problem := _unoffered(part, choice, target, cores, try_)):
                lines.append(f"~ {what}: {problem}")
            elif choice is not None and _unknown(part, choice, target):
                lines.append(f"? {what}: {_plan(choice)}: {_library(choice)} tells of it on the device alone")
    for step in arrange(compiled.program, forms, as_source).steps:
        entry, what = looked_up(step) if step.kind is Kind.KERNEL else (None, "")
        if entry is not None and (problem := _other_kernel(kernels.find(step.nodes, step.outputs), entry)):
            lines.append(f"~ {what}: {problem}")
    if not any(entry.target == target.name for entry in lock.entries):
        lines.append(f"nothing is locked for {target.name}")
    lines += [
        f"- {entry}: fuses so no more"
        for entry in lock.entries
        if entry.target == target.name and entry.work not in seen and not _is_order(entry)
    ]
    known = any(entry.target == target.name and _is_order(entry) for entry in lock.entries)
    if known and lock.entry(whole_work(compiled.program, cores), target.name) is None:
        lines.append(f"~ {WHOLE} on {target.name}: its steps are others, or connected otherwise")
    return lines


def _is_order(entry: Locked) -> bool:
    return entry.form[0].runs in ORDERS


def _changes_of_file(lock: Lock, compiled: Compiled, own: Lock, builds: Builds) -> list[str]:
    """Where the lock of a file differs from another one, and which of its plans are no longer to be had."""
    target, cores = compiled.target, compiled.options.tensor_cores
    old, new = (
        Lock({}, tuple(e for e in each.entries if e.target == target.name), each.origin) for each in (lock, own)
    )
    lines = differences(old, new)
    for step in cudnn_steps(compiled.program):
        entry = old.entry(work_of(step, compiled.graph, cores), target.name)
        if entry is not None and entry.choice is not None:
            what = f"{step.signature} {shapes_of(step)} on {target.name}"
            if problem := _unoffered(step, entry.choice, target, cores, builds):
                lines.append(f"~ {what}: {problem}")
            elif _unknown(step, entry.choice, target):
                lines.append(
                    f"? {what}: {_plan(entry.choice)}: {_library(entry.choice)} tells of it on the device alone"
                )
    return list(dict.fromkeys(lines))


def _tries(target: Target) -> Builds:
    """Lets cuDNN try: devicelessly it leaves some plans out of its list that it builds when named."""
    return blobs.Tries(target)


def _unknown(step: Partition, choice: Choice, target: Target) -> bool:
    """Whether only the device can say if a plan is to be had."""
    if choice.engine == BLAS:  # it is looked for when the plan is built
        return True
    listed = step.verdict is not None and any((p.engine, p.knobs) == choice.identity for p in step.verdict.plans)
    return not listed and choice.engine in blobs.DEVICE_ONLY and not device.is_present(target)


def _unoffered(step: Partition, choice: Choice, target: Target, tensor_cores: bool, builds: Builds) -> str:
    """Why a plan is not to be had; empty if it is, or if only the device can say."""
    offered = step.verdict.plans if step.verdict is not None else ()
    if any((plan.engine, plan.knobs) == choice.identity for plan in offered) or _unknown(step, choice, target):
        return ""
    try:
        if builds(lower(step.body, tensor_cores).graph, choice):
            return ""
    except LoweringError as error:
        return str(error)
    others = any(plan.engine == choice.engine for plan in offered)
    return f"{_plan(choice)} is no longer offered{', the engine with other knobs is' if others else ''}"


def _identity(locked: LockedPart) -> object:
    return None if locked.choice is None else locked.choice.identity


def _runner(locked: LockedPart) -> str:
    if locked.choice is not None:
        return _plan(locked.choice)
    return f"kernel {locked.kernel}" if locked.kernel else "joined with a kernel"


def _library(choice: Choice) -> str:
    return "cuBLASLt" if choice.engine == BLAS else "cuDNN"


def _plan(choice: Choice) -> str:
    knobs = ", ".join(f"{k}={v}" for k, v in choice.knobs)
    return f"{choice.name}{f' with knobs {knobs}' if knobs else ''}"


def _form(form: Sequence[Part]) -> str:
    """A form in words: `spelled zero_bias`, `a kernel`, `1 op as it is, then 2 ops a kernel`."""
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
