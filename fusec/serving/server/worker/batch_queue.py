"""Decide which requests run together: dynamic batching with a delay, preferred sizes and a longest wait."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import field
from typing import Generic, TypeVar

from fusec.system.dataclass import dataclass

Ticket = TypeVar("Ticket")


@dataclass(frozen=True)
class BatchGroup:
    """Requests that may share a batch. sizes: batch sizes in ascending order; () runs each request alone."""

    key: Hashable
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class FormedBatch(Generic[Ticket]):
    """Requests to run together. size: batch size of the program; 0 for a request that is run alone, as it is."""

    group: BatchGroup
    tickets: Sequence[Ticket]
    size: int
    waited_s: Sequence[float]


@dataclass
class _Line(Generic[Ticket]):
    """Waiting requests of a group, each as (ticket, rows, time of arrival), the oldest first."""

    group: BatchGroup
    waiting: deque[tuple[Ticket, int, float]] = field(default_factory=deque)
    rows: int = 0

    @property
    def is_full(self) -> bool:
        """Tell if a batch need not wait for more requests."""
        return not self.group.sizes or self.rows >= self.group.sizes[-1]


class BatchQueue(Generic[Ticket]):
    """Requests that wait for the device, and the batches that they form.

    A batch is formed if the largest size is full, or the oldest request has waited for `delay_s`. Groups take turns by
    the age of their oldest request. One thread uses it.

    refuse: called with requests that waited longer than `wait_s`.
    """

    def __init__(
        self,
        delay_s: float,
        wait_s: float,
        refuse: Callable[[Sequence[Ticket]], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._delay_s, self._wait_s, self._refuse, self._clock = delay_s, wait_s, refuse, clock
        self._lines: dict[Hashable, _Line[Ticket]] = {}

    def put(self, group: BatchGroup, tickets: Sequence[tuple[Ticket, int]]) -> None:
        """Add requests of a group, each with the number of its rows."""
        now = self._clock()
        line = self._lines.setdefault(group.key, _Line(group))
        line.waiting.extend((ticket, rows, now) for ticket, rows in tickets)
        line.rows += sum(rows for _, rows in tickets)

    def take(self) -> FormedBatch[Ticket] | None:
        """Take a batch that is due; None if there is none."""
        now = self._clock()
        self._drop_late(now)
        due = [line for line in self._lines.values() if self._left_s(line, now) <= 0]
        return self._formed(min(due, key=lambda line: line.waiting[0][2]), now) if due else None

    def left_s(self) -> float | None:
        """Return the seconds until a batch is due if no more requests come; None if nothing waits."""
        now = self._clock()
        return min((max(0.0, self._left_s(line, now)) for line in self._lines.values()), default=None)

    def drop_late(self) -> None:
        """Refuse requests that waited too long; for a caller that is not in `take`, because the device is busy."""
        self._drop_late(self._clock())

    def _left_s(self, line: _Line[Ticket], now: float) -> float:
        return 0.0 if line.is_full else line.waiting[0][2] + self._delay_s - now

    def _drop_late(self, now: float) -> None:
        late: list[Ticket] = []
        for key, line in list(self._lines.items()):
            while line.waiting and now - line.waiting[0][2] > self._wait_s:
                ticket, rows, _ = line.waiting.popleft()
                line.rows -= rows
                late.append(ticket)
            if not line.waiting:
                del self._lines[key]
        if late:
            self._refuse(late)

    def _formed(self, line: _Line[Ticket], now: float) -> FormedBatch[Ticket]:
        sizes = line.group.sizes
        count, rows = _fitting([rows for _, rows, _ in line.waiting], sizes)
        taken = [line.waiting.popleft() for _ in range(count)]
        line.rows -= rows
        if not line.waiting:
            del self._lines[line.group.key]
        size = next((size for size in sizes if size >= rows), 0)
        return FormedBatch(line.group, [t for t, _, _ in taken], size, [now - since for _, _, since in taken])


def _fitting(rows: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """Return how many of the oldest requests to take, and their rows.

    Where more than half of a padded batch would be copies, the next smaller size is filled instead, and the rest is the
    next batch.
    """
    if not sizes or rows[0] > sizes[-1]:
        return 1, rows[0]
    count, total = _prefix(rows, sizes[-1])
    padded = next(size for size in sizes if size >= total)
    smaller = max((size for size in sizes if size <= total), default=0)
    if smaller and smaller < total and total * 2 < padded:
        return _prefix(rows, smaller) if rows[0] <= smaller else (count, total)
    return count, total


def _prefix(rows: Sequence[int], most: int) -> tuple[int, int]:
    total = 0
    for count, more in enumerate(rows):
        if total + more > most:
            return count, total
        total += more
    return len(rows), total
