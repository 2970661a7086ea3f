"""Hold one worker process of a pool: start it, send it batches, and read their results."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fusec.errors import ExecutionError, FusecError
from fusec.scale.devices import WorkerDevice
from fusec.scale.model_recipe import ModelRecipe
from fusec.scale.shared_block import SharedBlock
from fusec.system.json_child import JsonChild

WORKER = "fusec.scale.pool_worker"
Inputs = Sequence[tuple[str | None, np.ndarray[Any, Any]]]


@dataclass
class Batch:
    """A batch of a pool.

    inputs: arrays with their names; None for an array that is given by its place.
    deaths: workers that ended while they ran it.
    """

    number: int
    inputs: Inputs
    result: Future[Any] = field(default_factory=Future[Any])
    deaths: int = 0


class PoolProcess:
    """One worker process, with memory for `depth` batches in flight."""

    def __init__(self, recipe: ModelRecipe, device: WorkerDevice, workers: int, depth: int):
        self.device = device
        self._slots = [(SharedBlock(), SharedBlock()) for _ in range(depth)]
        handles = [(inputs.handle, results.handle) for inputs, results in self._slots]
        self._child = JsonChild(WORKER, device.environment(workers), [h for pair in handles for h in pair])
        self._child.tell({"model": asdict(recipe.on(device.name)), "slots": handles})
        self._free = list(range(depth))
        self.pending: dict[int, tuple[int, Batch]] = {}  # by number, in the order in which the worker runs them

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def wait_ready(self) -> str:
        """Wait until the model is loaded, and return the name of its device.

        Raises FusecError with the reason if it cannot be loaded, RuntimeError for a defect of fusec.
        """
        answer = self._child.receive()
        if answer is None:
            raise ExecutionError(f"the worker on {self.device.name} did not start: {self._child.end()[1]}")
        _raise_error(answer, f"the worker on {self.device.name}: ")
        return answer["ready"]["device"]

    def send(self, batch: Batch) -> None:
        """Copy a batch into a free slot, and tell the worker."""
        slot = self._free.pop()
        names = [name for name, _ in batch.inputs]
        try:
            records = self._slots[slot][0].put([array for _, array in batch.inputs])
        except FusecError as error:
            self._free.append(slot)
            batch.result.set_exception(error)
            return
        self.pending[batch.number] = (slot, batch)
        inputs = list(zip(names, records, strict=True))
        self._child.tell({"job": batch.number, "slot": slot, "inputs": inputs})

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
            results = [array.copy() for array in self._slots[slot][1].views(answer["results"])]
        except (FusecError, RuntimeError) as error:
            batch.result.set_exception(error)
        else:
            batch.result.set_result(results[0] if len(results) == 1 else tuple(results))
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
