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
from typing import Any, NoReturn, TypeAlias

from fusec.errors import FusecError
from fusec.ir import DType
from fusec.scale.batch_runner import BatchRunner, Feeds, Results, transfer_for
from fusec.scale.model_recipe import ModelRecipe
from fusec.scale.shared_block import SharedBlock
from fusec.system.json_child import ParentPipe

Jobs: TypeAlias = "queue.SimpleQueue[tuple[dict[str, Any], Callable[[], Feeds]]]"
Started: TypeAlias = "queue.Queue[tuple[dict[str, Any], Results]]"


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
    model = ModelRecipe(**start["model"]).executable()
    slots = [(SharedBlock(inputs), SharedBlock(results)) for inputs, results in start["slots"]]
    lent = [SharedBlock(handle) for handle in start["lent"]]
    return BatchRunner(model, slots, lent, transfer_for(model))
