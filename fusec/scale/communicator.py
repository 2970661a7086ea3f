"""Define how workers that train together exchange arrays, and exchange them within one process.

`nccl.py` does so between GPUs, and `worker_group.py` between processes on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from fusec.ir import Array

COLLECTIVE_S = 600.0  # a worker that waits longer for the others gives up


class Communicator(Protocol):
    """The connection of one worker to the others. All workers make the same calls in the same order.

    rank: number of this worker, from 0.
    size: number of workers.
    """

    rank: int
    size: int

    def mean(self, block: Array) -> None:
        """Replace a flat array of floats by its mean over all workers. On a GPU, on the current stream."""
        ...

    def broadcast(self, block: Array) -> None:
        """Replace a flat array by that of worker 0."""
        ...

    def start_mean(self, block: Array) -> None:
        """Start `mean`. On a GPU it runs next to later work of the current stream, until `join`."""
        ...

    def join(self) -> None:
        """Let the current stream wait for every `start_mean`."""
        ...

    def begin_step(self) -> None:
        """Count a step, whose calls may be part of a CUDA graph."""
        ...


class Counted:
    """A communicator that counts its calls.

    calls: steps, and calls outside of them. A worker that made more calls than one that has returned waits for ever.
    """

    rank: int
    size: int
    calls = 0

    def begin_step(self) -> None:
        self.calls += 1


class OnHost(Counted):
    """A communicator whose calls are done when they return."""

    def mean(self, block: Array) -> None:
        raise NotImplementedError

    def start_mean(self, block: Array) -> None:
        self.mean(block)

    def join(self) -> None:
        """Do nothing, because nothing is queued."""


class Alone(OnHost):
    """The communicator of one worker without others."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    def mean(self, block: Array) -> None:
        """Do nothing, because the mean of one is itself."""

    def broadcast(self, block: Array) -> None:
        """Do nothing, because there is no other worker."""


class ThreadCommunicator(OnHost):
    """The communicator of a worker that is a thread of this process, with arrays on the host."""

    def __init__(self, rank: int, barrier: threading.Barrier, blocks: list[Array | None]):
        self.rank, self.size = rank, len(blocks)
        self._barrier, self._blocks = barrier, blocks

    def mean(self, block: Array) -> None:
        self._replaced(block, mean_of)

    def broadcast(self, block: Array) -> None:
        self._replaced(block, lambda blocks: blocks[0].copy())

    def _replaced(self, block: Array, compute: Callable[[Sequence[Array]], Array]) -> None:
        self._blocks[self.rank] = block
        self._barrier.wait(COLLECTIVE_S)
        result = compute([b for b in self._blocks if b is not None])
        self._barrier.wait(COLLECTIVE_S)  # all have read before one writes
        block[...] = result


def threads(count: int) -> list[ThreadCommunicator]:
    """Return a communicator for each of `count` threads."""
    barrier, blocks = threading.Barrier(count), list[Array | None]([None] * count)
    return [ThreadCommunicator(rank, barrier, blocks) for rank in range(count)]


def mean_of(blocks: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the mean of arrays on the host, added in the order of the workers and at least in fp32."""
    wide = np.result_type(blocks[0].dtype, np.float32) if blocks[0].dtype.kind == "f" else np.dtype(np.float32)
    total = blocks[0].astype(wide)
    for block in blocks[1:]:
        total += block
    return (total / len(blocks)).astype(blocks[0].dtype)
