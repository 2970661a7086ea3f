"""Hold one worker process of a pool: start it, send it batches, and read their results."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, field
from typing import Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.scale.device_pool.input_buffers import InputBuffers
from fusec.scale.devices import WorkerDevice
from fusec.scale.model_recipe import ModelRecipe
from fusec.scale.shared_block import Record, SharedBlock
from fusec.system.dataclass import dataclass
from fusec.system.json_child import JsonChild
from fusec.system.threaded_copy import ThreadedCopy

WORKER = "fusec.scale.device_pool.pool_worker"
Inputs = Sequence[tuple[str | None, np.ndarray[Any, Any]]]


@dataclass
class Batch:
    """A batch of a pool.

    inputs: arrays with their names; None for an array that is given by its place.
    deaths: workers that ended while they ran it.
    alone: it runs when no other batch does, because one of those that were in progress together ended a worker.
    """

    number: int
    inputs: Inputs
    result: Future[Any] = field(default_factory=Future[Any])
    deaths: int = 0
    alone: bool = False

    def finish(self, result: Any) -> None:
        """Release the inputs, so that their buffers are free, and give the result to the caller."""
        self.inputs = ()
        self.result.set_result(result)

    def fail(self, error: Exception) -> None:
        """Release the inputs, and raise the error where the caller waits for the result."""
        self.inputs = ()
        if not self.result.cancelled() and not self.result.done():
            self.result.set_exception(error)


@dataclass(frozen=True)
class WorkerModel:
    """Describe the model of a worker. inputs: name, dtype and shape of each; None where they are not known."""

    device: str
    inputs: Sequence[tuple[str, str | None, Sequence[int | str] | None]]


@dataclass(frozen=True)
class PoolMemory:
    """Memory that all workers of a pool share.

    depth: batches that each worker holds.
    lent: the buffers that the caller of the pool fills.
    copy: copies batches to and from the workers.
    """

    depth: int
    lent: InputBuffers
    copy: ThreadedCopy


class PoolProcess:
    """One worker process, with memory for `depth` batches in flight."""

    def __init__(self, recipe: ModelRecipe, device: WorkerDevice, workers: int, memory: PoolMemory):
        self.device = device
        self._lent, self._copy = memory.lent, memory.copy
        self._slots = [(SharedBlock(), SharedBlock()) for _ in range(memory.depth)]
        handles = [(inputs.handle, results.handle) for inputs, results in self._slots]
        lent = [block.handle for block in self._lent.blocks]
        self._child = JsonChild(WORKER, device.environment(workers), [*(h for pair in handles for h in pair), *lent])
        self._child.tell({"model": asdict(recipe.on(device.name)), "slots": handles, "lent": lent})
        self._free = list(range(memory.depth))
        self.pending: dict[int, tuple[int, Batch]] = {}  # by number, in the order in which the worker runs them

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def wait_ready(self) -> WorkerModel:
        """Wait until the model is loaded, and return its inputs and its device.

        Raises FusecError with the reason if it cannot be loaded, RuntimeError for a defect of fusec.
        """
        answer = self._child.receive()
        if answer is None:
            raise ExecutionError(f"the worker on {self.device.name} did not start: {self._child.end()[1]}")
        _raise_error(answer, f"the worker on {self.device.name}: ")
        return WorkerModel(**answer["ready"])

    def send(self, batch: Batch) -> None:
        """Copy a batch into a free slot, except for arrays over lent buffers, and tell the worker."""
        slot = self._free.pop()
        try:
            inputs = self._shared(self._slots[slot][0], batch.inputs)
        except Exception as error:  # noqa: BLE001  # who waits for the result gets it
            self._free.append(slot)
            batch.fail(error)
            return
        self.pending[batch.number] = (slot, batch)
        self._child.tell({"job": batch.number, "slot": slot, "inputs": inputs, "alone": batch.alone})

    def _shared(self, block: SharedBlock, inputs: Inputs) -> list[tuple[str | None, int, Record]]:
        """Return the name of each array, the number of its lent buffer (-1: the slot's own memory), and its record."""
        places = [self._lent.place(array) for _, array in inputs]
        copied = [array for (_, array), place in zip(inputs, places, strict=True) if place is None]
        records = iter(block.put(copied, self._copy) if copied else ())
        return [
            (name, *place) if place is not None else (name, -1, next(records))
            for (name, _), place in zip(inputs, places, strict=True)
        ]

    def receive(self, seconds: float | None) -> str:
        """Wait for an answer, and give it to its batch. Return an empty string, or why there was no answer."""
        answer = self._child.receive(seconds)
        if answer is None:
            if not self._child.ended:
                self._child.kill()
                return f"it gave no answer in {seconds:.0f} s"
            return self._child.end()[1]
        slot, batch = self.pending.pop(answer["job"])
        try:
            _raise_error(answer, f"batch {batch.number}: ")
            results = [self._copy.copy_of(array) for array in self._slots[slot][1].views(answer["results"])]
        except Exception as error:  # noqa: BLE001  # who waits for the result gets it
            batch.fail(error)
        else:
            batch.finish(results[0] if len(results) == 1 else tuple(results))
        self._free.append(slot)
        return ""

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        """Kill the process and free its memory."""
        self._child.close()
        for pair in self._slots:
            for block in pair:
                block.close()


def _raise_error(answer: dict[str, Any], where: str) -> None:
    """Raise the error that a worker answered with, if there is one."""
    if "failed" in answer:
        raise ExecutionError(f"{where}{answer['failed']}")
    if "defect" in answer:
        raise RuntimeError(f"{where}fusec failed in a worker\n{answer['defect']}")
