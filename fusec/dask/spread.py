"""Spread work of a command over the workers of a Dask cluster: one function, one call for each item."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from fusec.dask.calls import finished_calls
from fusec.errors import FusecError
from fusec.scale.extras import extra_module

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def connected(address: str) -> Generator[Any]:
    """Connect to a cluster that has workers, and yield the client (`distributed.Client`).

    address: address of Dask's scheduler, such as `tcp://10.0.0.1:8786`.
    Raises FusecError if the cluster cannot be reached or has no workers.
    """
    distributed = extra_module("distributed", "dask")
    try:
        client = distributed.Client(address)
    except (OSError, ValueError) as error:
        raise FusecError(f"Dask's scheduler at {address} cannot be reached: {error}") from error
    with client:
        if not client.nthreads():
            raise FusecError(f"the cluster at {address} has no workers")
        yield client


def spread(address: str, function: Callable[[T], R], items: Sequence[T], done: Callable[[int, int], None]) -> list[R]:
    """Call a function of a module with each item in the workers of a cluster, and return the results in order.

    Dask repeats the call of a worker that dies.

    address: as for `connected`.
    done: called with how many of how many calls have returned.
    Raises FusecError if the cluster cannot be used, or a call raised one.
    """
    with connected(address) as client:
        futures = finished_calls(client, partial(_answer, function), items, done)
        answers: list[tuple[R, str]] = client.gather(futures)
    if errors := [error for _, error in answers if error]:
        raise FusecError(errors[0])
    return [result for result, _ in answers]


def _answer(function: Callable[[T], R], item: T) -> tuple[R | None, str]:
    """Return the result, or the text of an error, because not every error can be sent to another process."""
    try:
        return function(item), ""
    except FusecError as error:
        return None, str(error)
