"""Build plans in worker processes.

A plan that is compiled at run time takes most of a second (benchmarks/compile_time/plan_builds.py) and holds Python's
lock, so threads would not help. A worker returns the plan serialized, and this process reads it in milliseconds.
"""

from __future__ import annotations

import base64
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

from fusec.errors import ExecutionError, TargetError
from fusec.gpu.cudnn.worker_processes.worker_process import EndedError, WorkerDeath
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import Choice, Knobs
from fusec.plans.verdict import Plan

MIN_PLANS = 3  # fewer are built here before a worker is ready

Order = tuple[str, int, Knobs]  # a graph's key, and the plan's engine and knobs
Answer = bytes | Exception | None  # a serialized plan, the reason why there is none, or None: build it here


class Workers(Protocol):
    """Worker processes that build plans: an `Oracle` for this machine's GPU."""

    built: dict[str, tuple[Plan, bytes]]
    plan_filter: PlanFilter

    @property
    def workers(self) -> int: ...

    def exchange(self, question: dict[str, Any]) -> tuple[dict[str, Any] | WorkerDeath, Any]: ...

    def plans(self, graph: CudnnGraph) -> tuple[Plan, ...]: ...

    def assumed_from(self, graph: CudnnGraph) -> CudnnGraph | None: ...

    def close(self) -> None: ...


class BuildPool:
    """Pool of workers that build several plans at the same time.

    plan_filter: the plans that may be used; default: all
    ends: end the workers when all plans are chosen, because each holds a CUDA context
    """

    def __init__(self, workers: Workers, plan_filter: PlanFilter | None = None, ends: bool = False):
        self._workers, self._limit = workers, workers.workers
        self._plan_filter, self._ends = plan_filter or PlanFilter(), ends
        self._changed = threading.Condition()
        self._waiting: dict[Order, CudnnGraph] = {}  # in this order
        self._started: set[Order] = set()
        self._answers: dict[Order, Answer] = {}
        self._threads = 0
        self._failed = ""  # why no worker starts, until the user was warned

    def expect(self, orders: Sequence[tuple[CudnnGraph, Choice]]) -> None:
        """Announce the plans to build, in order. They replace those announced before whose build has not started."""
        with self._changed:
            wanted = {(graph.key, *choice.identity): graph for graph, choice in orders}
            there = {*self._started, *self._answers, *self._built()}
            self._waiting = {order: graph for order, graph in wanted.items() if order not in there}
            if not self._limit or (len(self._waiting) < MIN_PLANS and not self._threads):
                self._waiting.clear()
            self._start_threads()

    def _start_threads(self) -> None:
        for _ in range(self._threads, min(self._limit, len(self._waiting))):
            self._threads += 1
            threading.Thread(target=self._work, name="fusec-builder", daemon=True).start()

    def plan(self, graph: CudnnGraph, choice: Choice) -> bytes | None:
        """Wait for a plan and return it serialized; None if it was not announced, or must be built here.

        Raises ExecutionError when the plan killed the worker that built it.
        """
        order = (graph.key, *choice.identity)
        with self._changed:
            if (built := self._built().get(order)) is not None:
                return built
            if order in self._waiting:  # build it next
                self._waiting = {order: self._waiting.pop(order), **self._waiting}
            while order in self._waiting or order in self._started:
                self._changed.wait()
            answer = self._answers.pop(order, None)
            failed, self._failed = self._failed, ""
        if failed:
            warnings.warn(f"plans are compiled one after the other, because no worker starts: {failed}", stacklevel=2)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def offered(self, graph: CudnnGraph) -> tuple[Plan, ...]:
        """Return the plans that cuDNN offered a worker for a graph, in its order; none if other plans may be used here.

        Of a graph for which cuDNN was not asked, because of a similar one, none is known.
        """
        workers = self._workers
        only_built = not graph.tensor_cores or not (self._plan_filter.is_default and workers.plan_filter.is_default)
        return () if only_built or workers.assumed_from(graph) is not None else workers.plans(graph)

    def close(self) -> None:
        """Drop what is waiting, and end the workers if `ends` is set. Later announcements start new ones."""
        with self._changed:
            self._waiting.clear()
            self._answers.clear()
        if self._ends:
            self._workers.built.clear()
            # in a thread, because ending a worker takes a tenth of a second
            threading.Thread(target=self._workers.close, name="fusec-end-builders", daemon=True).start()

    def _built(self) -> dict[Order, bytes]:
        """Return the plans that were built to judge graphs."""
        # those of workers that a caller lends may be of another filter
        found = self._workers.built if self._plan_filter.is_default else {}
        return {(key, plan.engine, plan.knobs): blob for key, (plan, blob) in found.items()}

    def _work(self) -> None:
        """Build what is waiting, until nothing is left."""
        while (task := self._next()) is not None:
            order, graph = task
            answer: Answer = None
            try:
                answer = self._answer(order, graph)
            except EndedError:  # the workers were closed, so nothing waits for this plan
                pass
            except TargetError as error:
                self._give_up(str(error))
            except RuntimeError as error:  # a defect of fusec, raised where the plan is asked for
                answer = error
            finally:
                with self._changed:
                    self._started.discard(order)
                    self._answers[order] = answer
                    self._changed.notify_all()

    def _give_up(self, reason: str) -> None:
        with self._changed:
            if self._limit:  # else another thread gave up before, and the user is warned once
                self._limit, self._failed = 0, reason
            self._waiting.clear()

    def _next(self) -> tuple[Order, CudnnGraph] | None:
        with self._changed:
            if not self._waiting:
                self._threads -= 1
                return None
            order = next(iter(self._waiting))
            self._started.add(order)
            return order, self._waiting.pop(order)

    def _answer(self, order: Order, graph: CudnnGraph) -> Answer:
        _, engine, knobs = order
        question = {"ask": "plan", "graph": graph.to_json(), "choice": Choice(engine, knobs).to_json()}
        question |= {"all_sizes": False, "filter": self._plan_filter.to_json()}
        answer, _ = self._workers.exchange(question)
        if isinstance(answer, WorkerDeath):
            return ExecutionError(answer.words) if answer.by_own_fault else None
        if "blob" not in answer or Choice.from_json(answer["choice"]).identity != (engine, knobs):
            return None  # built here, so that the error has its reason
        return base64.b64decode(answer["blob"])
