"""Where the time of a compilation went: seconds and how often, by what was done.

What is done within something else is taken off that, so the seconds add up to the whole. Threads beside are not in it.
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
    """On one thing."""

    seconds: float = 0.0
    count: int = 0


@dataclass
class Account:
    """seconds: of the whole; by_what: their parts, in the order in which each came up first."""

    seconds: float = 0.0
    by_what: dict[str, Spent] = field(default_factory=dict[str, Spent])
    clock: Callable[[], float] = time.perf_counter
    _within: list[float] = field(default_factory=list[float])  # seconds of what was done inside, innermost last

    @contextmanager
    def of(self, what: str) -> Generator[None]:
        """What is done here is `what`."""
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
        """A line each, the longest first; what took no tenth of a second is left out."""
        rows = sorted(self.by_what.items(), key=lambda row: -row[1].seconds)
        lines = [f"{s.seconds:7.1f} s  {what} ({s.count})" for what, s in rows if s.seconds >= 0.1]
        return "\n".join([f"{self.seconds:7.1f} s", *lines])


_open: ContextVar[Account | None] = ContextVar("account", default=None)


@contextmanager
def opened(what: str) -> Generator[Account]:
    """An account of what is done here, `what` where nothing more is said. Within another, it is a part of that one."""
    outer = _open.get()
    account = Account() if outer is None else outer
    token = _open.set(account)
    try:
        with account.of(what):
            yield account
    finally:
        _open.reset(token)


def spent_on(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function whose time is entered as `what` where an account is open."""

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
