"""Functions that the workers of a group run."""

from __future__ import annotations

import os
import signal
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
