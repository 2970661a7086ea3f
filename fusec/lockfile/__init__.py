"""Lock what tuning chose for a model, so that each later compilation makes the same program."""

from __future__ import annotations

from fusec.lockfile.entries import WHOLE, cudnn_steps, versions, work_of
from fusec.lockfile.lock_program import LockedProgram, Plans, apply, make, side_by_side, variants, with_choices
from fusec.lockfile.toml_text import parse, read, text_of, write
from fusec.plans.lock_record import NAME, Lock, Locked, LockedPart, in_order

__all__ = [
    "NAME",
    "WHOLE",
    "Lock",
    "Locked",
    "LockedPart",
    "LockedProgram",
    "Plans",
    "apply",
    "cudnn_steps",
    "in_order",
    "make",
    "parse",
    "read",
    "side_by_side",
    "text_of",
    "variants",
    "versions",
    "with_choices",
    "work_of",
    "write",
]
