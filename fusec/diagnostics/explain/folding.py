"""Fold what repeats in a program: equal layers are shown once, with their number."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

from fusec.system.dataclass import dataclass

LONGEST = 256  # steps of a layer; longer layers are not searched for
SAVES = 2  # lines that a fold must save at least


@dataclass(frozen=True)
class Fold:
    """`times` runs of `length` steps each, from the step `start` on; one step that does not repeat is a fold, too."""

    start: int
    length: int
    times: int

    @property
    def saved(self) -> int:
        """Count the steps that are not shown."""
        return self.length * (self.times - 1)


def folds(keys: Sequence[Hashable]) -> list[Fold]:
    """Split a sequence into runs that repeat and single elements, in order. Equal keys stand for equal steps.

    Runs that save most are taken first, the shortest of those, so that a layer is not shown twice.
    """
    ids = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    numbers = [ids[key] for key in keys]
    found = sorted(_repeats(numbers), key=lambda fold: (-fold.saved, fold.length, fold.start))
    taken: list[Fold] = []
    free = [True] * len(numbers)
    for fold in found:
        for part in _free_parts(fold, free):
            taken.append(part)
            free[part.start : part.start + part.length * part.times] = [False] * (part.length * part.times)
    singles = (Fold(place, 1, 1) for place, is_free in enumerate(free) if is_free)
    return sorted((*taken, *singles), key=lambda fold: fold.start)


def _repeats(numbers: Sequence[int]) -> list[Fold]:
    """List the longest repetitions for each length of a run."""
    found: list[Fold] = []
    for length in range(1, min(LONGEST, len(numbers) // 2) + 1):
        equal = 0  # steps in a row that equal those a run further on
        for place in range(len(numbers) - length, -1, -1):
            same = place + length < len(numbers) and numbers[place] == numbers[place + length]
            equal = equal + 1 if same else 0
            starts_here = place == 0 or numbers[place - 1] != numbers[place - 1 + length]
            fold = Fold(place, length, equal // length + 1)
            if starts_here and fold.times > 1 and fold.saved >= SAVES:
                found.append(fold)
    return found


def _free_parts(fold: Fold, free: Sequence[bool]) -> list[Fold]:
    """Return the part of a repetition whose steps are in no other fold; nothing if no two runs are left."""
    runs = [
        all(free[fold.start + index * fold.length : fold.start + (index + 1) * fold.length])
        for index in range(fold.times)
    ]
    parts: list[Fold] = []
    index = 0
    while index < len(runs):
        end = index
        while end < len(runs) and runs[end]:
            end += 1
        part = Fold(fold.start + index * fold.length, fold.length, end - index)
        if part.times > 1 and part.saved >= SAVES:
            parts.append(part)
        index = end + 1
    return parts


def name_range(names: Sequence[str]) -> str:
    """Return names that differ in numbers alone as one: `layer.{0..31}.mlp`; else the first and the last."""
    if len(set(names)) == 1:
        return names[0]
    parts = [re.split(r"(\d+)", name) for name in names]
    first, last = parts[0], parts[-1]
    if len({tuple(part[::2]) for part in parts}) > 1:
        return f"{names[0]} … {names[-1]}"
    return "".join(
        text if len({part[place] for part in parts}) == 1 else f"{{{text}..{last[place]}}}"
        for place, text in enumerate(first)
    )
