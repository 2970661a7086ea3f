"""Tell if a lock was written for another precision than a program has, so that no step of it can fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from fusec.execution.compilation import Compiled
from fusec.ir import DType
from fusec.lockfile.entries import WHOLE, cudnn_steps, shapes_of, work_of
from fusec.plans.lock_record import Lock
from fusec.schedule.program import Kind

_FLOAT = re.compile(r"\b(bf16|f16|f32|f64)\[")
_OPTIONS = {"f16": "fp16", "bf16": "bf16", "f32": "fp32 or tf32"}


def other_precision(lock: Lock, compiled: Compiled) -> str:
    """Return one line if a lock is for another precision than a program; else an empty text.

    A lock does not name its precision. Its steps tell: no cuDNN step of the program is in it, and its float type is
    another; or the steps are in it as those of tf32, and the program is compiled for fp32, or the other way round.
    """
    target, cores = compiled.target.name, compiled.options.tensor_cores
    steps = cudnn_steps(compiled.program)
    if not steps or any(lock.entry(work_of(step, compiled.graph, cores), target) for step in steps):
        return ""
    if any(lock.entry(work_of(step, compiled.graph, not cores), target) for step in steps):
        written = "fp32" if cores else "tf32"
        return _line(written, compiled.options.precision, f"--precision {written}")
    kernels = (step for step in compiled.program.steps if step.kind is not Kind.VIEW)
    ours = _main_float(map(shapes_of, kernels))
    if (given := compiled.options.storage) is not DType.F32:  # a small program may be one step, between values in fp32
        ours = given.value
    return _differs(_float_of(lock, target), ours, compiled.options.precision)


def locks_differ(old: Lock, new: Lock) -> str:
    """Return one line if two locks share no step and are for different precisions; else an empty text."""
    works = {(entry.work, entry.target) for entry in old.entries}
    if any((entry.work, entry.target) in works for entry in new.entries):
        return ""
    for target in dict.fromkeys(entry.target for entry in old.entries if _float_of(new, entry.target)):
        if _named(old, target) == _named(new, target) and old.versions.get("fusec") == new.versions.get("fusec"):
            return "precision: the locks have the same steps, but one was written for fp32 and the other for tf32"
        theirs = _float_of(new, target)
        option = _OPTIONS.get(theirs, theirs)
        if line := _differs(_float_of(old, target), theirs, f"for {option} ({new.origin})"):
            return line
    return ""


def _differs(locked: str, other: str, what: str) -> str:
    if not locked or not other or locked == other:
        return ""
    written = _OPTIONS.get(locked, locked)
    return _line(written, what, f"--precision {written}")


def _line(written: str, here: str, option: str) -> str:
    return f"precision: the lock was written for {written}, the other side is {here}; to compare them, use {option}"


def _named(lock: Lock, target: str) -> Counter[tuple[str, str]]:
    return Counter((entry.name, entry.shapes) for entry in lock.entries if entry.target == target)


def _float_of(lock: Lock, target: str) -> str:
    return _main_float(e.shapes for e in lock.entries if e.target == target and e.name != WHOLE)


def _main_float(shapes: Iterable[str]) -> str:
    """Return the float type that a program computes in; empty if there is none.

    A 16-bit type counts before fp32: a program in 16 bits has fp32, too, at its inputs and outputs.
    """
    found = Counter(name for text in shapes for name in _FLOAT.findall(text))
    narrow = Counter({name: count for name, count in found.items() if name in ("f16", "bf16")})
    most = (narrow or found).most_common(1)
    return most[0][0] if most else ""
