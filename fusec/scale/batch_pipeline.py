"""Run batches of one model in this process. On a GPU, later batches are copied there while one runs."""

from __future__ import annotations

import contextlib
import functools
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
_making = threading.Lock()


class BatchPipeline:
    """Runs batches of one model in order. Calls from several threads take turns.

    Copies between the GPU and memory that is not page-locked would wait for each other and for the model. So batches go
    through page-locked memory, which is used again for later ones. A thread fills it, because to copy a batch can take
    as long as to run one.
    """

    def __init__(self, model: Runnable):
        self.model = model
        self._turn = threading.Lock()
        self._copy = ThreadedCopy(1)
        self._slots: list[tuple[SharedBlock, SharedBlock]] = []
        self._runner: BatchRunner | None = None
        if transfer := transfer_for(model):
            self._slots = [(SharedBlock(), SharedBlock()) for _ in range(DEPTH)]
            self._runner = BatchRunner(model, self._slots, (), transfer)
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
        with self._turn:
            filling, started = deque[Filled](), deque[Callable[[], Arrays]]()
            try:
                for number, batch in enumerate(batches):
                    if len(filling) + len(started) == DEPTH:
                        take(started.popleft()())
                    filling.append(self._fill(number % DEPTH, batch))
                    if len(filling) > 1:
                        started.append(self._start(self._runner, filling.popleft()))
                while filling:
                    started.append(self._start(self._runner, filling.popleft()))
                while started:
                    take(started.popleft()())
            finally:  # after an error, nothing may use a slot any more when the next call fills it
                for _, _, records in filling:
                    records.exception()
                for results in started:
                    with contextlib.suppress(ExecutionError):
                        results()

    def _fill(self, slot: int, batch: Feeds) -> Filled:
        """Begin to copy the inputs of a batch into its slot."""
        return slot, batch, self._filler.submit(self._slots[slot][0].put, list(batch.values()), self._copy)

    def _start(self, runner: BatchRunner, filled: Filled) -> Callable[[], Arrays]:
        """Start a batch, and return a function that waits for its results."""
        slot, batch, records = filled
        named = zip(batch, records.result(), strict=True)
        job = {"slot": slot, "inputs": [(name, -1, record) for name, record in named]}
        results = runner.start(job, runner.ahead(job)())
        return lambda: self._slots[slot][1].views(results())


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
