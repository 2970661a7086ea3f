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
from typing import TYPE_CHECKING, Any

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


class BatchRunner:
    """Runs batches of one model.

    slots: for each batch that may be in flight, the blocks of its inputs and of its results.
    lent: blocks that the caller of the pool fills, in place of a slot's inputs.
    upload: copies inputs to the device ahead of their run; None on the host.
    """

    def __init__(self, model: Runnable, slots: Slots, lent: Sequence[SharedBlock], upload: Upload | None):
        self.model = model
        self.slots, self.lent = slots, lent
        self._upload = upload
        self._names = [spec.name for spec in model.inputs]

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

    def run(self, job: Mapping[str, Any], feeds: Feeds) -> list[Record]:
        """Run a batch and return records of its results."""
        from fusec.runtime import Executable

        block = self.slots[job["slot"]][1]
        if isinstance(self.model, Executable):  # its shapes are known, so that results need no copy
            specs = self.model.outputs
            records = layout([(spec.dtype, spec.shape) for spec in specs])
            places = block.views(records)
            self.model.run(None, feeds, out={spec.name: place for spec, place in zip(specs, places, strict=True)})
            return records
        return block.put([np.asarray(array) for array in self.model.run(None, dict(feeds))])


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
    jobs: queue.SimpleQueue[tuple[dict[str, Any], Callable[[], Feeds]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(runner, jobs), daemon=True).start()
    while True:
        job, feeds = jobs.get()
        pipe.tell({"job": job["job"], **_answer(lambda: runner.run(job, feeds()))})  # noqa: B023  # called now


def _listen(runner: BatchRunner, jobs: queue.SimpleQueue[Any]) -> None:
    """Read batches, and start to copy each to the device while the one before it runs."""
    for line in sys.stdin:
        job = json.loads(line)
        try:
            jobs.put((job, runner.ahead(job)))
        except Exception as error:  # noqa: BLE001  # it is the answer to this batch
            jobs.put((job, _raising(error)))
    os._exit(0)  # the parent has closed the pool


def _raising(error: Exception) -> Callable[[], Feeds]:
    def fail() -> Feeds:
        raise error

    return fail


def _answer(run: Callable[[], list[Record]]) -> dict[str, Any]:
    try:
        return {"results": run()}
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
    upload: Upload | None = None
    if isinstance(model, Executable) and model.backend.xp is not np:
        from fusec.scale.device_upload import DeviceUpload  # needs CuPy

        upload = DeviceUpload()
    return BatchRunner(model, slots, lent, upload)
