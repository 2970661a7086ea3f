"""Record compile time by stage: seconds and counts.

Time of a stage inside another one is subtracted from the outer one, so the seconds add up to the total.
Work of other threads is not counted.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Spent:
    """Time and count of one stage."""

    seconds: float = 0.0
    count: int = 0


@dataclass
class Account:
    """Compile time: `seconds` in total, and `by_what` stage, in the order in which stages first ran."""

    seconds: float = 0.0
    by_what: dict[str, Spent] = field(default_factory=dict[str, Spent])
    clock: Callable[[], float] = time.perf_counter
    _within: list[float] = field(default_factory=list[float])  # seconds of what was done inside, innermost last

    @contextmanager
    def of(self, what: str) -> Generator[None]:
        """Count the time of this block as `what`."""
        start = self.clock()
        self._within.append(0.0)
        try:
            yield
        finally:
            seconds = self.clock() - start
            spent = self.by_what.setdefault(what, Spent())
            spent.seconds += seconds - self._within.pop()
            spent.count += 1
            if self._within:
                self._within[-1] += seconds
            else:
                self.seconds += seconds

    def __str__(self) -> str:
        """Return a line for each stage, the longest first, without those under a tenth of a second."""
        rows = sorted(self.by_what.items(), key=lambda row: -row[1].seconds)
        lines = [f"{s.seconds:7.1f} s  {what} ({s.count})" for what, s in rows if s.seconds >= 0.1]
        return "\n".join([f"{self.seconds:7.1f} s", *lines])


_open: ContextVar[Account | None] = ContextVar("account", default=None)


@contextmanager
def opened(what: str) -> Generator[Account]:
    """Open an account for this block, or use the one that is open; time outside other stages counts as `what`."""
    outer = _open.get()
    account = Account() if outer is None else outer
    token = _open.set(account)
    try:
        with account.of(what):
            yield account
    finally:
        _open.reset(token)


def spent_on(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Count a function's time as `what`, if an account is open."""

    def wrapped(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            account = _open.get()
            if account is None:
                return function(*args, **kwargs)
            with account.of(what):
                return function(*args, **kwargs)

        return counted

    return wrapped
