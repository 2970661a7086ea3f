"""`fusec.lock`: which spelling, engine and knobs run each partition on each target; text for version control.

A partition is known by what it computes (its work), not by its place or names: the same layer in another
model finds the same entry. The same lock gives the same plans anywhere.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fusec import __version__
from fusec.compiled import Compiled
from fusec.cudnn_graph import CudnnGraph
from fusec.errors import CheckError, FusecError, LoweringError, ModelError
from fusec.gpu import blobs, device
from fusec.gpu.deviceless import cudnn_version
from fusec.ir import Graph
from fusec.lower_cudnn import lower
from fusec.passes.partition import canonical_key
from fusec.plans import BLAS, Choice, Entry
from fusec.program import Kind, Partition, Program, body_of
from fusec.target import Target

FORMAT = 1
NAME = "fusec.lock"
_HEAD = "# Which cuDNN plan runs each partition. Written by `fusec lock`; `fusec lock diff` compares.\n"
_TABLE = re.compile(r"\s*\[\[\s*partition\s*\]\]")
_WORK = re.compile(r"[0-9a-f]{64}")
_MEASURED = ("time_us", "error")

Builds = Callable[[CudnnGraph, Choice], bool]  # whether cuDNN builds a plan that is not in its list


@dataclass(frozen=True)
class Locked:
    """One partition on one target. `name` and `shapes` are for people; `work` identifies it."""

    name: str
    work: str
    target: str
    shapes: str
    spelling: tuple[str, ...]
    choice: Choice

    def __str__(self) -> str:
        return f"{self.name} {self.shapes} on {self.target}"


@dataclass(frozen=True)
class Lock:
    """Entries in order of target, name and work; the versions they were chosen with; where it was read."""

    versions: Mapping[str, str]
    entries: tuple[Locked, ...]
    origin: str = field(default=NAME, compare=False)

    @cached_property
    def _by_work(self) -> dict[tuple[str, str], Locked]:
        return {(entry.work, entry.target): entry for entry in self.entries}

    def entry(self, work: str, target: str) -> Locked | None:
        """The entry of a partition (`work_of`) on a target."""
        return self._by_work.get((work, target))

    def choice(self, work: str, target: str) -> Choice | None:
        """The plan of a partition (`work_of`) on a target."""
        found = self.entry(work, target)
        return None if found is None else found.choice

    def require(
        self, program: Program, target: Target, tensor_cores: bool = True, builds: Builds | None = None
    ) -> None:
        """CheckError unless every cuDNN step has an entry, is spelled as there, and its plan is still to be had.

        `builds` is asked about plans that cuDNN did not list (default: it is let try, without a device).
        """
        try_ = builds or _tries(target)
        for step in cudnn_steps(program):
            if problem := self._problem(step, program.graph, target, tensor_cores, try_):
                what = f"{step.signature} {shapes_of(step)}"
                raise CheckError(
                    f"{self.origin}: {what} on {target.name}: {problem}; write a new lock with `fusec lock`"
                )

    def _problem(self, step: Partition, graph: Graph, target: Target, tensor_cores: bool, builds: Builds) -> str:
        entry = self.entry(work_of(step, graph, tensor_cores), target.name)
        if entry is None:
            return "has no entry"
        if entry.spelling != step.spelling:
            return f"is spelled {_words(entry.spelling)} there, {_words(step.spelling)} now"
        return _unoffered(step, entry.choice, target, tensor_cores, builds)

    def choices(self, compiled: Compiled) -> dict[str, list[Choice]]:
        """The plan of each cuDNN graph, by its key, of the steps that have an entry."""
        found: dict[str, list[Choice]] = {}
        for step, lowered in zip(compiled.program.steps, compiled.lowered, strict=True):
            if lowered is not None:
                work = work_of(step, compiled.graph, compiled.options.tensor_cores)
                if (choice := self.choice(work, compiled.target.name)) is not None:
                    found[lowered.graph.key] = [choice]
        return found


def cudnn_steps(program: Program) -> list[Partition]:
    """The steps that a lock decides."""
    return [step for step in program.steps if step.kind is Kind.CUDNN]


def work_of(step: Partition, graph: Graph, tensor_cores: bool = True) -> str:
    """What a step computes, as a digest: ops, attributes, types, wiring; no names, no weights, not its spelling."""
    body = body_of(graph, step.nodes) if step.spelling else step.body
    text = canonical_key(body) + ("" if tensor_cores else "\nno tensor cores")
    return hashlib.sha256(text.encode()).hexdigest()


def shapes_of(step: Partition) -> str:
    """Types read and written, for people: `f16[8,64,28,28]{0,2,3,1} -> f16[8,64,28,28]{0,2,3,1}`."""
    read, made = (", ".join(str(v.type) for v in values) for values in (step.inputs, step.outputs))
    return f"{read} -> {made}"


def make(compiled: Sequence[Compiled], plans: Mapping[tuple[str, str], Sequence[Entry]] | None = None) -> Lock:
    """The lock of a model on its targets: the first of `plans` (by target and key of the cuDNN graph), else
    the first plan that cuDNN built when it was asked, not measured."""
    entries: dict[tuple[str, str], Locked] = {}
    for c in compiled:
        for step, lowered in zip(c.program.steps, c.lowered, strict=True):
            if lowered is None or step.verdict is None:
                continue
            chosen = (plans or {}).get((c.target.name, lowered.graph.key))
            offered = step.verdict.plans
            choice = chosen[0].choice if chosen else Choice.of(next((p for p in offered if p.built), offered[0]))
            work = work_of(step, c.graph, c.options.tensor_cores)
            choice = replace(choice, complete=True)  # a lock leaves nothing to be tried
            entry = Locked(step.signature, work, c.target.name, shapes_of(step), step.spelling, choice)
            entries.setdefault((work, c.target.name), entry)
    return Lock(versions(), _sorted(entries.values()))


def _sorted(entries: Any) -> tuple[Locked, ...]:
    return tuple(sorted(entries, key=lambda e: (e.target, e.name, e.shapes, e.work)))


def versions() -> dict[str, str]:
    """Of fusec, cuDNN and its frontend here; empty where there is none."""
    try:
        frontend = importlib.metadata.version("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError:
        frontend = ""
    return {"fusec": __version__, "cudnn": cudnn_version(), "frontend": frontend}


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
        if entry.spelling != other.spelling:
            lines.append(f"~ {entry}: spelled {_words(entry.spelling)} -> {_words(other.spelling)}")
        if entry.choice.identity != other.choice.identity:
            lines.append(f"~ {entry}: {_plan(entry.choice)} -> {_plan(other.choice)}")
        elif entry.choice.workspace_bytes != other.choice.workspace_bytes:
            sizes = entry.choice.workspace_bytes, other.choice.workspace_bytes
            lines.append(f"~ {entry}: workspace {sizes[0]} -> {sizes[1]} bytes")
    known = {(entry.work, entry.target) for entry in old.entries}
    lines += [f"+ {e}: is in {new.origin} alone" for e in new.entries if (e.work, e.target) not in known]
    return lines


def changes(lock: Lock, compiled: Compiled, builds: Builds | None = None) -> list[str]:
    """What this machine's cuDNN would change of a lock, a line each: partitions that fuse otherwise,
    spellings, plans no longer offered. `builds` as for `Lock.require`."""
    target, cores = compiled.target, compiled.options.tensor_cores
    lines = [
        f"{name}: {lock.versions.get(name) or 'none'} -> {version or 'none'}"
        for name, version in versions().items()
        if lock.versions.get(name) != version
    ]
    try_ = builds or _tries(target)
    seen: set[str] = set()
    for step in cudnn_steps(compiled.program):
        work = work_of(step, compiled.graph, cores)
        if work in seen:
            continue
        seen.add(work)
        entry = lock.entry(work, target.name)
        what = f"{step.signature} {shapes_of(step)} on {target.name}"
        if entry is None:
            lines.append(f"+ {what}: fuses so now")
            continue
        if entry.spelling != step.spelling:
            lines.append(f"~ {what}: spelled {_words(entry.spelling)} -> {_words(step.spelling)}")
        elif problem := _unoffered(step, entry.choice, target, cores, try_):
            lines.append(f"~ {what}: {problem}")
        elif _unknown(step, entry.choice, target):
            who = "cuBLASLt" if entry.choice.engine == BLAS else "cuDNN"
            lines.append(f"? {what}: {_plan(entry.choice)}: {who} tells of it on the device alone")
    fused = {entry.name for entry in lock.entries if entry.target == target.name}
    if not fused:
        lines.append(f"nothing is locked for {target.name}")
    lines += [
        f"- {entry}: fuses so no more"
        for entry in lock.entries
        if entry.target == target.name and entry.work not in seen
    ]
    return lines


def _tries(target: Target) -> Builds:
    """Lets cuDNN try: devicelessly it leaves some plans out of its list that it builds when named."""
    return lambda graph, choice: blobs.can_build(graph, choice, target)


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


def _plan(choice: Choice) -> str:
    knobs = ", ".join(f"{k}={v}" for k, v in choice.knobs)
    return f"{choice.name}{f' with knobs {knobs}' if knobs else ''}"


def _words(spelling: Sequence[str]) -> str:
    return ", ".join(spelling) or "as it is"


# the file ------------------------------------------------------------------------------------------


def write(path: str | Path, lock: Lock) -> None:
    """Write a lock: equal locks as equal text, whole or not at all."""
    goal = Path(path).resolve()
    beside = goal.with_name(f".{goal.name}.{os.getpid()}.tmp")
    try:
        try:
            beside.write_text(text_of(lock), encoding="utf-8")
            beside.replace(goal)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise FusecError(f"{path}: cannot write: {error.strerror or error}") from error


def text_of(lock: Lock) -> str:
    """The lock as TOML, a table for each partition. Measured figures have four digits."""
    lines = [_HEAD, f"format = {FORMAT}"]
    lines += [f"{name} = {json.dumps(lock.versions[name])}" for name in sorted(lock.versions)]
    for entry in _sorted(lock.entries):
        choice = entry.choice
        lines += ["", "[[partition]]"]
        lines += [f"{key} = {json.dumps(getattr(entry, key))}" for key in ("name", "shapes", "target", "work")]
        lines.append(f"spelling = {json.dumps(list(entry.spelling))}")
        lines.append(f"engine = {choice.engine}")
        knobs = ", ".join(f"{k} = {v}" for k, v in choice.knobs)
        lines.append(f"knobs = {{ {knobs} }}" if knobs else "knobs = {}")
        lines.append(f"workspace_bytes = {choice.workspace_bytes}")
        for key in _MEASURED:
            figure = getattr(choice, key)
            if figure is not None:
                lines.append(f"{key} = {float(f'{figure:.4g}')!r}")
    return "\n".join(lines) + "\n"


def read(path: str | Path) -> Lock:
    """A lock from its file. ModelError naming file, line and reason."""
    try:
        return parse(Path(path).read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not a text file: {error}") from error


def parse(text: str, origin: str = NAME) -> Lock:
    """A lock from its text; `origin` names it in messages."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ModelError(f"{origin}: {error}") from error
    if data.get("format") != FORMAT:
        raise ModelError(f"{origin}: line 1: format is {data.get('format')!r}, this fusec reads {FORMAT}")
    made_with = {k: v for k, v in data.items() if k not in ("format", "partition")}
    tables = data.get("partition", [])
    if not isinstance(tables, list) or not all(isinstance(v, str) for v in made_with.values()):
        raise ModelError(f"{origin}: line 1: not a lock: versions are strings, `partition` an array of tables")
    numbers = [i for i, line in enumerate(text.split("\n"), 1) if _TABLE.match(line)]
    entries: list[Locked] = []
    seen: set[tuple[str, str]] = set()
    for place, table in enumerate(tables):
        where = (
            f"{origin}: line {numbers[place]}" if len(numbers) == len(tables) else f"{origin}: partition {place + 1}"
        )
        try:
            entry = _locked(table)
        except (KeyError, ValueError) as error:
            reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise ModelError(f"{where}: {reason}") from error
        if (entry.work, entry.target) in seen:
            raise ModelError(f"{where}: {entry.name} on {entry.target} is locked twice")
        seen.add((entry.work, entry.target))
        entries.append(entry)
    return Lock(made_with, _sorted(entries), origin)


_KEYS = ("name", "shapes", "target", "work", "spelling", "engine", "knobs", "workspace_bytes", *_MEASURED)


def _locked(table: Any) -> Locked:
    """One table as an entry; KeyError and ValueError say what is wrong."""
    if not isinstance(table, dict):
        raise ValueError("partition is no table")
    for key in table:
        if key not in _KEYS:
            raise ValueError(f"unknown key {key!r}")
    for key in ("name", "shapes", "target", "work"):
        if not isinstance(table[key], str):
            raise ValueError(f"{key} is {table[key]!r}, not a string")
    if not _WORK.fullmatch(table["work"]):
        raise ValueError(f"work is {table['work']!r}, not a SHA-256")
    spelling, knobs = table["spelling"], table["knobs"]
    if not isinstance(spelling, list) or not all(isinstance(name, str) for name in spelling):
        raise ValueError(f"spelling is {spelling!r}, not a list of names")
    if not isinstance(knobs, dict) or not all(k.isdecimal() and type(v) is int for k, v in knobs.items()):
        raise ValueError(f"knobs are {knobs!r}, not numbers by number")
    for key in ("engine", "workspace_bytes"):
        if type(table[key]) is not int or table[key] < 0:
            raise ValueError(f"{key} is {table[key]!r}, not a whole number")
    measured = [table.get(key) for key in _MEASURED]
    for key, figure in zip(_MEASURED, measured, strict=True):
        if figure is not None and (type(figure) not in (int, float) or not math.isfinite(figure) or figure < 0):
            raise ValueError(f"{key} is {figure!r}, not a number")
    time_us, error = (None if figure is None else float(figure) for figure in measured)
    pairs = tuple(sorted((int(k), v) for k, v in knobs.items()))
    choice = Choice(table["engine"], pairs, table["workspace_bytes"], time_us, error)
    return Locked(table["name"], table["work"], table["target"], table["shapes"], tuple(spelling), choice)
