"""Build and serialize plans for a described GPU in worker processes, without a GPU or driver.

Such a plan was read and run on an H200. Without a device cuDNN does not offer some engines. So several plans are built
for each graph, and the device chooses the best.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any

from fusec.errors import TargetError
from fusec.gpu.cudnn.worker_processes.worker_pool import WorkerPool
from fusec.gpu.cudnn.worker_processes.worker_process import WorkerDeath
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import Choice, Entry, Knobs
from fusec.targets.target import Target

# Plans a graph when none is named: a runtime-compiled one takes long (benchmarks/compile_time/plan_builds.py).
SEVERAL = 4


def serialize(
    graphs: Sequence[CudnnGraph],
    target: Target,
    *,
    choices: Mapping[str, Sequence[Choice]] | None = None,
    skip: Mapping[str, Collection[tuple[int, Knobs]]] | None = None,
    optional: Container[str] = (),
    count: int = SEVERAL,
    plan_filter: PlanFilter | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, tuple[Entry, ...]]:
    """Build and serialize plans of graphs for a target, by graph key.

    choices: the plans to build, by key; others get the first `count` plans that cuDNN offers and builds
    skip: plans not to build, by key, such as those in quarantine
    optional: keys of graphs that are left out of the result if cuDNN builds no plan of them
    plan_filter: the plans that may be used; default: all

    A named plan of an engine that needs a device (DEVICE_ONLY), or of cuBLASLt, has no blob.

    Raises TargetError if cuDNN does not load, builds no plan of a graph, or does not build a named plan.
    """
    by_key = {graph.key: graph for graph in graphs}
    plans: dict[str, tuple[Entry, ...]] = {}
    done = itertools.count(1)

    def arrived(key: str, built: tuple[Entry, ...]) -> None:
        if built:
            plans[key] = built
        if progress is not None:
            progress(next(done), len(by_key))

    with WorkerPool(target, workers=workers) as pool:

        def ask(key: str, epoch: int) -> tuple[Entry, ...]:
            left_out = [[engine, [list(pair) for pair in knobs]] for engine, knobs in (skip or {}).get(key, ())]
            question = _question(by_key[key], (choices or {}).get(key, ()), plan_filter)
            question |= {"skip": left_out, "count": count}
            answer, _ = pool.exchange(question, epoch=epoch)
            if key in optional and (isinstance(answer, WorkerDeath) or "failed" in answer):
                return ()
            if isinstance(answer, WorkerDeath):
                raise TargetError(f"no plan was built: {answer.words}; the graph is\n{by_key[key]}")
            if "failed" in answer:
                raise TargetError(f"{answer['failed']}; the graph is\n{by_key[key]}")
            return tuple(map(entry_of, answer["plans"]))

        pool.ask_each(list(by_key), ask, arrived)
    return {key: plans[key] for key in by_key if key in plans}


class Tries:
    """Test if cuDNN builds a plan for the target, in its list or not; one process answers all questions.

    plan_filter: the plans that may be used; default: all

    Raises TargetError if cuDNN does not load.
    """

    def __init__(self, target: Target, plan_filter: PlanFilter | None = None):
        self._pool, self._plan_filter = WorkerPool(target, workers=1), plan_filter

    def __call__(self, graph: CudnnGraph, choice: Choice) -> bool:
        answer, _ = self._pool.exchange(_question(graph, [choice], self._plan_filter))
        return not isinstance(answer, WorkerDeath) and any(plan["blob"] for plan in answer.get("plans", ()))


def entry_of(plan: Mapping[str, Any]) -> Entry:
    """Return the plan that a worker answered with."""
    blob = plan["blob"]
    return Entry(Choice.from_json(plan["choice"]), None if blob is None else base64.b64decode(blob))


def _question(graph: CudnnGraph, choices: Sequence[Choice], plan_filter: PlanFilter | None) -> dict[str, Any]:
    named = [choice.to_json() for choice in choices]
    own = {"filter": (plan_filter or PlanFilter()).to_json(), "skip": [], "count": 1}
    return {"ask": "plans", "graph": graph.to_json(), "choices": named, **own}
