"""Run models in a worker process: form batches of the requests of all front ends, and run them on one device.

Three threads hand batches on, so that the device waits for little: one receives requests and gathers the rows of the
next batch, one starts batches, one waits for the results and answers.
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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fusec.errors import FusecError
from fusec.serving.predictor import Predictor
from fusec.serving.server import metrics
from fusec.serving.server.frames import frame
from fusec.serving.server.memory.request_memory import RequestMemory
from fusec.serving.server.memory.shared_regions import MappedRegions, RegionError
from fusec.serving.server.request_frames import RequestForm, split_frames
from fusec.serving.server.server_options import ServerOptions
from fusec.serving.server.worker.batch_buffer import PendingResults
from fusec.serving.server.worker.batch_queue import BatchQueue
from fusec.serving.server.worker.loaded_model import LoadedModel, PreparedBatch
from fusec.serving.server.worker.queued_request import (
    Batch,
    FrontEndConnection,
    QueuedRequest,
    by_sender,
    send_error,
    send_results,
)
from fusec.serving.server.worker.request_receiver import RequestReceiver
from fusec.system.long_lived import leave_alone
from fusec.system.threaded_copy import ThreadedCopy

EXIT_BAD_MODEL, EXIT_FAILED = 3, 70
MAX_FAILURES = 3  # failed batches one after the other, after which the process starts again
# Seconds until a thread gives Python's lock to another one. With Python's default, the thread that starts batches may
# wait for the lock for longer than a batch runs.
SWITCH_S = 0.0002
SLOTS = 2  # batches in progress: one runs, and one is gathered or queued on the device; more would only wait there
# Seconds between reads while a batch waits for more requests: reading requests together costs less than one by one.
RECEIVE_S = 0.00025
_log = logging.getLogger("fusec.serving")


class ModelWorker:
    """The threads of a worker process, and what they hand to each other."""

    def __init__(self, options: ServerOptions, number: int):
        """Load the models, which takes as long as their programs take to prepare and to warm up."""
        device = options.devices[number]
        self._models: dict[str, LoadedModel] = {}
        copy = ThreadedCopy(len(options.devices))
        for name, path in options.models.items():
            predictor = Predictor(path, device=device, target=options.target, tune=options.tune).load()
            self._models[name] = LoadedModel(name, predictor, options.preferred, copy)
        self._xp = next((model.xp for model in self._models.values()), np)
        self._regions = MappedRegions(self._xp)
        self._wait_s = options.wait_s
        self._queue: BatchQueue[QueuedRequest] = BatchQueue(options.delay_s, options.wait_s, self._refuse)
        self._receiver = RequestReceiver(self._take)
        self._slots = threading.Semaphore(SLOTS)
        self._prepared: queue.SimpleQueue[tuple[Batch, PreparedBatch]] = queue.SimpleQueue()
        self._running: queue.SimpleQueue[tuple[Batch, PreparedBatch, PendingResults, float]] = queue.SimpleQueue()
        self._failures = 0

    def serve(self, path: str) -> NoReturn:
        """Listen on a socket, which appears now that all is ready. This thread runs the batches."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        early = Path(f"{path}.{os.getpid()}")
        listening.bind(str(early))
        listening.listen(128)
        early.replace(path)
        for name, run in (
            ("accept", lambda: self._accept(listening)),
            ("gather", self._gather),
            ("finish", self._finish),
        ):
            threading.Thread(target=_or_exit, args=(run,), name=f"fusec-{name}", daemon=True).start()
        while True:
            self._run(*self._prepared.get())

    def _accept(self, listening: socket.socket) -> NoReturn:
        described = {name: model.served.to_json() for name, model in self._models.items()}
        device = next((model.predictor.device for model in self._models.values()), "")
        while True:
            connection, _ = listening.accept()
            _, handles, _, _ = socket.recv_fds(connection, 1, 1)
            if not handles:  # a front end that ended while it connected
                connection.close()
                continue
            sender = FrontEndConnection(connection, RequestMemory(handles[0], self._xp))
            os.close(handles[0])
            sender.send([frame({"models": described, "device": device})])
            self._receiver.add(sender)

    def _take(self, sender: FrontEndConnection, held: bytearray) -> None:
        """Put the requests that have arrived whole into the queue. held: what has arrived; it is changed."""
        taken: dict[RequestForm, list[tuple[QueuedRequest, int]]] = defaultdict(list)
        for form, requests in split_frames(held):
            if not form.model:
                self._regions.forget(form.outputs[0])
                continue
            model = self._models[form.model]
            found, memories = taken[form], (sender.memory,) * len(form.inputs)
            for number, rows, *starts in requests:
                request = QueuedRequest(sender, number, model, form, memories, starts, rows)
                if not form.uses_objects or (request := self._with_objects(request)) is not None:
                    found.append((request, rows))
        for form, tickets in taken.items():
            if tickets:
                self._queue.put(self._models[form.model].group(form), tickets)

    def _with_objects(self, request: QueuedRequest) -> QueuedRequest | None:
        """Find the shared-memory objects of a request's inputs. If one is gone, answer with the error."""
        try:
            memories = [
                self._regions.memory(item, start + nbytes) if item else memory
                for (*_, item), memory, start, nbytes in zip(
                    request.form.inputs, request.memories, request.starts, request.nbytes, strict=True
                )
            ]
        except RegionError as error:
            send_error([request], str(error), 400)
            return None
        return replace(request, memories=memories)

    def _gather(self) -> NoReturn:
        while True:
            while not self._slots.acquire(timeout=self._wait_s / 4):
                self._receiver.receive(wait=False)
                self._queue.drop_late()
            self._gather_next()

    def _next_batch(self) -> Batch:
        """Receive requests until a batch is due."""
        self._receiver.receive(wait=False)
        while (batch := self._queue.take()) is None:
            left_s = self._queue.left_s()
            if left_s is not None:
                time.sleep(min(left_s, RECEIVE_S))
            self._receiver.receive(wait=left_s is None)
        return batch

    def _gather_next(self) -> None:
        """Gather a batch. In a function of its own, so that a thread that waits does not hold memory of clients."""
        batch = by_sender(self._next_batch())
        model = batch.tickets[0].model
        requests = [ticket.arrays() for ticket in batch.tickets]
        locked = all(ticket.page_locked for ticket in batch.tickets)
        self._prepared.put((batch, model.gather(batch.group, requests, batch.size, locked)))

    def _run(self, batch: Batch, prepared: PreparedBatch) -> None:
        model, start = batch.tickets[0].model, time.perf_counter()
        outputs = list(dict.fromkeys(name for ticket in batch.tickets for name in ticket.form.outputs))
        try:
            pending = model.run(prepared, outputs)
        except FusecError as error:
            self._failed(batch, error)
            model.release(prepared)
            self._slots.release()
        else:
            self._running.put((batch, prepared, pending, start))

    def _finish(self) -> NoReturn:
        ended = 0.0
        while True:
            ended = self._finish_next(ended)

    def _finish_next(self, ended: float) -> float:
        """Answer the requests of a batch when its results are there, and return that time. ended: of the one before."""
        batch, prepared, pending, start = self._running.get()
        results = pending.wait()
        model = batch.tickets[0].model
        model.release(prepared)
        self._slots.release()
        self._failures = 0
        start, ended = max(start, ended), time.perf_counter()  # it may have waited for the batch before
        send_results(batch, results)
        _count(batch, ended - start)
        return ended

    def _failed(self, batch: Batch, error: FusecError) -> None:
        """Answer with the error. Shapes of a request that ran alone may not fit; else the device failed."""
        may_not_fit = not batch.size and batch.tickets[0].model.takes_other_shapes
        send_error(batch.tickets, str(error), 400 if may_not_fit else 500)
        if may_not_fit:
            return
        _log.error("%s: a batch failed: %s", batch.tickets[0].model.served.name, error)
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            _log.error("%d batches failed one after the other: the worker process ends", self._failures)
            os._exit(EXIT_FAILED)

    def _refuse(self, tickets: Sequence[QueuedRequest]) -> None:
        send_error(tickets, "the server is overloaded: the request waited too long", 503)


def _count(batch: Batch, run_s: float) -> None:
    name, rows = batch.tickets[0].model.served.name, sum(ticket.rows for ticket in batch.tickets)
    metrics.RUN_SECONDS.labels(name).observe(run_s)
    metrics.BATCH_ROWS.labels(name).observe(rows)
    metrics.PADDED_ROWS.labels(name).inc(max(0, batch.size - rows))
    metrics.QUEUE_SECONDS.labels(name).observe(max(batch.waited_s))


def _or_exit(run: Any) -> None:
    """Run the loop of a thread. A defect ends the process, so that its requests are refused and it starts again."""
    try:
        run()
    except BaseException:  # noqa: BLE001 - whatever it was, the process cannot go on without the thread
        _log.exception("a thread of a worker process failed")
        os._exit(EXIT_FAILED)


def main() -> None:
    """Serve the models of the options on the command line, as the worker process of that number."""
    options, number = ServerOptions.from_json(sys.argv[1]), int(sys.argv[2])
    sys.setswitchinterval(SWITCH_S)
    try:
        worker = ModelWorker(options, number)
    except FusecError as error:
        print(f"fusec: error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_MODEL)
    leave_alone()
    worker.serve(options.socket(number))
