"""What is compiled in the processes that cuDNN was asked in, while this one goes on: plans at run time, and kernels.

Such a build takes most of a second (benchmarks/builds.py) and holds Python's lock, so threads would not help. A plan
comes back as cuDNN serialized it, and is read in milliseconds.
"""

from __future__ import annotations

import base64
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

from fusec.errors import ExecutionError, TargetError
from fusec.gpu.cudnn.worker_process import EndedError, WorkerDeath
from fusec.gpu.kernels.codegen.kernel import Launch
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import Choice, Knobs
from fusec.plans.verdict import Plan

LEAST = 3  # plans: fewer are built here before a process is up

Order = tuple[str, int, Knobs]  # a graph's key, and the plan's engine and knobs
Answer = bytes | Exception | None  # a plan; why there is none; or that it has to be built here


class Workers(Protocol):
    """Processes that build plans: an `Oracle` for this machine's GPU."""

    built: dict[str, tuple[Plan, bytes]]

    @property
    def workers(self) -> int: ...

    def exchange(self, question: dict[str, Any]) -> tuple[dict[str, Any] | WorkerDeath, Any]: ...

    def close(self) -> None: ...


class BuildPool:
    """Has plans built by a crew, several at once.

    deterministic: plans that cuDNN says give other bits from run to run do not build. ends: the crew's processes end
    when all is chosen: each has a context on the device.
    """

    def __init__(self, crew: Workers, deterministic: bool = False, ends: bool = False):
        self._crew, self._limit, self._deterministic, self._ends = crew, crew.workers, deterministic, ends
        self._changed = threading.Condition()
        self._waiting: dict[Order, CudnnGraph] = {}  # in this order
        self._kernels: list[Launch] = []  # behind these
        self._begun: set[Order] = set()
        self._answers: dict[Order, Answer] = {}
        self._threads = 0
        self._failed = ""  # why no process starts, until that was told

    def expect(self, orders: Sequence[tuple[CudnnGraph, Choice]]) -> None:
        """What will be asked for, in this order; what was expected before and is not begun is forgotten."""
        with self._changed:
            wanted = {(graph.key, *choice.identity): graph for graph, choice in orders}
            there = {*self._begun, *self._answers, *self._built()}
            self._waiting = {order: graph for order, graph in wanted.items() if order not in there}
            if not self._limit or (len(self._waiting) < LEAST and not self._threads):
                self._waiting.clear()
            self._begin()

    def expect_kernels(self, launches: Sequence[Launch]) -> None:
        """Which kernels this process will compile, by CuPy, which then finds them on disk; none is waited for. What was
        said before and is not begun is forgotten."""
        with self._changed:
            self._kernels = list(launches) if self._limit and (self._threads or len(launches) >= LEAST) else []
            self._begin()

    def _begin(self) -> None:
        for _ in range(self._threads, min(self._limit, len(self._waiting) + len(self._kernels))):
            self._threads += 1
            threading.Thread(target=self._work, name="fusec-builder", daemon=True).start()

    def plan(self, graph: CudnnGraph, choice: Choice) -> bytes | None:
        """The plan, serialized, as soon as it is built; None if it was not expected or has to be built here.
        ExecutionError if it killed the process that built it."""
        order = (graph.key, *choice.identity)
        with self._changed:
            if (built := self._built().get(order)) is not None:
                return built
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
        """What is not begun is forgotten, and processes end if they shall; when something is expected again, others
        start."""
        with self._changed:
            self._waiting.clear()
            self._kernels.clear()
            self._answers.clear()
        if self._ends:
            self._crew.built.clear()
            # each takes a tenth of a second, for which nobody waits
            threading.Thread(target=self._crew.close, name="fusec-builders-end", daemon=True).start()

    def _built(self) -> dict[Order, bytes]:
        """What was built to find out whether cuDNN takes a graph."""
        found = {} if self._deterministic else self._crew.built
        return {(key, plan.engine, plan.knobs): blob for key, (plan, blob) in found.items()}

    def _work(self) -> None:
        """Have compiled what is waiting, one after the other, until nothing is."""
        while (task := self._next()) is not None:
            if isinstance(task, Launch):
                self._compile(task)
                continue
            order, graph = task
            answer: Answer = None
            try:
                answer = self._answer(order, graph)
            except EndedError:  # the crew was closed: nobody waits for this one
                pass
            except TargetError as error:
                self._give_up(str(error))
            except RuntimeError as error:  # a defect of ours, which whoever asked is told
                answer = error
            finally:
                with self._changed:
                    self._begun.discard(order)
                    self._answers[order] = answer
                    self._changed.notify_all()

    def _compile(self, launch: Launch) -> None:
        try:
            own = {"meets": launch.meets, "architecture": launch.architecture}
            self._crew.exchange({"kernel": launch.source, "entry": launch.entry, **own})
        except EndedError:
            pass
        except TargetError as error:
            self._give_up(str(error))
        except RuntimeError:  # whoever launches it compiles it, too, and is told
            with self._changed:
                self._kernels.clear()

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self._limit, self._failed = 0, reason
            self._waiting.clear()
            self._kernels.clear()

    def _next(self) -> tuple[Order, CudnnGraph] | Launch | None:
        with self._changed:
            if not self._waiting and self._kernels:
                return self._kernels.pop(0)
            if not self._waiting:
                self._threads -= 1
                return None
            order = next(iter(self._waiting))
            self._begun.add(order)
            return order, self._waiting.pop(order)

    def _answer(self, order: Order, graph: CudnnGraph) -> Answer:
        _, engine, knobs = order
        question = {"graph": graph.to_json(), "choice": Choice(engine, knobs).to_json(), "all_sizes": False}
        answer, _ = self._crew.exchange({**question, "deterministic": self._deterministic})
        if isinstance(answer, WorkerDeath):
            return ExecutionError(answer.words) if answer.by_own_fault else None
        if "blob" not in answer or Choice.from_json(answer["choice"]).identity != (engine, knobs):
            return None  # why, it says here
        return base64.b64decode(answer["blob"])
