"""Check the arguments of `fusec.Generator` and of its calls."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from fusec.errors import ExecutionError, FusecError
from fusec.ir import HostArray


def checked_number(name: str, given: Any, least: int) -> None:
    """Raise FusecError if an argument is not a whole number of at least `least`."""
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < least:
        raise FusecError(f"{name} is a whole number of at least {least}, not {given!r}")


def stop_tokens(stop: int | Collection[int]) -> frozenset[int]:
    """Return the tokens that end a sequence. Raises FusecError if they are not numbers."""
    given: Any = [stop] if isinstance(stop, int | np.integer) else stop
    try:
        return frozenset(operator.index(token) for token in given)
    except TypeError as error:
        raise FusecError(f"stop is the id of a token, or several ids, such as [2, 32000], not {stop!r}") from error


def rows_of(prompts: Iterable[Sequence[int] | HostArray]) -> list[HostArray]:
    """Return the prompts as arrays. Raises ExecutionError if they are not sequences of numbers."""
    try:
        rows = [np.asarray(prompt) for prompt in prompts]
    except (TypeError, ValueError):  # not iterable; rows of rows of different lengths
        rows = [np.array(0)]
    if any(row.ndim == 0 for row in rows):
        raise ExecutionError("prompts are lists of tokens, one for each sequence: write [[5, 7]] for one prompt")
    return rows


def padded(rows: list[HostArray], batch: int, vocabulary: int) -> tuple[HostArray, HostArray]:
    """Return the prompts, with zeros after their ends, and their lengths.

    A sequence without a prompt gets one zero.

    Raises ExecutionError for prompts that do not fit.
    """
    if not 1 <= len(rows) <= batch:
        raise ExecutionError(f"{len(rows)} prompts for a generator of {batch}")
    for number, row in enumerate(rows):
        if not row.size:
            raise ExecutionError(f"prompt {number} has no tokens; a sequence needs at least one")
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise ExecutionError(f"prompt {number} is {row.dtype}{list(row.shape)}, not a list of tokens")
        if row.min() < 0 or row.max() >= vocabulary:
            raise ExecutionError(f"prompt {number} has a token outside 0..{vocabulary - 1}")
    rows = rows + [np.zeros(1, np.int64)] * (batch - len(rows))
    ids = np.zeros((batch, max(row.size for row in rows)), np.int64)
    for number, row in enumerate(rows):
        ids[number, : row.size] = row
    return ids, np.array([row.size for row in rows], np.int64)


def checked_count(given: Any, longest: int, capacity: int) -> int:
    """Return the number of tokens to generate. Raises ExecutionError if the cache has no room for them.

    given: None for as many as there is room for.
    longest: number of tokens of the longest prompt.
    """
    if longest > capacity:
        raise ExecutionError(f"a prompt of {longest} tokens: the cache has room for {capacity}, max_length")
    room = capacity - longest
    if given is None:
        return room
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 0:
        raise ExecutionError(f"max_new_tokens is a whole number of at least 0, not {given!r}")
    if given > room:
        raise ExecutionError(
            f"{given} new tokens after a prompt of {longest}: the cache has room for {capacity} tokens, max_length"
        )
    return int(given)
