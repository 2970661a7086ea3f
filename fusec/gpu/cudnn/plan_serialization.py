"""Build and serialize plans for a described GPU in worker processes, without a GPU or driver.

Such a plan was read and run on an H200. Without a device cuDNN does not offer some engines. So several plans are built
for each graph, and the device chooses the best.
"""

from __future__ import annotations

import base64
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any

from fusec.errors import ExecutionError, TargetError
from fusec.gpu.cudnn.engine_ids import PYTHON_ENGINES, knobs_of
from fusec.gpu.cudnn.error_messages import reason_of
from fusec.gpu.cudnn.legality import most_workers
from fusec.gpu.cudnn.legality_worker import Answer, serve
from fusec.gpu.cudnn.worker_process import EndedError, WorkerDeath, WorkerProcess
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.known_bugs import wrong_plan
from fusec.plans.plan_record import BLAS, Choice, Entry, Knobs
from fusec.targets.target import Target

SEVERAL = 4  # plans a graph when none is named: a runtime-compiled one takes long (benchmarks/builds.py)
# Engines that cuDNN 9.19 offers on an H200 and does not build devicelessly, not even when named.
DEVICE_ONLY = frozenset({4, 53})
# The version of cuDNN from which on its frontend's own tests read serialized plans without a handle.
READS_WITHOUT_HANDLE = 91100
_MODULE = "fusec.gpu.cudnn.plan_serialization"


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
    """Build and serialize plans of graphs for a target, by graph key.

    choices: the plans to build, by key; others get the first `count` plans that cuDNN offers and builds
    skip: plans not to build, by key, such as those in quarantine

    A named plan of an engine that needs a device (DEVICE_ONLY), or of cuBLASLt, has no blob.

    Raises TargetError when cuDNN does not load, builds no plan of a graph, or does not build a named plan.
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
    lock, ended = threading.Lock(), threading.Event()

    def start() -> WorkerProcess:
        with lock:  # listed before it is up, so that it is ended with the others
            if ended.is_set():
                raise EndedError
            worker = WorkerProcess(target, False, _MODULE)
            started.append(worker)
        worker.wait_ready()
        return worker

    def work(key: str) -> dict[str, Any]:
        try:
            worker = idle.get_nowait()
        except Empty:
            worker = start()
        answer = _answer(worker, by_key[key], questions[key])
        idle.put(worker)
        return answer

    pool = ThreadPoolExecutor(min(workers or most_workers(), max(len(by_key), 1)))
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
        with lock:
            ended.set()
        WorkerProcess.close_all(started)
        pool.shutdown()
    return {key: made[key] for key in by_key}


class Tries:
    """Test if cuDNN builds a plan for the target, in its list or not; one process answers all questions.

    Raises TargetError when cuDNN does not load.
    """

    def __init__(self, target: Target):
        self._target = target
        self._workers: list[WorkerProcess] = []
        self._finalizer = weakref.finalize(self, WorkerProcess.close_all, self._workers)

    def __call__(self, graph: CudnnGraph, choice: Choice) -> bool:
        if not self._workers:
            self._workers.append(WorkerProcess(self._target, False, _MODULE))
            self._workers[0].wait_ready()
        question = {"graph": graph.to_json(), "choices": [choice.to_json()], "skip": [], "count": 1}
        answer = self._workers[0].exchange(question)
        if isinstance(answer, WorkerDeath):
            WorkerProcess.close_all(self._workers)
            return False
        if "defect" in answer:
            raise RuntimeError(f"fusec failed to build a plan of\n{graph}\n{answer['defect']}")
        return any(entry["blob"] for entry in answer.get("entries", ()))


def reload(graph: CudnnGraph, blob: bytes, target: Target) -> int:
    """Read a serialized plan for the target without a GPU, and return its workspace in bytes.

    Only for a blob that is trusted. Raises ExecutionError when cuDNN does not accept it.
    """
    worker = WorkerProcess(target, False, _MODULE)
    try:
        worker.wait_ready()
        question = {"graph": graph.to_json(), "blob": base64.b64encode(blob).decode()}
        return int(_answer(worker, graph, question, ExecutionError)["workspace"])
    finally:
        worker.close()


def revive(blob: bytes, handle: Any) -> Any:
    """Read a serialized plan on this machine's GPU, as a frontend graph that executes by uid.

    A precompiled plan is read in less than a millisecond. Only for a blob that is trusted, because it holds machine
    code. Raises ExecutionError when cuDNN does not accept it.
    """
    import cudnn  # present wherever there is a handle
    import cupy

    declined = (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError)
    properties = _properties(cudnn.backend_version(), int(cupy.cuda.runtime.getDevice()))
    if properties is not None:
        # Reading for a handle runs the plan once within a capture that is thrown away, which takes several times as
        # long as the rest. Reading for the device does not.
        graph = cudnn.pygraph(device_property=properties)
        try:
            graph.deserialize(list(blob))
            return graph
        except declined:  # reading for the handle may work, or tells what is wrong
            pass
    graph = cudnn.pygraph()
    try:
        graph.deserialize(handle, list(blob))
    except declined as error:
        raise ExecutionError(f"cuDNN does not read a serialized plan: {', '.join(reason_of(error))}") from error
    return graph


@cache
def _properties(version: int, device: int) -> Any:
    """Return cuDNN's description of a GPU; None for a version that does not read plans by it."""
    import cudnn  # as above

    return cudnn.create_device_properties(device) if version >= READS_WITHOUT_HANDLE else None


def _answer(
    worker: WorkerProcess, graph: CudnnGraph, question: dict[str, Any], refusal: type[Exception] = TargetError
) -> dict[str, Any]:
    answer = worker.exchange(question)
    if isinstance(answer, WorkerDeath):
        raise refusal(f"no plan was built: {answer.words}; the graph is\n{graph}")
    if "defect" in answer:
        raise RuntimeError(f"fusec failed to serialize plans of\n{graph}\n{answer['defect']}")
    if "failed" in answer:
        raise refusal(f"{answer['failed']}; the graph is\n{graph}")
    return answer


def _entry(data: Mapping[str, Any]) -> Entry:
    blob = data["blob"]
    return Entry(Choice.from_json(data["choice"]), None if blob is None else base64.b64decode(blob))


# the child's side ----------------------------------------------------------------------------------


class _Serializer:
    """Builder that serializes plans for a target, and reads one back."""

    def __init__(self, target: Target):
        import cudnn  # only after the driver and NVRTC are loaded

        self.cudnn = cudnn
        self.target = target
        self.declined = (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        from fusec.gpu.cudnn.emit import emit

        graph = CudnnGraph.from_json(question["graph"])
        g = emit(graph, target=self.target)
        if "blob" in question:
            try:
                g.deserialize(list(base64.b64decode(question["blob"])))
                return {"workspace": g.get_workspace_size()}
            except self.declined as error:
                return {"failed": f"cuDNN does not read this serialized plan: {': '.join(reason_of(error))}"}
        try:
            g.validate()
            g.build_operation_graph()
            g.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        except self.declined as error:
            return {"failed": f"cuDNN has no plan for {self.target.name}: {': '.join(reason_of(error))}"}
        if not graph.tensor_cores:
            g.deselect_numeric_notes([self.cudnn.numerical_note.TENSOR_CORE])
        named = [Choice.from_json(choice) for choice in question["choices"]]
        if named:
            return self._named(g, named)
        skip = {(engine, tuple((k, v) for k, v in knobs)) for engine, knobs in question["skip"]}
        return self._first(g, graph, skip, question["count"])

    def _named(self, g: Any, named: list[Choice]) -> dict[str, Any]:
        offered = {self._identity(g, i): i for i in range(g.get_execution_plan_count())}
        entries: list[dict[str, Any]] = []
        for choice in named:
            if choice.engine == BLAS:  # cuBLASLt does not run without a device
                entries.append({"choice": choice.to_json(), "blob": None})
                continue
            try:
                index = offered.get(choice.identity)
                if index is None:  # not in its list without a device, but it may build
                    g.create_execution_plan(choice.engine, {self.cudnn.knob_type(k): v for k, v in choice.knobs})
                    index = g.get_execution_plan_count() - 1
                entries.append(self._built(g, index, choice))
            except self.declined as error:
                if choice.engine in DEVICE_ONLY:
                    entries.append({"choice": choice.to_json(), "blob": None})
                    continue
                what = f"engine {choice.engine} with knobs {dict(choice.knobs)}"
                return {"failed": f"cuDNN builds no plan of {what} for {self.target.name}: {reason_of(error)[1]}"}
        return {"entries": entries}

    def _first(self, g: Any, graph: CudnnGraph, skip: set[tuple[int, Knobs]], count: int) -> dict[str, Any]:
        entries: list[dict[str, Any]] = []
        seen: set[tuple[int, Knobs]] = set(skip)
        reason = "it offers none that may be used"
        for index in range(g.get_execution_plan_count()):
            engine, knobs = identity = self._identity(g, index)
            if identity in seen or not 0 <= engine < PYTHON_ENGINES or wrong_plan(graph, engine, dict(knobs)):
                continue
            seen.add(identity)
            try:
                entries.append(
                    self._built(g, index, Choice(engine, knobs, complete=False))
                )  # the device may know a better
            except self.declined as error:
                reason = reason_of(error)[1]
            if len(entries) == count:
                break
        return {"entries": entries} if entries else {"failed": f"no plan for {self.target.name} was built: {reason}"}

    @staticmethod
    def _identity(g: Any, index: int) -> tuple[int, Knobs]:
        engine, knobs = g.get_engine_and_knobs_at_index(index)
        return int(engine), tuple(sorted(knobs_of(knobs).items()))

    @staticmethod
    def _built(g: Any, index: int, choice: Choice) -> dict[str, Any]:
        g.build_plan_at_index(index)  # also selects it for `serialize`
        choice = replace(choice, workspace_bytes=int(g.get_workspace_size_plan_at_index(index)))
        return {"choice": choice.to_json(), "blob": base64.b64encode(bytes(g.serialize())).decode()}


def main(name: str, device: bool) -> int:
    """Run a worker that serializes plans: see `legality_worker.serve`."""

    def begin(target: Target) -> tuple[Any, Answer]:
        builder = _Serializer(target)
        return builder.cudnn, builder.answer

    return serve(name, device, begin)
