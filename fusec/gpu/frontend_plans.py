"""Hold the graphs of cuDNN's frontend with the plans that were listed, or created by engine and knobs.

To list the plans of a graph takes longer than to create the few that are built. A worker that judged the graph listed
them before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import cudnn

from fusec.errors import ExecutionError
from fusec.gpu.cudnn.plans.emit import emit
from fusec.gpu.cudnn.plans.engine_ids import Identity, identity_of
from fusec.gpu.cudnn.plans.plan_list import DECLINED, exclude_notes, modes_of
from fusec.gpu.cudnn.worker_processes.build_pool import BuildPool
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import Choice


class FrontendPlans:
    """The frontend's graphs on one handle, by key of the graph.

    kernel_cache: cuDNN's cache of kernels for all input shapes; graphs without a precompiled plan are planned with it
    build_pool: workers that may have listed the plans of a graph
    """

    def __init__(self, handle: Any, kernel_cache: Any, plan_filter: PlanFilter, build_pool: BuildPool | None):
        self._handle, self._kernel_cache, self._plan_filter = handle, kernel_cache, plan_filter
        self._build_pool = build_pool
        self._listed: dict[str, Any] = {}
        self._created: dict[str, Any] = {}
        self._places: dict[tuple[str, Identity], tuple[Any, int]] = {}  # the first place of each plan

    def plans(self, graph: CudnnGraph) -> Iterator[tuple[Choice, bool]]:
        """Yield cuDNN's plans in its order, each with whether it is precompiled.

        Raises ExecutionError if cuDNN declines the graph.
        """
        known = () if self._build_pool is None or self._kernel_cache is not None else self._build_pool.offered(graph)
        if known:
            yield from ((Choice(plan.engine, plan.knobs), plan.precompiled) for plan in known)
            return
        pygraph = self._list(graph)
        for place in range(pygraph.get_execution_plan_count()):
            yield Choice(*identity_of(pygraph, place)), _is_precompiled(pygraph, place)

    def create(self, graph: CudnnGraph, choice: Choice) -> tuple[Any, int]:
        """Create a plan by its engine and knobs; return the frontend's graph, and the place of the plan in it.

        Raises an error of `plan_list.DECLINED` if cuDNN declines the plan, also where the frontend does not know a knob
        of cuDNN. Raises ExecutionError if cuDNN declines the graph.
        """
        if graph.key not in self._created:
            self._created[graph.key] = self._operation_graph(graph, None)
        pygraph = self._created[graph.key]
        pygraph.create_execution_plan(choice.engine, {cudnn.knob_type(k): v for k, v in choice.knobs})
        exclude_notes(pygraph, graph, self._plan_filter.deterministic)
        found = pygraph, pygraph.get_execution_plan_count() - 1
        return self._places.setdefault((graph.key, choice.identity), found)

    def is_precompiled(self, graph: CudnnGraph, place: int) -> bool:
        """Tell if a plan that was created is precompiled."""
        return _is_precompiled(self._created[graph.key], place)

    def find(self, graph: CudnnGraph, choice: Choice) -> tuple[Any, int]:
        """Return the frontend's graph, and the place in it of a plan that `plans` yielded.

        Raises ExecutionError if cuDNN neither creates the plan by name nor lists it.
        """
        key = graph.key, choice.identity
        if key not in self._places and graph.key not in self._listed:
            with contextlib.suppress(*DECLINED):
                return self.create(graph, choice)
            self._list(graph)
        if key not in self._places:
            raise ExecutionError(f"cuDNN does not offer {choice.name} on this GPU")
        return self._places[key]

    def _list(self, graph: CudnnGraph) -> Any:
        """Return the frontend's graph with cuDNN's list of plans."""
        if graph.key not in self._listed:
            self._listed[graph.key] = pygraph = self._planned(graph)
            for place in range(pygraph.get_execution_plan_count()):
                self._places.setdefault((graph.key, identity_of(pygraph, place)), (pygraph, place))
        return self._listed[graph.key]

    def _planned(self, graph: CudnnGraph) -> Any:
        pygraph = self._plan(graph, None)
        if self._kernel_cache is None or _has_precompiled(pygraph):
            return pygraph
        try:
            return self._plan(graph, self._kernel_cache)
        except ExecutionError:  # cuDNN 9.19 has no engine for pointwise graphs of all sizes
            return pygraph

    def _plan(self, graph: CudnnGraph, kernel_cache: Any) -> Any:
        pygraph = self._operation_graph(graph, kernel_cache)
        try:
            pygraph.create_execution_plans(modes_of(self._plan_filter))
        except DECLINED as error:
            raise ExecutionError(f"cuDNN declines on this GPU\n{graph}\n{error}") from error
        exclude_notes(pygraph, graph, self._plan_filter.deterministic)
        return pygraph

    def _operation_graph(self, graph: CudnnGraph, kernel_cache: Any) -> Any:
        """Return the frontend's graph with its operation graph built."""
        pygraph = emit(graph, handle=self._handle, kernels=kernel_cache)
        try:
            pygraph.validate()
            pygraph.build_operation_graph()
        except DECLINED as error:
            raise ExecutionError(f"cuDNN declines on this GPU\n{graph}\n{error}") from error
        return pygraph


def _is_precompiled(pygraph: Any, place: int) -> bool:
    return cudnn.behavior_note.RUNTIME_COMPILATION not in pygraph.get_behavior_notes_for_plan_at_index(place)


def _has_precompiled(pygraph: Any) -> bool:
    return any(_is_precompiled(pygraph, place) for place in range(pygraph.get_execution_plan_count()))
