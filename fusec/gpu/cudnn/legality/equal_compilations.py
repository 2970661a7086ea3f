"""Let equal compilations of several processes run one after the other.

The first one asks cuDNN, builds plans, and times them. The others wait, and then find all its answers and choices in
the cache. Together they would build and time the same plans on one GPU, and slow each other down.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar

from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.system.machine_locks import MachineLocks

KIND = "compilation"  # of the claim
_log = logging.getLogger(__name__)


class _Claim(ExitStack):
    """The claim of one compilation, once it is made. how: see `after_equal_ones`."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.is_made = False


class _TimeIsUp(Exception):  # noqa: N818  # no error: both go on
    pass


_claim: ContextVar[_Claim | None] = ContextVar("claim", default=None)


@contextmanager
def after_equal_ones(how: str) -> Generator[None]:
    """Hold the claim that a compilation within this block makes, until its end. Inner blocks share the outer claim.

    how: what choices depend on apart from the graphs, such as the tuning level
    """
    if _claim.get() is not None:
        yield
        return
    with _Claim(how) as claim:
        token = _claim.set(claim)
        try:
            yield
        finally:
            _claim.reset(token)


def wait_for_equal(graphs: Iterable[CudnnGraph], locks: MachineLocks, check: Callable[[], None], end: float) -> bool:
    """Claim the compilation that needs verdicts on these graphs; tell if another process had the claim.

    Only the first graphs of a block make a claim, because a process that waits holds none.

    check: called while waiting; it raises an error to give up.
    end: when the compilation stops to ask, of `time.monotonic`; it waits for half of the time until then
    """
    claim = _claim.get()
    if claim is None or claim.is_made:
        return False
    claim.is_made = True
    waited, now = False, time.monotonic()
    end = now + (end - now) / 2

    def check_time() -> None:
        nonlocal waited
        if not waited:
            _log.info("another process compiles the same model; its choices will be used")
        waited = True
        check()
        if time.monotonic() >= end:
            raise _TimeIsUp

    key = hashlib.sha256("\n".join([claim.how, *sorted(graph.key for graph in graphs)]).encode()).hexdigest()
    with suppress(_TimeIsUp):
        claim.enter_context(locks.claim(key, check_time, KIND))
    return waited
