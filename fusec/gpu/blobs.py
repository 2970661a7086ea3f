"""Serialized plans for a described GPU, made in child processes: no GPU and no driver are needed.

A plan so made was deserialized and run on an H200. cuDNN leaves some engines out of what it offers
devicelessly, so the best plan is the device's to choose: several are made for each graph.
"""

from __future__ import annotations

import base64
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import SimpleQueue
from typing import Any

from fusec.cudnn_graph import CudnnGraph
from fusec.errors import ExecutionError, TargetError
from fusec.gpu.oracle import MAX_WORKERS
from fusec.gpu.process import Died, WorkerProcess
from fusec.gpu.reasons import reason_of
from fusec.plans import Choice, Entry, Knobs
from fusec.target import Target

SEVERAL = 4  # plans a graph when none is named: a runtime-compiled one takes long (benchmarks/builds.py)


def serialize(
    graphs: Sequence[CudnnGraph],
    target: Target,
    *,
    choices: Mapping[str, Sequence[Choice]] | None = None,
    skip: Mapping[str, Collection[tuple[int, Knobs]]] | None = None,
    count: int = SEVERAL,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, tuple[Entry, ...]]:
    """For each graph, by its key, plans built and serialized for the target: those of `choices` (by key),
    else the first `count` that cuDNN offers and builds, without those of `skip` (such as quarantined ones).
    A named plan of an engine that comes up on the device alone (DEVICE_ONLY), or of cuBLASLt, has no blob.

    Raises TargetError if cuDNN does not come up, builds no plan of a graph, or not one that was named.
    """
    questions: dict[str, dict[str, Any]] = {}
    by_key = {graph.key: graph for graph in graphs}
    for key, graph in by_key.items():
        named = [choice.to_json() for choice in (choices or {}).get(key, ())]
        left_out = [[engine, [list(pair) for pair in knobs]] for engine, knobs in (skip or {}).get(key, ())]
        questions[key] = {"graph": graph.to_json(), "choices": named, "skip": left_out, "count": count}
    made: dict[str, tuple[Entry, ...]] = {}
    idle: SimpleQueue[WorkerProcess] = SimpleQueue()
    started: list[WorkerProcess] = []

    def work(key: str) -> dict[str, Any]:
        if idle.empty():
            worker = WorkerProcess(target, False)
            started.append(worker)
        else:
            worker = idle.get()
        answer = _answer(worker, by_key[key], questions[key])
        idle.put(worker)
        return answer

    # as many workers as threads: a thread finds an idle one, or there are fewer than threads
    pool = ThreadPoolExecutor(min(workers or os.cpu_count() or 1, MAX_WORKERS, max(len(by_key), 1)))
    try:
        futures = {pool.submit(work, key): key for key in by_key}
        for done, future in enumerate(as_completed(futures), 1):
            made[futures[future]] = tuple(map(_entry, future.result()["entries"]))
            if progress is not None:
                progress(done, len(futures))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        for worker in started:
            worker.close()
        pool.shutdown()
    return {key: made[key] for key in by_key}


class Tries:
    """Whether cuDNN builds a plan for the target, in its list or not; one process answers all questions.
    TargetError if cuDNN does not come up."""

    def __init__(self, target: Target):
        self._target = target
        self._workers: list[WorkerProcess] = []
        self._finalizer = weakref.finalize(self, _close, self._workers)

    def __call__(self, graph: CudnnGraph, choice: Choice) -> bool:
        if not self._workers:
            self._workers.append(WorkerProcess(self._target, False))
        question = {"graph": graph.to_json(), "choices": [choice.to_json()], "skip": [], "count": 1}
        answer = self._workers[0].exchange(question)
        if isinstance(answer, Died):
            _close(self._workers)
            return False
        if "defect" in answer:
            raise RuntimeError(f"fusec failed to build a plan of\n{graph}\n{answer['defect']}")
        return any(entry["blob"] for entry in answer.get("entries", ()))


def _close(workers: list[WorkerProcess]) -> None:
    while workers:
        workers.pop().close()


def reload(graph: CudnnGraph, blob: bytes, target: Target) -> int:
    """Let cuDNN read a serialized plan for the target, without a GPU; its workspace in bytes.

    ExecutionError if cuDNN does not take it. Only for a blob that is trusted.
    """
    worker = WorkerProcess(target, False)
    try:
        question = {"graph": graph.to_json(), "blob": base64.b64encode(blob).decode()}
        return int(_answer(worker, graph, question, ExecutionError)["workspace"])
    finally:
        worker.close()


def revive(blob: bytes, handle: Any) -> Any:
    """A serialized plan on this machine's GPU, as a frontend graph to execute by uid, in milliseconds:
    `graph.execute(addresses, workspace, handle)`, `graph.get_workspace_size()`.

    ExecutionError if cuDNN does not take it. Only for a blob that is trusted: it holds machine code.
    """
    import cudnn  # present wherever there is a handle

    graph = cudnn.pygraph()
    try:
        graph.deserialize(handle, list(blob))
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        raise ExecutionError(f"cuDNN does not read a serialized plan: {', '.join(reason_of(error))}") from error
    return graph


def _answer(
    worker: WorkerProcess, graph: CudnnGraph, question: dict[str, Any], refusal: type[Exception] = TargetError
) -> dict[str, Any]:
    answer = worker.exchange(question)
    if isinstance(answer, Died):
        raise refusal(f"no plan was built: {answer.words}; the graph is\n{graph}")
    if "defect" in answer:
        raise RuntimeError(f"fusec failed to serialize plans of\n{graph}\n{answer['defect']}")
    if "failed" in answer:
        raise refusal(f"{answer['failed']}; the graph is\n{graph}")
    return answer


def _entry(data: Mapping[str, Any]) -> Entry:
    blob = data["blob"]
    return Entry(Choice.from_json(data["choice"]), None if blob is None else base64.b64decode(blob))
