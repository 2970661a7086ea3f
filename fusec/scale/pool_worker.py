"""Run batches in a child process of a pool: JSON lines in and out, arrays in shared memory.

The first line names the model and the shared blocks. The answer is `ready`, or `failed`. Then each line is a batch in
one of the blocks, and its answer says where the results are, or why there are none.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from fusec.errors import ExecutionError, FusecError
from fusec.ir import DType
from fusec.scale.model_recipe import ModelRecipe
from fusec.scale.shared_block import Record, SharedBlock, layout
from fusec.system.json_child import ParentPipe

if TYPE_CHECKING:
    from fusec.scale.model_recipe import Runnable

Feeds = Mapping[str, Any]
Slots = Sequence[tuple[SharedBlock, SharedBlock]]
Upload = Callable[[int, Sequence[SharedBlock], Feeds], Callable[[], Feeds]]
Download = Callable[[SharedBlock, Sequence[np.ndarray[Any, Any]], Sequence[Any]], Callable[[], None]]
Results = Callable[[], list[Record]]  # waits for the results of a batch, and returns their records
Jobs: TypeAlias = "queue.SimpleQueue[tuple[dict[str, Any], Callable[[], Feeds]]]"
Started: TypeAlias = "queue.Queue[tuple[dict[str, Any], Results]]"


class BatchRunner:
    """Runs batches of one model.

    slots: for each batch that may be in flight, the blocks of its inputs and of its results.
    lent: blocks that the caller of the pool fills, in place of a slot's inputs.
    transfer: copies inputs to the device ahead of their run, and results from there; None on the host.
    """

    def __init__(
        self, model: Runnable, slots: Slots, lent: Sequence[SharedBlock], transfer: tuple[Upload, Download] | None
    ):
        self.model = model
        self.slots, self.lent = slots, lent
        self._upload, self._download = transfer or (None, None)
        self._names = [spec.name for spec in model.inputs]
        self._is_plain = all(map(_is_plain, model.outputs))

    @property
    def starts_ahead(self) -> bool:
        """Tell if a batch may start before the one before it is done."""
        return self._download is not None

    def ahead(self, job: Mapping[str, Any]) -> Callable[[], Feeds]:
        """Read the inputs of a batch and start their way to the device; return a function that waits for them."""
        own = self.slots[job["slot"]][0]
        blocks = [own if number < 0 else self.lent[number] for _, number, _ in job["inputs"]]
        records = [record for _, _, record in job["inputs"]]
        feeds = self._named(job, [b.views([record])[0] for b, record in zip(blocks, records, strict=True)])
        if self._upload is None:
            return lambda: feeds
        return self._upload(job["slot"], blocks, feeds)

    def _named(self, job: Mapping[str, Any], arrays: Sequence[np.ndarray[Any, Any]]) -> Feeds:
        given = [name for name, _, _ in job["inputs"]]
        free = [name for name in self._names if name not in given]
        if given.count(None) > len(free):
            raise ExecutionError(f"{len(arrays)} arrays for {len(self._names)} inputs: {', '.join(self._names)}")
        places = iter(free)
        return {next(places) if name is None else name: array for name, array in zip(given, arrays, strict=True)}

    def start(self, job: Mapping[str, Any], feeds: Feeds) -> Results:
        """Run a batch, on a device without waiting for it; return a function that waits for its results."""
        from fusec.runtime import Executable

        block = self.slots[job["slot"]][1]
        if not isinstance(self.model, Executable):
            records = block.put([np.asarray(array) for array in self.model.run(None, dict(feeds))])
            return lambda: records
        specs = self.model.outputs  # their shapes are known, so that results need no copy
        records = layout([(spec.dtype, spec.shape) for spec in specs])
        places = block.views(records)
        if self._download is not None and self._is_plain and not all(map(_on_host, feeds.values())):
            return _after(self._download(block, places, self.model.run(None, feeds)), records)
        self.model.run(None, feeds, out={spec.name: place for spec, place in zip(specs, places, strict=True)})
        return lambda: records


def _on_host(array: Any) -> bool:
    return isinstance(array, np.ndarray)


def _is_plain(spec: Any) -> bool:
    """Tell if CuPy has the type of an output."""
    return spec.dtype is not None and not DType.of(spec.dtype).is_narrow and spec.dtype.name != "bfloat16"


def _after(wait: Callable[[], None], records: list[Record]) -> Results:
    def waited() -> list[Record]:
        wait()
        return records

    return waited


def main() -> None:
    """Load the model and run batches until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends this process
    pipe = ParentPipe()
    start = json.loads(sys.stdin.readline())
    try:
        runner = _runner(start)
    except FusecError as error:
        pipe.tell({"failed": str(error)})
        return
    except Exception:  # noqa: BLE001  # the parent raises it, with this traceback
        pipe.tell({"defect": traceback.format_exc()})
        return
    model = runner.model
    pipe.tell({"ready": {"device": model.device, "inputs": [_declared(spec) for spec in model.inputs]}})
    jobs: Jobs = queue.SimpleQueue()
    started: Started = queue.Queue()
    threading.Thread(target=_listen, args=(runner, jobs), daemon=True).start()
    threading.Thread(target=_finish, args=(pipe, started), daemon=True).start()
    while True:
        start_next(runner, jobs, started)


def start_next(runner: BatchRunner, jobs: Jobs, started: Started) -> None:
    """Start the next batch. One that runs alone starts and ends while no other is in progress."""
    job, feeds = jobs.get()
    alone = job["alone"] or not runner.starts_ahead
    if alone:
        started.join()
    try:
        started.put((job, runner.start(job, feeds())))
    except Exception as error:  # noqa: BLE001  # it is the answer to this batch
        started.put((job, _raising(error)))
    if alone:
        started.join()


def _listen(runner: BatchRunner, jobs: Jobs) -> None:
    """Read batches, and start to copy each to the device while the one before it runs."""
    for line in sys.stdin:
        job = json.loads(line)
        try:
            jobs.put((job, runner.ahead(job)))
        except Exception as error:  # noqa: BLE001  # it is the answer to this batch
            jobs.put((job, _raising(error)))
    os._exit(0)  # the parent has closed the pool


def _finish(pipe: ParentPipe, started: Started) -> NoReturn:
    """Answer batches in the order in which they were started, each when its results are there."""
    while True:
        job, results = started.get()
        pipe.tell({"job": job["job"], **_answer(results)})
        started.task_done()


def _raising(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def _answer(results: Results) -> dict[str, Any]:
    try:
        return {"results": results()}
    except FusecError as error:
        return {"failed": str(error)}
    except Exception:  # noqa: BLE001  # the parent raises it, with this traceback
        return {"defect": traceback.format_exc()}


def _declared(spec: Any) -> tuple[str, str | None, Sequence[int | str] | None]:
    """Return name, dtype and shape of an input."""
    return spec.name, None if spec.dtype is None else DType.of(spec.dtype).value, spec.shape


def _runner(start: Mapping[str, Any]) -> BatchRunner:
    from fusec.runtime import Executable

    model = ModelRecipe(**start["model"]).executable()
    slots = [(SharedBlock(inputs), SharedBlock(results)) for inputs, results in start["slots"]]
    lent = [SharedBlock(handle) for handle in start["lent"]]
    transfer: tuple[Upload, Download] | None = None
    if isinstance(model, Executable) and model.backend.xp is not np:
        from fusec.scale.device_transfer import DeviceDownload, DeviceUpload  # needs CuPy

        transfer = DeviceUpload(), DeviceDownload()
    return BatchRunner(model, slots, lent, transfer)
