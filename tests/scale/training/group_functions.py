"""Functions that the workers of a group run."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.scale.communicator import Communicator


def together(communicator: Communicator, scale: float) -> dict[str, Any]:
    block = np.arange(300_000, dtype=np.float32) * scale * (communicator.rank + 1)
    communicator.mean(block)
    first = np.full(3, communicator.rank + 5, np.uint64)
    communicator.broadcast(first)
    return {"rank": communicator.rank, "last": float(block[-1]), "first": first.tolist()}


def one_raises(communicator: Communicator) -> None:
    if communicator.rank == 1:
        raise ExecutionError("no data here")
    communicator.mean(np.ones(1, np.float32))


def one_dies(communicator: Communicator) -> None:
    if communicator.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    communicator.mean(np.ones(1, np.float32))


def one_returns(communicator: Communicator) -> None:
    if communicator.rank == 0:
        communicator.mean(np.ones(1, np.float32))


def they_disagree(communicator: Communicator) -> None:
    communicator.mean(np.ones(communicator.rank + 1, np.float32))


def one_is_ahead(communicator: Communicator) -> None:
    """Behave as on a GPU, where a worker does not tell what it waits for."""
    communicator.begin_step()
    if communicator.rank == 0:
        communicator.begin_step()
        time.sleep(100)


def one_takes_long(communicator: Communicator) -> int:
    """Return late, with as many calls as the others, such as a worker that saves a model."""
    communicator.begin_step()
    time.sleep(2.5 * (1 - communicator.rank))
    return communicator.rank


def all_hang(communicator: Communicator) -> None:
    time.sleep(100)
