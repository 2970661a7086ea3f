"""Hold the requests that wait in a worker process, and answer them."""

from __future__ import annotations

import functools
import math
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from fusec.serving.served_model import DATATYPES, datatype_of
from fusec.serving.server.frames import frame
from fusec.serving.server.memory.request_memory import RequestMemory
from fusec.serving.server.request_frames import ROWS, RequestForm
from fusec.serving.server.worker.batch_queue import FormedBatch
from fusec.serving.server.worker.loaded_model import LoadedModel

SEND_S = 5  # seconds for which a worker waits until a front end reads, because it answers no others meanwhile


class FrontEndConnection:
    """The socket to a front end, and the memory with its request bodies."""

    def __init__(self, connection: socket.socket, memory: RequestMemory):
        self.connection, self.memory = connection, memory
        self._lock = threading.Lock()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))

    def send(self, frames: Sequence[bytes]) -> None:
        """Send messages. A front end that is gone needs none; one that does not read is cut off, and connects again."""
        with self._lock, suppress(OSError):
            try:
                self.connection.sendall(b"".join(frames))
            except OSError:
                self.connection.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True)  # not frozen, because that makes it slower to make, and one is made for each request
class QueuedRequest:
    """A request that waits for its batch. memories, starts: where each of its inputs is."""

    sender: FrontEndConnection
    id: int
    model: LoadedModel
    form: RequestForm
    memories: Sequence[RequestMemory]
    starts: Sequence[int]
    rows: int

    @property
    def page_locked(self) -> bool:
        """Tell if a GPU may copy the inputs itself."""
        return all(memory.page_locked for memory in self.memories)

    @property
    def nbytes(self) -> list[int]:
        """Return the number of bytes of each input."""
        return [math.prod(shape) * dtype.itemsize for _, shape, dtype in _arrays(self.form, self.rows)]

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the inputs as views of the memory where they are."""
        return {
            name: np.ndarray(shape, dtype, memory.data, start)
            for (name, shape, dtype), memory, start in zip(
                _arrays(self.form, self.rows), self.memories, self.starts, strict=True
            )
        }


@functools.lru_cache(maxsize=1024)
def _arrays(form: RequestForm, rows: int) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Return name, shape and dtype of the inputs of a request."""
    return [
        (name, tuple(rows if d == ROWS else d for d in shape), DATATYPES[datatype])
        for name, datatype, shape, _ in form.inputs
    ]


Batch = FormedBatch[QueuedRequest]


def by_sender(batch: Batch) -> Batch:
    """Put requests of one front end next to each other in a batch, so that one message answers them."""
    return replace(batch, tickets=sorted(batch.tickets, key=lambda ticket: id(ticket.sender)))


def send_results(batch: Batch, results: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Answer each request of a batch with its rows; one message to each front end (`frames.split_answers`).

    results: results of the whole batch, by name of the output.
    """
    start = 0
    for sender, group in groupby(batch.tickets, key=lambda ticket: ticket.sender):
        tickets = list(group)
        rows = [ticket.rows for ticket in tickets]
        end = start + sum(rows)
        parts = {n: array[start:end] if batch.size else array for n, array in results.items()}
        outputs = [
            [n, datatype_of(a.dtype, n), list(a.shape[1 if batch.size else 0 :]), a.nbytes] for n, a in parts.items()
        ]
        header = {"ids": [ticket.id for ticket in tickets], "rows": rows if batch.size else None, "outputs": outputs}
        sender.send([frame(header, [array.tobytes() for array in parts.values()])])
        start = end


def send_error(tickets: Sequence[QueuedRequest], error: str, status: int) -> None:
    """Answer requests with an error and a status of HTTP."""
    for ticket in tickets:
        ticket.sender.send([frame({"id": ticket.id, "error": error, "status": status})])
