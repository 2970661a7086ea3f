"""Build plans for a new input shape from the plans of shapes before, without cuDNN's heuristics.

A plan that is compiled at run time is compiled once more for all input shapes, while the first program runs, if cuDNN
has an engine for that. From then on a plan for another shape is ready in milliseconds.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from fractions import Fraction
from typing import Any

from fusec.gpu.cudnn.legality import Oracle
from fusec.gpu.cudnn.similar_graphs import SimilarGraphs, factor
from fusec.gpu.cudnn.worker_process import WorkerDeath, WorkerProcess
from fusec.lowering.cudnn_graph import CudnnGraph, CudnnTensor
from fusec.plans.plan_record import BLAS, Choice, Entry

# A plan is transferred to a graph that is at most this many times larger or smaller; others get cuDNN's first plan.
NEAR = 4
SIZES = 8  # sizes of a graph that are stored, the first ones; others are near one of them, or far from all
QUICK_S = 0.1  # a kernel that compiles within this time is compiled for each size, because it runs faster then
Ready = tuple[WorkerProcess, Choice]  # the worker that compiled for all sizes, and the plan for that kernel


class SizePlans:
    """Plans of programs for several input shapes, and the workers of an oracle that build more."""

    def __init__(self, oracle: Oracle):
        self._oracle = oracle
        self._similar = SimilarGraphs()
        self._choices: dict[str, Choice] = {}  # by key of a graph, that of its first size
        self._first: dict[str, str] = {}  # of a graph, the key in its first size
        self._ready: dict[str, Future[Ready | None]] = {}  # by that key
        self._ran: dict[str, list[tuple[tuple[int, ...], CudnnGraph]]] = {}  # by that key, in which sizes of the model
        self._prefetched: dict[str, Future[Entry | None]] = {}  # by key of a graph

    def learn(self, sizes: tuple[int, ...], graphs: Iterable[CudnnGraph], choices: Mapping[str, Choice]) -> None:
        """Store the plans that a program runs, and the sizes of the model's inputs.

        Plans of the first program that were compiled at run time are compiled for all sizes, in threads that nobody
        waits for. The workers for later plans are started, too.
        """
        if not self._first:
            _in_background(self._oracle.start)
        for graph in graphs:
            if graph.key in self._first:
                continue
            known = self._similar.of(graph)
            first = graph.key if known is None else self._first[known.key]
            ran = self._ran.setdefault(first, [])
            if len(ran) == SIZES:
                continue
            ran.append((sizes, graph))
            self._first[graph.key] = first
            self._choices[graph.key] = self._choices.get(first, choices[graph.key])
            self._similar.add(graph)
            if first == graph.key and not self._precompiled(graph):
                self._ready[first] = _in_background(
                    lambda graph=graph: self._for_all_sizes(graph), lambda graph=graph: self._compare(graph)
                )

    def prefetch(self, sizes: tuple[int, ...], wanted: Callable[[dict[str, CudnnGraph]], Iterable[str]]) -> None:
        """Start building the plans that a program of these sizes will probably need.

        Two earlier programs tell its graphs; from one they are guessed.

        wanted: selects the graphs without a stored plan, by key
        """
        self._give_up()
        made_here = [ran for first, ran in self._ran.items() if self._choices[first].engine != BLAS]
        graphs = [between(ran[0], ran[1], sizes) if ran[1:] else guessed(*ran[0], sizes) for ran in made_here]
        new = {graph.key: graph for graph in graphs if graph is not None and graph.key not in self._first}
        chosen = [new[key] for key in wanted(new)]
        if chosen:
            pool = ThreadPoolExecutor(min(self._oracle.workers, len(chosen)), thread_name_prefix="fusec-prefetch")
            self._prefetched = {graph.key: pool.submit(self._made, graph) for graph in chosen}
            pool.shutdown(wait=False)

    def choices_near(self, graphs: Iterable[CudnnGraph]) -> dict[str, Choice]:
        """Return the choices of similar graphs of near sizes, by key."""
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
        assumed = self._oracle.relative
        known = [g for g in graphs if self._similar.of(g) is not None or assumed(g) is not None]
        wanted = [g for g in known if (choice := self._named(g)) is None or choice.engine != BLAS]
        if not wanted:
            return
        with ThreadPoolExecutor(min(self._oracle.workers, len(wanted)), thread_name_prefix="fusec-sizes") as pool:
            begun = {graph: self._prefetched.pop(graph.key, None) for graph in wanted}
            self._give_up()
            making = {begun[graph] or pool.submit(self._made, graph): graph for graph in wanted}
            for future in as_completed(making):
                graph, entry = making[future], future.result()
                if entry is not None or assumed(graph) is not None:
                    yield graph, entry

    def _give_up(self) -> None:
        """Cancel prefetched plans that nobody asked for."""
        for future in self._prefetched.values():
            future.cancel()
        self._prefetched = {}

    def _made(self, graph: CudnnGraph) -> Entry | None:
        known = self._similar.of(graph)
        if known is None:
            return self._asked(graph, None, False)
        waiting = self._ready.get(self._first[known.key])
        ready = None if waiting is None else waiting.result()
        if ready is not None:
            worker, choice = ready
            found = self._asked(graph, choice, True, worker)
            if found is not None:
                return found
        return self._asked(graph, self._named(graph), False)

    def _for_all_sizes(self, graph: CudnnGraph) -> Ready | None:
        answer, worker = self._answer(graph, self._choices[graph.key], True, if_compiled=True)
        return None if answer is None else (worker, Choice.from_json(answer["choice"]))

    def _compare(self, graph: CudnnGraph) -> None:
        """Drop the kernel for all sizes if another size compiles quickly, because a kernel for one size runs faster."""
        other = guessed((1,), graph, (2,))
        answer = None if other is None else self._answer(other, self._choices[graph.key], False)[0]
        if answer is not None and answer["seconds"] < QUICK_S:
            self._ready.pop(graph.key)

    def _asked(
        self, graph: CudnnGraph, choice: Choice | None, all_sizes: bool, worker: WorkerProcess | None = None
    ) -> Entry | None:
        answer, _ = self._answer(graph, choice, all_sizes, worker)
        return None if answer is None else Entry(Choice.from_json(answer["choice"]), base64.b64decode(answer["blob"]))

    def _answer(
        self,
        graph: CudnnGraph,
        choice: Choice | None,
        all_sizes: bool,
        worker: WorkerProcess | None = None,
        if_compiled: bool = False,
    ) -> tuple[dict[str, Any] | None, WorkerProcess]:
        """Ask a worker for a plan, and return its answer, None without a plan, and the worker."""
        question: dict[str, Any] = {"graph": graph.to_json(), "all_sizes": all_sizes, "if_compiled": if_compiled}
        question["choice"] = None if choice is None else choice.to_json()
        answer, asked = self._oracle.exchange(question, worker)
        return (None if isinstance(answer, WorkerDeath) or "blob" not in answer else answer), asked

    def _precompiled(self, graph: CudnnGraph) -> bool:
        """Return True if the plan in use needs no compilation for another size."""
        taken = self._choices[graph.key]
        offered = {(plan.engine, plan.knobs): plan.precompiled for plan in self._oracle.plans(graph)}
        return taken.engine == BLAS or offered.get(taken.identity, False)


def between(
    one: tuple[tuple[int, ...], CudnnGraph], other: tuple[tuple[int, ...], CudnnGraph], sizes: tuple[int, ...]
) -> CudnnGraph | None:
    """Extrapolate a graph to other sizes of the model from two; None if its numbers do not grow evenly."""
    changes = [(a, b, size) for a, b, size in zip(one[0], other[0], sizes, strict=True) if a != b or size != a]
    steps = {Fraction(size - a, b - a) for a, b, size in changes if a != b}
    if len(steps) != 1 or any(a == b for a, b, _ in changes):
        return None
    (step,) = steps
    tensors: list[CudnnTensor] = []
    for first, second in zip(one[1].tensors, other[1].tensors, strict=True):
        dims, strides = _on(first.dims, second.dims, step), _on(first.strides, second.strides, step)
        if dims is None or strides is None or any(d < 1 for d in dims):
            return None
        tensors.append(replace(first, dims=dims, strides=strides))
    return replace(one[1], tensors=tuple(tensors))


def guessed(was: tuple[int, ...], graph: CudnnGraph, sizes: tuple[int, ...]) -> CudnnGraph | None:
    """Guess a graph for other sizes of the model, whose outermost dim grows by one factor.

    Returns None if several sizes change, or the dim would not be a whole number.
    """
    factors = {Fraction(b, a) for a, b in zip(was, sizes, strict=True) if a != b and a}
    if len(factors) != 1 or not graph.outputs:
        return None
    (factor,) = factors
    rows = graph.outputs[0].dims[0]
    filters = {call.inputs[1] for call in graph.calls if call.op == "conv_fprop"}
    if rows == 1 or (rows * factor).denominator > 1 or rows * factor <= 1:
        return None
    grown = (int(rows * factor),)
    return replace(
        graph,
        tensors=tuple(
            replace(t, dims=(*grown, *t.dims[1:])) if t.dims[0] == rows and t.uid not in filters else t
            for t in graph.tensors
        ),
    )


def _on(first: tuple[int, ...], second: tuple[int, ...], step: Fraction) -> tuple[int, ...] | None:
    """Go `step` times the way from one to the other; None if the results are not whole numbers."""
    numbers = [a + (b - a) * step for a, b in zip(first, second, strict=True)]
    return None if any(n.denominator > 1 for n in numbers) else tuple(map(int, numbers))


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
