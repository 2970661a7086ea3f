"""Build plans for a new input shape from the plans of shapes before, without cuDNN's heuristics.

A plan that is compiled at run time is compiled once more, for all input shapes, if cuDNN has an engine for that. This
happens while the first program runs. From then on a plan for another shape is ready in milliseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.cudnn.legality.similar_graphs import SimilarGraphs, factor
from fusec.gpu.cudnn.plans.plan_serialization import entry_of
from fusec.gpu.cudnn.worker_processes.worker_process import WorkerDeath, WorkerProcess
from fusec.gpu.shape_transfer.predict_graphs import SizedGraph, extrapolate, scale_batch
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import BLAS, Choice, Entry

# A plan is transferred to a graph that is at most this many times larger or smaller; others get cuDNN's first plan.
NEAR = 4
MAX_SIZES = 8  # of a graph that are stored, the first ones
QUICK_S = 0.1  # a kernel that compiles within this time is compiled for each size, because it runs faster then
Ready = tuple[WorkerProcess, Choice]  # the worker that compiled for all sizes, and the plan for that kernel


class SizePlans:
    """Plans of programs for several input shapes; the workers of an oracle build more."""

    def __init__(self, oracle: Oracle):
        self._oracle = oracle
        self._similar = SimilarGraphs()
        self._choices: dict[str, Choice] = {}  # by key of a graph: the choice for its first size
        self._first: dict[str, str] = {}  # by key of a graph: its key in its first size
        self._ready: dict[str, Future[Ready | None]] = {}  # by key in the first size
        self._ran: dict[str, list[SizedGraph]] = {}  # by key in the first size
        self._prefetched: dict[str, Future[Entry | None]] = {}  # by key of a graph

    def learn(self, sizes: tuple[int, ...], graphs: Iterable[CudnnGraph], choices: Mapping[str, Choice]) -> None:
        """Store the plans that a program runs, and the sizes of the model's inputs.

        Plans of the first program that were compiled at run time are compiled for all sizes, in the background. The
        workers for later plans are started, too.
        """
        if not self._first:
            _in_background(self._oracle.start)
        for graph in graphs:
            if graph.key in self._first:
                continue
            known = self._similar.of(graph)
            first = graph.key if known is None else self._first[known.key]
            ran = self._ran.setdefault(first, [])
            if len(ran) == MAX_SIZES:
                continue
            ran.append((sizes, graph))
            self._first[graph.key] = first
            self._choices[graph.key] = self._choices.get(first, choices[graph.key])
            self._similar.add(graph)
            if first == graph.key and not self._is_precompiled(graph):
                self._ready[first] = _in_background(
                    lambda graph=graph: self._for_all_sizes(graph), lambda graph=graph: self._compare(graph)
                )

    def prefetch(self, sizes: tuple[int, ...], wanted: Callable[[dict[str, CudnnGraph]], Iterable[str]]) -> None:
        """Start building the plans that a program of these sizes will probably need.

        Its graphs are extrapolated from two earlier programs, or guessed from one.

        wanted: selects the graphs without a stored plan, by key
        """
        self._cancel_prefetched()
        by_cudnn = [ran for first, ran in self._ran.items() if self._choices[first].engine != BLAS]
        graphs = [extrapolate(ran[0], ran[1], sizes) if ran[1:] else scale_batch(ran[0], sizes) for ran in by_cudnn]
        new = {graph.key: graph for graph in graphs if graph is not None and graph.key not in self._first}
        chosen = [new[key] for key in wanted(new)]
        if chosen:
            pool = ThreadPoolExecutor(min(self._oracle.workers, len(chosen)), thread_name_prefix="fusec-prefetch")
            self._prefetched = {graph.key: pool.submit(self._build, graph) for graph in chosen}
            pool.shutdown(wait=False)

    def choices_near(self, graphs: Iterable[CudnnGraph]) -> dict[str, Choice]:
        """Return the choices of similar graphs of near sizes, by key of the graphs given."""
        found = {graph.key: self._named(graph) for graph in graphs}
        return {key: choice for key, choice in found.items() if choice is not None}

    def _named(self, graph: CudnnGraph) -> Choice | None:
        known = self._similar.of(graph)
        near = known is not None and 1 / NEAR <= factor(known, graph) <= NEAR
        return self._choices[known.key] if known is not None and near else None

    def plans_for(self, graphs: Iterable[CudnnGraph]) -> Iterator[tuple[CudnnGraph, Entry | None]]:
        """Yield plans of graphs that are known in another size, as they are ready.

        The plan is None if none builds although the oracle assumed that the graph is legal.
        """
        assumed = self._oracle.assumed_from
        known = [g for g in graphs if self._similar.of(g) is not None or assumed(g) is not None]
        wanted = [g for g in known if (choice := self._named(g)) is None or choice.engine != BLAS]
        if not wanted:
            return
        with ThreadPoolExecutor(min(self._oracle.workers, len(wanted)), thread_name_prefix="fusec-sizes") as pool:
            prefetched = {graph: self._prefetched.pop(graph.key, None) for graph in wanted}
            self._cancel_prefetched()
            futures = {prefetched[graph] or pool.submit(self._build, graph): graph for graph in wanted}
            for future in as_completed(futures):
                graph, entry = futures[future], future.result()
                if entry is not None or assumed(graph) is not None:
                    yield graph, entry

    def _cancel_prefetched(self) -> None:
        """Cancel prefetched plans that were not needed."""
        for future in self._prefetched.values():
            future.cancel()
        self._prefetched = {}

    def _build(self, graph: CudnnGraph) -> Entry | None:
        """Build a plan with the kernel for all sizes, or that of a similar graph, or cuDNN's first one."""
        known = self._similar.of(graph)
        waiting = None if known is None else self._ready.get(self._first[known.key])
        ready = None if waiting is None else waiting.result()
        answer = None
        if ready is not None:
            worker, choice = ready
            answer, _ = self._ask(graph, choice, all_sizes=True, worker=worker)
        if answer is None:
            answer, _ = self._ask(graph, self._named(graph))
        return None if answer is None else entry_of(answer)

    def _for_all_sizes(self, graph: CudnnGraph) -> Ready | None:
        answer, worker = self._ask(graph, self._choices[graph.key], all_sizes=True, if_compiled=True)
        return None if answer is None else (worker, Choice.from_json(answer["choice"]))

    def _compare(self, graph: CudnnGraph) -> None:
        """Drop the kernel for all sizes if another size compiles quickly, because a kernel for one size runs faster."""
        other = scale_batch(((1,), graph), (2,))
        answer = None if other is None else self._ask(other, self._choices[graph.key])[0]
        if answer is not None and answer["seconds"] < QUICK_S:
            self._ready.pop(graph.key)

    def _ask(
        self,
        graph: CudnnGraph,
        choice: Choice | None,
        *,
        all_sizes: bool = False,
        if_compiled: bool = False,
        worker: WorkerProcess | None = None,
    ) -> tuple[dict[str, Any] | None, WorkerProcess]:
        """Ask a worker for a plan, see `PlanBuilder.plan`; return its answer, None without a plan, and the worker."""
        named = None if choice is None else choice.to_json()
        question = {"ask": "plan", "graph": graph.to_json(), "choice": named}
        question |= {"all_sizes": all_sizes, "if_compiled": if_compiled}
        answer, asked = self._oracle.exchange(question, worker)
        return (None if isinstance(answer, WorkerDeath) or "blob" not in answer else answer), asked

    def _is_precompiled(self, graph: CudnnGraph) -> bool:
        """Tell if the plan in use needs no compilation for another size."""
        choice = self._choices[graph.key]
        offered = {(plan.engine, plan.knobs): plan.precompiled for plan in self._oracle.plans(graph)}
        return choice.engine == BLAS or offered.get(choice.identity, False)


def _in_background(task: Callable[[], Any], then: Callable[[], None] = lambda: None) -> Future[Any]:
    """Run a task in a daemon thread, and then another one if the first returns something."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(task())
        except BaseException as error:  # noqa: BLE001  # raised where the result is read
            future.set_exception(error)
            return
        if future.result() is not None:
            then()

    threading.Thread(target=run, name="fusec-all-sizes", daemon=True).start()
    return future
