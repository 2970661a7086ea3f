"""Record compile time by stage: seconds and counts.

Time of a stage inside another one is subtracted from the outer one, so the seconds add up to the total.
Work of other threads is not counted.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from typing import ParamSpec, TypeVar

from fusec.system.dataclass import dataclass

_log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class StageTime:
    """Time and count of one stage."""

    seconds: float = 0.0
    count: int = 0


@dataclass
class CompileTimes:
    """Compile time: `seconds` in total, and by stage, in the order in which stages first ran."""

    seconds: float = 0.0
    stages: dict[str, StageTime] = field(default_factory=dict[str, StageTime])
    clock: Callable[[], float] = time.perf_counter
    _inner: list[float] = field(default_factory=list[float])  # for each open stage: seconds of the stages inside it

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Count the time of this block as stage `name`."""
        start = self.clock()
        self._inner.append(0.0)
        try:
            yield
        finally:
            seconds = self.clock() - start
            stage = self.stages.setdefault(name, StageTime())
            stage.seconds += seconds - self._inner.pop()
            stage.count += 1
            _log.debug("%s: %.3f s", name, seconds)
            if self._inner:
                self._inner[-1] += seconds
            else:
                self.seconds += seconds
                parts = ", ".join(f"{what} {each.seconds:.2f} s" for what, each in self.stages.items())
                _log.info("compiled in %.2f s: %s", self.seconds, parts)

    def __str__(self) -> str:
        """Return a line for each stage, the longest first, without those under a tenth of a second."""
        rows = sorted(self.stages.items(), key=lambda row: -row[1].seconds)
        lines = [f"{s.seconds:7.1f} s  {name} ({s.count})" for name, s in rows if s.seconds >= 0.1]
        return "\n".join([f"{self.seconds:7.1f} s  in total", *lines])


_running: ContextVar[CompileTimes | None] = ContextVar("compile_times", default=None)


@contextmanager
def opened(name: str) -> Generator[CompileTimes]:
    """Record the time of this block, in the record that is open if there is one.

    name: the stage that counts the time outside all other stages.
    """
    times = _running.get() or CompileTimes()
    token = _running.set(times)
    try:
        with times.stage(name):
            yield times
    finally:
        _running.reset(token)


def spent_on(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Count the time of a function as stage `name`, if a record is open."""

    def wrapped(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            times = _running.get()
            if times is None:
                return function(*args, **kwargs)
            with times.stage(name):
                return function(*args, **kwargs)

        return counted

    return wrapped
