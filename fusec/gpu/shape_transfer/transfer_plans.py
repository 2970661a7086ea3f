"""Plans of a model's graphs in a new size, made from those of the sizes before: no heuristics, nothing compiled twice.

What has to be compiled at run time is compiled once more for all sizes, beside the first program's calls, where cuDNN
has an engine for that; from then on a plan for another size is ready in milliseconds.
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

# So many times as large or small a graph takes over another's plan; beyond, cuDNN is asked for its first.
NEAR = 4
SIZES = 8  # of a graph that are remembered, the first ones: others are near one of them, or far from all
QUICK_S = 0.1  # what is compiled within that time is compiled for each size: that runs faster than what is for all
Ready = tuple[WorkerProcess, Choice]  # who compiled for all sizes, and the plan that takes it


class SizePlans:
    """Makes plans by the workers of an oracle, after those that programs of other sizes run."""

    def __init__(self, oracle: Oracle):
        self._oracle = oracle
        self._relatives = SimilarGraphs()
        self._choices: dict[str, Choice] = {}  # by key of a graph, that of its first size
        self._first: dict[str, str] = {}  # of a graph, the key in its first size
        self._ready: dict[str, Future[Ready | None]] = {}  # by that key
        self._ran: dict[str, list[tuple[tuple[int, ...], CudnnGraph]]] = {}  # by that key, in which sizes of the model
        self._prefetched: dict[str, Future[Entry | None]] = {}  # by key of a graph

    def learn(self, sizes: tuple[int, ...], graphs: Iterable[CudnnGraph], choices: Mapping[str, Choice]) -> None:
        """Learn which plans a program runs, of which sizes of the model. What was compiled at run time for the first
        is compiled for all from now on, in threads that nobody waits for; they also start who makes the plans of the
        next."""
        if not self._first:
            _beside(self._oracle.start)
        for graph in graphs:
            if graph.key in self._first:
                continue
            known = self._relatives.of(graph)
            first = graph.key if known is None else self._first[known.key]
            ran = self._ran.setdefault(first, [])
            if len(ran) == SIZES:
                continue
            ran.append((sizes, graph))
            self._first[graph.key] = first
            self._choices[graph.key] = self._choices.get(first, choices[graph.key])
            self._relatives.add(graph)
            if first == graph.key and not self._precompiled(graph):
                self._ready[first] = _beside(
                    lambda graph=graph: self._for_all_sizes(graph), lambda graph=graph: self._compare(graph)
                )

    def prefetch(self, sizes: tuple[int, ...], wanted: Callable[[dict[str, CudnnGraph]], Iterable[str]]) -> None:
        """Begin to make the plans that a program of these sizes will need before it is known that it does: two others
        tell which those are, and of one it can be guessed. wanted: those of them, by key, that are not there already.
        """
        self._give_up()
        made_here = [ran for first, ran in self._ran.items() if self._choices[first].engine != BLAS]
        graphs = [between(ran[0], ran[1], sizes) if ran[1:] else guessed(*ran[0], sizes) for ran in made_here]
        new = {graph.key: graph for graph in graphs if graph is not None and graph.key not in self._first}
        chosen = [new[key] for key in wanted(new)]
        if chosen:
            pool = ThreadPoolExecutor(min(self._oracle.workers, len(chosen)), thread_name_prefix="fusec-foreseen")
            self._prefetched = {graph.key: pool.submit(self._made, graph) for graph in chosen}
            pool.shutdown(wait=False)

    def named(self, graphs: Iterable[CudnnGraph]) -> dict[str, Choice]:
        """The plans that graphs of sizes near these take, by key."""
        found = {graph.key: self._named(graph) for graph in graphs}
        return {key: choice for key, choice in found.items() if choice is not None}

    def _named(self, graph: CudnnGraph) -> Choice | None:
        known = self._relatives.of(graph)
        near = known is not None and 1 / NEAR <= factor(known, graph) <= NEAR
        return self._choices[known.key] if known is not None and near else None

    def of(self, graphs: Iterable[CudnnGraph]) -> Iterator[tuple[CudnnGraph, Entry | None]]:
        """Plans of those graphs that are known in another size, as they are ready; None for one of which none builds
        though the oracle believes it to be legal."""
        believed = self._oracle.relative
        known = [g for g in graphs if self._relatives.of(g) is not None or believed(g) is not None]
        wanted = [g for g in known if (choice := self._named(g)) is None or choice.engine != BLAS]
        if not wanted:
            return
        with ThreadPoolExecutor(min(self._oracle.workers, len(wanted)), thread_name_prefix="fusec-sizes") as pool:
            begun = {graph: self._prefetched.pop(graph.key, None) for graph in wanted}
            self._give_up()
            making = {begun[graph] or pool.submit(self._made, graph): graph for graph in wanted}
            for future in as_completed(making):
                graph, entry = making[future], future.result()
                if entry is not None or believed(graph) is not None:
                    yield graph, entry

    def _give_up(self) -> None:
        """What was foreseen and did not come."""
        for future in self._prefetched.values():
            future.cancel()
        self._prefetched = {}

    def _made(self, graph: CudnnGraph) -> Entry | None:
        known = self._relatives.of(graph)
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
        """Let go of what was compiled for all sizes, if another size is compiled as quickly: that is the faster one."""
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
        """What a worker says, if it is a plan, and who said it: see `plan_worker.PlanBuilder`."""
        question: dict[str, Any] = {"graph": graph.to_json(), "all_sizes": all_sizes, "if_compiled": if_compiled}
        question["choice"] = None if choice is None else choice.to_json()
        answer, asked = self._oracle.exchange(question, worker)
        return (None if isinstance(answer, WorkerDeath) or "blob" not in answer else answer), asked

    def _precompiled(self, graph: CudnnGraph) -> bool:
        """Whether the plan that was taken is known to be there for all sizes."""
        taken = self._choices[graph.key]
        offered = {(plan.engine, plan.knobs): plan.precompiled for plan in self._oracle.plans(graph)}
        return taken.engine == BLAS or offered.get(taken.identity, False)


def between(
    one: tuple[tuple[int, ...], CudnnGraph], other: tuple[tuple[int, ...], CudnnGraph], sizes: tuple[int, ...]
) -> CudnnGraph | None:
    """A graph as it would be in these sizes of the model, if all numbers in it grow evenly from one to another; None
    if these do not."""
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
    """A graph as it would be in other sizes of the model, if one of these changes and is a part of the outermost dim;
    None if that would be no whole number."""
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
    """As many steps further from one to the other; None if it comes to no whole numbers."""
    numbers = [a + (b - a) * step for a, b in zip(first, second, strict=True)]
    return None if any(n.denominator > 1 for n in numbers) else tuple(map(int, numbers))


def _beside(work: Callable[[], Any], then: Callable[[], None] = lambda: None) -> Future[Any]:
    """What work comes to, done in a thread that does not keep the process from ending; then, if it is something, the
    other."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # raised where the result is wanted
            future.set_exception(error)
            return
        if future.result() is not None:
            then()

    threading.Thread(target=run, name="fusec-all-sizes", daemon=True).start()
    return future
