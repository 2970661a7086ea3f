"""Run batches of requests on a model that a worker process has loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from fusec.runtime import Executable
from fusec.serving.batch_sizes import RestShapes
from fusec.serving.predictor import Predictor
from fusec.serving.served_model import ANY, describe
from fusec.serving.server.request_frames import RequestForm
from fusec.serving.server.worker.batch_buffer import BatchBuffer, Feeds, PendingResults, fetch
from fusec.serving.server.worker.batch_queue import BatchGroup
from fusec.system.dataclass import dataclass
from fusec.system.threaded_copy import ThreadedCopy

Arrays = Mapping[str, np.ndarray[Any, Any]]
_MOST_GROUPS = 1024  # that are remembered


@dataclass(frozen=True)
class PreparedBatch:
    """A batch whose rows are gathered. buffer: where they are, to be used again; None for a request that runs alone."""

    feeds: Feeds
    buffer: tuple[RestShapes, int, BatchBuffer] | None


class LoadedModel:
    """A model with the buffers of its batches.

    takes_other_shapes: the front end cannot tell if shapes fit the file's programs.
    """

    def __init__(self, name: str, predictor: Predictor, preferred: Sequence[int], copy: ThreadedCopy):
        """Describe a loaded predictor.

        preferred: batch sizes to form, of those the file has; () means all.
        copy: gathers the rows of requests.
        """
        self.predictor = predictor
        self._copy = copy
        self._preferred = frozenset(preferred)
        self._groups: dict[RequestForm, BatchGroup] = {}
        self._buffers: dict[tuple[RestShapes, int], list[BatchBuffer]] = defaultdict(list)
        sizes = predictor.sizes.by_rest.values() if predictor.sizes.largest else ()
        self.served = described = describe(
            name, predictor, sorted({size for each in sizes for size in self._formed(each)})
        )

        start = 1 if described.max_batch else 0
        self.takes_other_shapes = any(each.shape is None or ANY in each.shape[start:] for each in described.inputs)

    def _formed(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the batch sizes to form; all if none of them is preferred."""
        return tuple(size for size in sizes if size in self._preferred) or sizes

    def group(self, form: RequestForm) -> BatchGroup:
        """Return the group of requests: those of one group may share a batch."""
        if (found := self._groups.get(form)) is None:
            by_name = {name: shape for name, _, shape, _ in form.inputs}
            rest = tuple(by_name[spec.name][1:] for spec in self.served.inputs)
            found = BatchGroup((self.served.name, rest), self._formed(self.predictor.sizes.of(rest)))
            if len(self._groups) < _MOST_GROUPS:
                self._groups[form] = found
        return found

    @property
    def xp(self) -> Any:
        """Return the module of the arrays of batches: cupy on a GPU, else numpy."""
        programs = [(rest, sizes[0]) for rest, sizes in self.predictor.sizes.by_rest.items() if sizes]
        return self._program(*programs[0]).backend.xp if programs and self.served.max_batch else np

    def gather(self, group: BatchGroup, requests: Sequence[Arrays], size: int, page_locked: bool) -> PreparedBatch:
        """Gather the rows of requests in a buffer.

        size: rows of the batch; 0 runs the only request as it is. page_locked: requests are in page-locked memory.
        """
        if not size:
            return PreparedBatch(Feeds({name: np.array(array) for name, array in requests[0].items()}), None)
        _, rest = cast("tuple[str, RestShapes]", group.key)  # as `group` made it
        free = self._buffers[rest, size]
        buffer = free.pop() if free else BatchBuffer(self._program(rest, size), self._copy)
        return PreparedBatch(buffer.fill(requests, size, page_locked), (rest, size, buffer))

    def _program(self, rest: RestShapes, size: int) -> Executable:
        executable = self.predictor.executable
        if isinstance(executable, Executable):
            return executable
        names = [spec.name for spec in executable.inputs]
        program = executable.at({name: (size, *dims) for name, dims in zip(names, rest, strict=True)})
        assert isinstance(program, Executable), "files hold no host steps"
        return program

    def run(self, batch: PreparedBatch, outputs: Sequence[str]) -> PendingResults:
        """Run a batch; on a GPU, the results are on their way. `release` the batch once they are there.

        Raises ExecutionError if a request that runs alone does not fit the file's programs.
        """
        if batch.buffer is None:
            return PendingResults(self.predictor(batch.feeds.arrays, outputs))
        rest, size, _ = batch.buffer
        program = self._program(rest, size)
        batch.feeds.wait()
        return fetch(program, outputs, program.run(outputs, batch.feeds.arrays))

    def release(self, batch: PreparedBatch) -> None:
        """Use the buffer of a batch for the next one."""
        if batch.buffer is not None:
            rest, size, buffer = batch.buffer
            self._buffers[rest, size].append(buffer)
