"""Run models in a worker process: form batches of the requests of all front ends, and run them on one device.

Three threads hand batches on, so that the device waits for little: one gathers the rows of the next batch, one runs a
batch, one sends the answers of the last. A thread for each front end receives requests.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fusec.errors import ExecutionError, FusecError
from fusec.serving.predictor import Predictor
from fusec.serving.served_model import datatype_of
from fusec.serving.server import metrics
from fusec.serving.server.batch_queue import BatchGroup, BatchQueue, FormedBatch
from fusec.serving.server.frames import frame, receive_headers
from fusec.serving.server.loaded_model import LoadedModel, PreparedBatch, QueuedInput
from fusec.serving.server.serve_options import ServeOptions
from fusec.serving.server.shared_arena import mapped

EXIT_BAD_MODEL, EXIT_FAILED = 3, 70
MAX_FAILURES = 3  # failed batches one after the other, after which the process starts again
_log = logging.getLogger("fusec.serving")


class FrontEndConnection:
    """The socket to a front end, and the memory with its request bodies."""

    def __init__(self, connection: socket.socket, memory: memoryview):
        self.connection, self.memory = connection, memory
        self._lock = threading.Lock()

    def send(self, frames: Sequence[bytes]) -> None:
        """Send messages. A front end that is gone needs none."""
        with self._lock, suppress(OSError):
            self.connection.sendall(b"".join(frames))


@dataclass(frozen=True)
class QueuedRequest:
    """A request that waits for its batch."""

    sender: FrontEndConnection
    id: int
    model: LoadedModel
    inputs: tuple[QueuedInput, ...]
    outputs: tuple[str, ...]
    rows: int

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the inputs as views of the front end's memory."""
        return {each.name: each.array(self.sender.memory) for each in self.inputs}


Batch = FormedBatch[QueuedRequest]


class ModelWorker:
    """The threads of a worker process, and what they hand to each other."""

    def __init__(self, options: ServeOptions, number: int):
        """Load the models, which takes as long as their programs take to prepare and to warm up."""
        device = options.devices[number]
        self._models: dict[str, LoadedModel] = {}
        for name, path in options.models.items():
            predictor = Predictor(path, device=device, target=options.target, tune=options.tune).load()
            self._models[name] = LoadedModel(name, predictor, options.preferred)
        self._wait_s = options.wait_s
        self._queue: BatchQueue[QueuedRequest] = BatchQueue(options.delay_s, options.wait_s, self._refuse)
        self._slots = threading.Semaphore(2)  # one batch runs, and one is gathered
        self._prepared: queue.SimpleQueue[tuple[Batch, PreparedBatch]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Batch, Mapping[str, np.ndarray[Any, Any]]]] = queue.SimpleQueue()
        self._failures = 0

    def serve(self, path: str) -> NoReturn:
        """Listen on a socket, which appears now that all is ready. This thread runs the batches."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        early = Path(f"{path}.{os.getpid()}")
        listening.bind(str(early))
        listening.listen(128)
        early.replace(path)
        for name, run in (("accept", lambda: self._accept(listening)), ("gather", self._gather), ("send", self._send)):
            threading.Thread(target=_or_exit, args=(run,), name=f"fusec-{name}", daemon=True).start()
        while True:
            self._run(*self._prepared.get())

    def _accept(self, listening: socket.socket) -> NoReturn:
        told = {name: model.served.to_json() for name, model in self._models.items()}
        device = next((model.predictor.device for model in self._models.values()), "")
        while True:
            connection, _ = listening.accept()
            _, handles, _, _ = socket.recv_fds(connection, 1, 1)
            if not handles:  # a front end that ended while it connected
                connection.close()
                continue
            sender = FrontEndConnection(connection, mapped(handles[0]))
            os.close(handles[0])
            sender.send([frame({"models": told, "device": device})])
            threading.Thread(target=_or_exit, args=(lambda sender=sender: self._receive(sender),), daemon=True).start()

    def _receive(self, sender: FrontEndConnection) -> None:
        held = bytearray()
        with suppress(ConnectionError):
            while (headers := receive_headers(sender.connection, held)) is not None:
                groups: dict[BatchGroup, list[tuple[QueuedRequest, int]]] = defaultdict(list)
                for header in headers:
                    model = self._models[header["model"]]
                    inputs = tuple(QueuedInput(n, d, tuple(shape), start) for n, d, shape, start in header["inputs"])
                    request = QueuedRequest(
                        sender, header["id"], model, inputs, tuple(header["outputs"]), header["rows"]
                    )
                    groups[model.group(inputs)].append((request, request.rows))
                for group, requests in groups.items():
                    self._queue.put(group, requests)
        sender.connection.close()

    def _gather(self) -> NoReturn:
        while True:
            while not self._slots.acquire(timeout=self._wait_s / 4):
                self._queue.drop_late()
            batch = self._queue.take()
            assert batch is not None, "there is no timeout"
            model = batch.tickets[0].model
            requests = [ticket.arrays() for ticket in batch.tickets]
            self._prepared.put((batch, model.gather(batch.group, requests, batch.size)))

    def _run(self, batch: Batch, prepared: PreparedBatch) -> None:
        model, start = batch.tickets[0].model, time.perf_counter()
        outputs = list(dict.fromkeys(name for ticket in batch.tickets for name in ticket.outputs))
        try:
            results = model.run(prepared, outputs)
        except FusecError as error:
            self._failed(batch, error)
        else:
            self._failures = 0
            self._done.put((batch, results))
        finally:
            self._slots.release()
        name, rows = model.served.name, sum(ticket.rows for ticket in batch.tickets)
        metrics.RUN_SECONDS.labels(name).observe(time.perf_counter() - start)
        metrics.BATCH_ROWS.labels(name).observe(rows)
        metrics.PADDED_ROWS.labels(name).inc(max(0, batch.size - rows))
        for waited_s in batch.waited_s:
            metrics.QUEUE_SECONDS.labels(name).observe(waited_s)

    def _failed(self, batch: Batch, error: FusecError) -> None:
        """Answer with the error. A request that ran alone may not fit; a batch fits, so the device failed."""
        alone = not batch.size and isinstance(error, ExecutionError)
        _send_all(batch.tickets, {"error": str(error), "status": 400 if alone else 500})
        if alone:
            return
        _log.error("%s: a batch failed: %s", batch.tickets[0].model.served.name, error)
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            _log.error("%d batches failed one after the other: the worker process ends", self._failures)
            os._exit(EXIT_FAILED)

    def _send(self) -> NoReturn:
        while True:
            batch, results = self._done.get()
            frames: dict[FrontEndConnection, list[bytes]] = defaultdict(list)
            start = 0
            for ticket in batch.tickets:
                end = start + ticket.rows
                parts = {n: results[n][start:end] if batch.size else results[n] for n in ticket.outputs}
                told = [[n, datatype_of(a.dtype, n), list(a.shape), a.nbytes] for n, a in parts.items()]
                frames[ticket.sender].append(
                    frame({"id": ticket.id, "outputs": told}, [a.tobytes() for a in parts.values()])
                )
                start = end
            for sender, messages in frames.items():
                sender.send(messages)

    def _refuse(self, tickets: Sequence[QueuedRequest]) -> None:
        _send_all(tickets, {"error": "the server is overloaded: the request waited too long", "status": 503})


def _send_all(tickets: Sequence[QueuedRequest], answer: Mapping[str, Any]) -> None:
    for ticket in tickets:
        ticket.sender.send([frame({"id": ticket.id, **answer})])


def _or_exit(run: Any) -> None:
    """Run the loop of a thread. A defect ends the process, so that its requests are refused and it starts again."""
    try:
        run()
    except BaseException:  # noqa: BLE001 - whatever it was, the process cannot go on without the thread
        _log.exception("a thread of a worker process failed")
        os._exit(EXIT_FAILED)


def main() -> None:
    """Serve the models of the options on the command line, as the worker process of that number."""
    options, number = ServeOptions.from_json(sys.argv[1]), int(sys.argv[2])
    try:
        worker = ModelWorker(options, number)
    except FusecError as error:
        print(f"fusec: error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_MODEL)
    worker.serve(options.socket(number))
