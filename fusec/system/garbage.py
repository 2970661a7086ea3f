"""Let Python collect garbage more seldom while a model is compiled or loaded.

A full collection visits every object of the process. After the imports it takes a large part of a warm start.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

OBJECTS = 200_000  # new objects until a collection: about as many as the graphs of a large model take
_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []  # the thresholds of each block that is open; the first are the process's own


@contextmanager
def seldom_collected() -> Generator[None]:
    """Raise the threshold of collections during this block, unless collection is off or the threshold is higher.

    Blocks may be nested, and open in several threads; the last one to end restores the threshold.
    """
    with _lock:
        _before.append(gc.get_threshold())
        first = _before[0][0]
        if len(_before) == 1 and 0 < first < OBJECTS:
            gc.set_threshold(OBJECTS, *_before[0][1:])
    try:
        yield
    finally:
        with _lock:
            own = _before[0]
            _before.pop()
            if not _before and gc.get_threshold()[0] == OBJECTS:  # else someone else set it meanwhile
                gc.set_threshold(*own)
