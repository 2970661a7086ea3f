"""Call a function with many items in the workers of a Dask cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fusec.scale.extras import extra_module

T = TypeVar("T")
R = TypeVar("R")
PER_THREAD = 4  # calls of a message; with two or fewer, Dask gives all to workers at once and cannot even them out


def _ignore(count: int, total: int) -> None:
    pass


def call_in_workers(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call a function in the workers of this process's client, and return the results in order.

    Without a client, Dask's scheduler on this machine makes the calls (`dask.compute`).
    Raises the error of the first call that fails; calls that have not begun are then dropped.
    """
    dask, distributed = extra_module("dask", "dask"), extra_module("distributed", "dask")
    try:
        client = distributed.get_client()
    except ValueError:  # no client
        return list(dask.compute(*(dask.delayed(function)(item) for item in items)))
    return call_through(client, function, items)


def call_through(
    client: Any, function: Callable[[T], R], items: Sequence[T], done: Callable[[int, int], None] = _ignore
) -> list[R]:
    """Call a function through a client, and return the results in order.

    Workers begin when they have the first part of the calls, and results are collected while others are computed. Sent
    and collected as a whole, some hundred calls delay the start and the end of a run by a tenth of a second each.

    client: a `distributed.Client`.
    done: called with how many of how many calls have returned.
    """
    distributed = extra_module("distributed", "dask")
    part = PER_THREAD * max(1, sum(client.nthreads().values()))
    futures = client.map(function, items, pure=False, batch_size=part)
    places = {future.key: place for place, future in enumerate(futures)}
    results: dict[int, R] = {}
    try:
        for count, (future, result) in enumerate(distributed.as_completed(futures, with_results=True), 1):
            results[places[future.key]] = result
            done(count, len(items))
    except BaseException:
        client.cancel(futures)
        raise
    return [results[place] for place in range(len(futures))]
