"""Plans that cuDNN compiles at run time, built in processes of their own while this one goes on.

Such a build takes most of a second (benchmarks/builds.py) and holds Python's lock, so threads would not help. A plan
comes back as cuDNN serialized it, and is read in milliseconds.
"""

from __future__ import annotations

import base64
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fusec.cudnn_graph import CudnnGraph
from fusec.errors import ExecutionError, TargetError
from fusec.gpu.process import Died, WorkerProcess
from fusec.plans import Choice, Knobs
from fusec.target import Target
from fusec.verdict import Plan

MOST = 8  # processes, each with a context on the device
BYTES_EACH = 4 << 30  # of its memory that must be free for each: a context takes some 0.5 GB
LEAST = 3  # plans: fewer are built here before a process is up

Order = tuple[str, int, Knobs]  # a graph's key, and the plan's engine and knobs
Answer = bytes | Exception | None  # a plan; why there is none; or that it has to be built here


class Worker(Protocol):
    """Builds what it is asked for, one question at a time."""

    def exchange(self, question: dict[str, Any]) -> dict[str, Any] | Died: ...

    def close(self) -> None: ...


class Builders:
    """At most `limit` processes, started by `start` when there is something to build.

    deterministic: plans that cuDNN says give other bits from run to run do not build. workers: processes to begin with,
    which are this object's from now on. built: plans that are there already, serialized.
    """

    def __init__(
        self,
        start: Callable[[], Worker],
        limit: int,
        deterministic: bool = False,
        workers: Sequence[Worker] = (),
        built: Mapping[Order, bytes] | None = None,
    ):
        self._start, self._limit, self._deterministic = start, max(limit, len(workers)), deterministic
        self._changed = threading.Condition()
        self._waiting: dict[Order, CudnnGraph] = {}  # in this order
        self._begun: set[Order] = set()
        self._answers: dict[Order, Answer] = {**(built or {})}
        self._threads = 0
        self._closed = 0  # how often
        self._failed = ""  # why no process starts, until that was told
        self._idle, self._all = list(workers), list(workers)
        self._finalizer = weakref.finalize(self, _end, self._all)

    def expect(self, orders: Sequence[tuple[CudnnGraph, Choice]]) -> None:
        """What will be asked for, in this order; what was expected before and is not begun is forgotten."""
        with self._changed:
            wanted = {(graph.key, *choice.identity): graph for graph, choice in orders}
            self._waiting = {o: g for o, g in wanted.items() if o not in self._begun and o not in self._answers}
            if not self._limit or (len(self._waiting) < LEAST and not self._all):
                self._waiting.clear()
            for _ in range(self._threads, min(self._limit, len(self._waiting))):
                self._threads += 1
                threading.Thread(target=self._work, name="fusec-builder", daemon=True).start()

    def plan(self, graph: CudnnGraph, choice: Choice) -> bytes | None:
        """The plan, serialized, as soon as it is built; None if it was not expected or cannot be handed over.
        ExecutionError if cuDNN does not build it."""
        order = (graph.key, *choice.identity)
        with self._changed:
            if order in self._waiting:  # it is its turn
                self._waiting = {order: self._waiting.pop(order), **self._waiting}
            while order in self._waiting or order in self._begun:
                self._changed.wait()
            answer = self._answers.pop(order, None)
            failed, self._failed = self._failed, ""
        if failed:
            warnings.warn(f"plans are compiled one after the other, no process for that starts: {failed}", stacklevel=2)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the processes; when something is expected again, others start."""
        with self._changed:
            self._waiting.clear()
            self._answers.clear()
            self._idle.clear()
            self._closed += 1
            for worker in self._all:  # each takes a tenth of a second, for which nobody waits
                threading.Thread(target=worker.close, name="fusec-builder-end", daemon=True).start()
            self._all.clear()

    def _work(self) -> None:
        """Build what is waiting, with a process of one's own, until nothing is."""
        worker: Worker | None = None
        while (task := self._next(worker)) is not None:
            order, graph = task
            answer: Answer = None
            try:
                worker = worker or self._taken()
                answer = None if worker is None else self._answer(worker, order, graph)
            except TargetError as error:
                with self._changed:
                    self._limit, self._failed = 0, str(error)
                    self._waiting.clear()
            finally:
                with self._changed:
                    worker = worker if worker in self._all else None
                    self._begun.discard(order)
                    self._answers[order] = answer
                    self._changed.notify_all()

    def _next(self, worker: Worker | None) -> tuple[Order, CudnnGraph] | None:
        """What to build; None if nothing is waiting, and the process is another thread's then."""
        with self._changed:
            if not self._waiting:
                self._threads -= 1
                self._idle += [] if worker is None else [worker]
                return None
            order = next(iter(self._waiting))
            self._begun.add(order)
            return order, self._waiting.pop(order)

    def _taken(self) -> Worker | None:
        """None if all were ended meanwhile."""
        with self._changed:
            if self._idle:
                return self._idle.pop()
            closed = self._closed
        worker = self._start()
        with self._changed:
            if closed == self._closed:
                self._all.append(worker)
                return worker
        worker.close()
        return None

    def _answer(self, worker: Worker, order: Order, graph: CudnnGraph) -> Answer:
        _, engine, knobs = order
        question = {"graph": graph.to_json(), "choices": [Choice(engine, knobs).to_json()]}
        answer = worker.exchange({**question, "deterministic": self._deterministic})
        if isinstance(answer, Died):
            with self._changed:
                if worker in self._all:
                    self._all.remove(worker)
            worker.close()
            return ExecutionError(answer.words) if answer.by_own_fault else None
        if "defect" in answer:
            return RuntimeError(f"fusec failed to build a plan of\n{graph}\n{answer['defect']}")
        if "failed" in answer:
            return ExecutionError(str(answer["failed"]))
        blob = answer["entries"][0]["blob"]
        return None if blob is None else base64.b64decode(blob)


def builders(
    target: Target,
    free_bytes: int,
    deterministic: bool,
    workers: Sequence[Worker] = (),
    built: Mapping[str, tuple[Plan, bytes]] | None = None,
) -> Builders:
    """Of plans for this machine's GPU, as many as it has cores (one is left for what is timed) and memory for. built:
    plans by graph, without regard to `deterministic`."""
    limit = max(0, min(MOST, (os.cpu_count() or 1) - 1, free_bytes // BYTES_EACH))
    found = {} if deterministic else built or {}
    known = {(key, plan.engine, plan.knobs): blob for key, (plan, blob) in found.items()}
    return Builders(lambda: WorkerProcess(target, True), limit, deterministic, workers, known)


def _end(workers: list[Worker]) -> None:
    while workers:
        workers.pop().close()
