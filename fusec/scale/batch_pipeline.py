"""Run batches of one model in this process. On a GPU, later batches are copied there while one runs."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.scale.batch_runner import BatchRunner, Feeds, transfer_for
from fusec.scale.model_recipe import ModelRecipe, loaded
from fusec.scale.shared_block import Record, SharedBlock
from fusec.system.threaded_copy import ThreadedCopy

if TYPE_CHECKING:
    from fusec.scale.model_recipe import Runnable

DEPTH = 4  # one runs, one is on its way to the device, one waits, and one is copied into page-locked memory

Arrays = list[np.ndarray[Any, Any]]
Filled = tuple[int, Feeds, Future[list[Record]]]  # slot, inputs, and the records of their copies
Started = tuple[int, Callable[[], Arrays]]  # slot, and a function that waits for the results
_making = threading.Lock()


class BatchPipeline:
    """Runs batches of one model in order. Calls from several threads take turns to start batches.

    Copies between the GPU and memory that is not page-locked would wait for each other and for the model. So batches go
    through page-locked memory, which is used again for later ones. A thread fills it, because to copy a batch can take
    as long as to run one.

    The first batches of a call are copied while the last ones of the call before it run. So the GPU does not wait
    between two calls if they come from two threads.
    """

    def __init__(self, model: Runnable):
        self.model = model
        self._turn = threading.Lock()
        self._copy = ThreadedCopy(1)
        self._slots: list[tuple[SharedBlock, SharedBlock]] = []
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()  # slots that no batch uses
        self._runner: BatchRunner | None = None
        if transfer := transfer_for(model):
            self._slots = [(SharedBlock(), SharedBlock()) for _ in range(DEPTH)]
            self._runner = BatchRunner(model, self._slots, (), transfer)
            for slot in range(DEPTH):
                self._free.put(slot)
            self._filler = ThreadPoolExecutor(1, "fusec-fill")
            weakref.finalize(self, _close, self._slots)

    def run(self, batches: Iterable[Feeds], take: Callable[[Arrays], None]) -> None:
        """Run batches, and give the results of each to `take`.

        batches: arrays by the names of the inputs. Several are taken before the results of the first are there.
        take: called with the outputs of each batch, in order. The arrays are used again after the call.
        """
        if self._runner is None:
            for batch in batches:
                take([np.asarray(result) for result in self.model.run(None, batch)])
            return
        filling, started = deque[Filled](), deque[Started]()

        def start_oldest(runner: BatchRunner) -> None:
            started.append(self._start(runner, filling[0]))
            filling.popleft()

        def take_oldest() -> None:
            slot, results = started.popleft()
            try:
                take(results())
            finally:
                self._free.put(slot)

        try:
            with self._turn:
                for batch in batches:
                    if started and self._free.empty():
                        take_oldest()
                    filling.append(self._fill(self._free.get(), batch))  # may wait for the results of another call
                    if len(filling) > 1:
                        start_oldest(self._runner)
                while filling:
                    start_oldest(self._runner)
            while started:
                take_oldest()
        finally:  # after an error, nothing may use a slot any more when another call fills it
            for slot, _, records in filling:
                records.exception()
                self._free.put(slot)
            for slot, results in started:
                with contextlib.suppress(ExecutionError):
                    results()
                self._free.put(slot)

    def _fill(self, slot: int, batch: Feeds) -> Filled:
        """Begin to copy the inputs of a batch into a slot."""
        return slot, batch, self._filler.submit(self._slots[slot][0].put, list(batch.values()), self._copy)

    def _start(self, runner: BatchRunner, filled: Filled) -> Started:
        """Start a batch, and return its slot and a function that waits for its results."""
        slot, batch, records = filled
        named = zip(batch, records.result(), strict=True)
        job = {"slot": slot, "inputs": [(name, -1, record) for name, record in named]}
        results = runner.start(job, runner.ahead(job)())
        return slot, lambda: self._slots[slot][1].views(results())


@functools.lru_cache(maxsize=4)
def _pipeline(recipe: ModelRecipe) -> BatchPipeline:
    return BatchPipeline(loaded(recipe))


def loaded_pipeline(recipe: ModelRecipe) -> BatchPipeline:
    """Return the pipeline of a recipe, which is made once in each process."""
    with _making:
        return _pipeline(recipe)


def _close(slots: Sequence[tuple[SharedBlock, SharedBlock]]) -> None:
    for pair in slots:
        for block in pair:
            block.close()
