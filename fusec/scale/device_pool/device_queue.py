"""Give batches to worker processes, replace workers that die, and repeat their batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.scale.device_pool.input_buffers import InputBuffers, Types
from fusec.scale.device_pool.pool_process import Batch, Inputs, PoolMemory, PoolProcess, WorkerModel
from fusec.scale.devices import WorkerDevice
from fusec.scale.model_recipe import ModelRecipe
from fusec.system.threaded_copy import ThreadedCopy

MOST_DEATHS = 2  # of workers that run a batch: it is tried once more, because it may not be at fault
FILLED = 2  # buffers that the caller may fill, or still hold, while as many batches as possible are unfinished


class DeviceQueue:
    """Batches that wait, and a thread for each worker process, which takes them.

    devices: the name of each worker's device; empty until it is ready.
    model: the inputs of the model, as a worker sent them.
    replaced: number of workers that died and were replaced.
    limit: batches that may be unfinished: those that workers hold, and as many that wait.
    """

    def __init__(self, recipe: ModelRecipe, devices: Sequence[WorkerDevice], depth: int, timeout_s: float | None):
        self._recipe, self._timeout_s = recipe, timeout_s
        self.devices = [""] * len(devices)
        self.replaced = 0
        self.limit = 2 * depth * len(devices)
        self._lent = InputBuffers(self.limit + FILLED)
        self._memory = PoolMemory(depth, self._lent, ThreadedCopy(len(devices)))
        self.model = WorkerModel("", ())
        self.processes: dict[int, PoolProcess] = {}
        self._waiting: deque[Batch] = deque()
        self._unfinished = self._number = self._serving = 0
        self._changed = threading.Condition()
        self._error: Exception | None = None  # the reason why it takes no more batches
        try:
            self._start(devices)
        except BaseException:
            self.close()
            raise

    def _start(self, devices: Sequence[WorkerDevice]) -> None:
        """Start all workers, the first one alone if it has to compile, and wait until they are ready."""
        alone = 0 if self._recipe.is_compiled else 1
        for part in (range(alone), range(alone, len(devices))):
            for index in part:
                thread = threading.Thread(target=self._serve, args=(index, devices[index]), daemon=True)
                thread.name = f"fusec-pool-{index}"
                with self._changed:
                    self._serving += 1
                thread.start()
            with self._changed:
                while self._error is None and not all(self.devices[i] for i in part):
                    self._changed.wait()
                self._require_open()

    def _require_open(self) -> None:
        if self._error is not None:
            raise self._error

    def add(self, inputs: Inputs) -> Future[Any]:
        """Queue a batch. Waits while `limit` batches are unfinished."""
        with self._changed:
            while self._error is None and self._unfinished >= self.limit:
                self._changed.wait()
            self._require_open()
            batch = Batch(self._number, inputs)
            self._number += 1
            self._unfinished += 1
            batch.result.add_done_callback(self._finished)
            self._waiting.append(batch)
            self._changed.notify_all()
        return batch.result

    def lend(self, types: Types) -> dict[str, np.ndarray[Any, Any]]:
        """Return arrays over a buffer that is free; see `InputBuffers.lend`."""
        return self._lent.lend(types, self._has_unfinished)

    def _has_unfinished(self) -> bool:
        with self._changed:
            self._require_open()
            return self._unfinished > 0

    def _finished(self, _: Future[Any]) -> None:
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()

    def close(self, error: Exception | None = None) -> None:
        """End the workers. Batches that are not done fail with the error."""
        with self._changed:
            self._error = self._error or error or ExecutionError("the pool is closed")
            reason, waiting = self._error, list(self._waiting)
            self._waiting.clear()
            processes = list(self.processes.values())
            self._changed.notify_all()
        for batch in waiting:
            batch.fail(reason)
        for process in processes:
            process.kill()  # its thread reads the end of its output, and fails its batches

    # threads of workers ----------------------------------------------------------------------------

    def _serve(self, index: int, device: WorkerDevice) -> None:
        """Run one worker after the other on a device, until the queue is closed or one cannot be started."""
        try:
            while self._error is None:
                self._serve_one(index, device)
        except Exception as error:  # noqa: BLE001  # raised in all threads that wait for batches
            self.close(error)
        with self._changed:
            self._serving -= 1
            if not self._serving:  # no process is being started, which would share the descriptors
                self._lent.close()

    def _serve_one(self, index: int, device: WorkerDevice) -> None:
        process = PoolProcess(self._recipe, device, len(self.devices), self._memory)
        try:
            with self._changed:
                self.processes[index] = process
            if self._error is None:
                model = process.wait_ready()
                with self._changed:
                    self.model = model
                    self.devices[index] = model.device
                    self._changed.notify_all()
                self._return(process, self._drive(process))
        finally:
            with self._changed:
                self.processes.pop(index)
            process.close()
            for _, batch in process.pending.values():
                batch.fail(self._error or ExecutionError("its worker was ended"))

    def _drive(self, process: PoolProcess) -> str:
        """Keep a worker busy until it ends. Return how it ended; empty if the queue was closed."""
        while True:
            while process.has_room and (batch := self._next(wait=not process.pending)) is not None:
                process.send(batch)
            if self._error is not None:
                return ""
            if process.pending and (words := process.receive(self._timeout_s)):
                return words

    def _next(self, wait: bool) -> Batch | None:
        """Take the next batch. None if there is none, or the queue is closed."""
        with self._changed:
            while self._error is None:
                while self._waiting:
                    batch = self._waiting.popleft()
                    if batch.result.running() or batch.result.set_running_or_notify_cancel():
                        return batch
                if not wait:
                    break
                self._changed.wait()
        return None

    def _return(self, process: PoolProcess, words: str) -> None:
        """Put the batches of a worker that ended back. The first one is to blame, because they run in order.

        On a GPU, the second one may have been running, too. So each then runs alone, which shows who is to blame.
        """
        batches = [batch for _, batch in process.pending.values()]
        process.pending.clear()
        for batch in batches:
            batch.alone = True
        for batch in batches[:1]:
            batch.deaths += 1
            if batch.deaths >= MOST_DEATHS:
                batch.fail(
                    ExecutionError(f"batch {batch.number}: {batch.deaths} workers ended while they ran it: {words}")
                )
                batches = batches[1:]
        with self._changed:
            if self._error is None:
                self.replaced += 1
                self._waiting.extendleft(reversed(batches))
                self._changed.notify_all()
                return
        for batch in batches:
            batch.fail(self._error)
