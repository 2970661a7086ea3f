"""Leave the objects of a process that has started out of Python's garbage collections."""

from __future__ import annotations

import gc


def leave_alone() -> None:
    """Do not look at the objects that exist now again.

    A full collection looks at all of them while no other thread runs. In a process that has imported the compiler, that
    takes longer than several batches.
    """
    gc.collect()
    gc.freeze()
