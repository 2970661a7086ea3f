"""Call a function with many items in the workers of a Dask cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusec.scale.extras import extra_module

PER_THREAD = 4  # calls of a part; of two or fewer, Dask gives workers all before it knows which of them are slow


def _ignore(count: int, total: int) -> None:
    pass


def current_client() -> Any:
    """Return the client of this process (`distributed.Client`), or None if there is none."""
    try:
        return extra_module("distributed", "dask").get_client()
    except ValueError:
        return None


def finished_calls(
    client: Any, function: Callable[[Any], Any], items: Sequence[Any], done: Callable[[int, int], None] = _ignore
) -> list[Any]:
    """Call a function in the workers of a cluster, wait for all calls, and return their futures in order.

    Workers begin when they have the first part of the calls. If all were sent together, some hundred calls would delay
    the start by a tenth of a second. Results stay in the workers; to collect as many takes as long.

    client: a `distributed.Client`.
    done: called with how many of how many calls have returned.
    Raises the error of the first call that fails; calls that have not begun are then dropped.
    """
    distributed = extra_module("distributed", "dask")
    part = PER_THREAD * max(1, sum(client.nthreads().values()))
    futures: list[Any] = client.map(function, items, pure=False, batch_size=part)
    try:
        for count, future in enumerate(distributed.as_completed(futures), 1):
            if future.status != "finished":
                future.result()  # raises the error
            done(count, len(items))
    except BaseException:
        client.cancel(futures)
        raise
    return futures
