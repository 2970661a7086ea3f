"""Build plans in a worker process, and serialize them."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cudnn

from fusec.errors import LoweringError
from fusec.gpu.cudnn.plans.emit import emit, kernel_cache
from fusec.gpu.cudnn.plans.engine_ids import Identity
from fusec.gpu.cudnn.plans.error_messages import reason_of
from fusec.gpu.cudnn.plans.plan_list import DECLINED, build, exclude_notes, list_plans, serialized
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.known_bugs import wrong_plan
from fusec.plans.engine_numbers import DEVICE_ONLY
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import BLAS, Choice
from fusec.targets.target import Target

NONE_USABLE = "it offers none that may be used"


class PlanBuilder:
    """Builder of plans: on the GPU of a handle, or without a device for a target. It holds kernels for all sizes."""

    def __init__(self, target: Target, handle: Any):
        self._target, self._handle = target, handle
        self._kernels: Any = None  # cuDNN's cache of kernels that it compiled for all sizes

    def plan(self, question: dict[str, Any]) -> dict[str, Any]:
        """Build one plan of `graph`: the plan named by `choice`; where that fails or none is named, cuDNN's first.

        A named plan is built without a list of plans, which takes longer than the build.

        all_sizes: build a plan whose kernel serves all sizes
        if_compiled: build no plan if the one named is precompiled
        filter: the plans that may be used; default: all

        Answers with the plan, and its build time in seconds, or with the reason why there is none.
        """
        graph, all_sizes = CudnnGraph.from_json(question["graph"]), question["all_sizes"]
        named = None if question["choice"] is None else Choice.from_json(question["choice"])
        plan_filter = PlanFilter.from_json(question.get("filter", {}))
        try:
            if named is not None and question.get("if_compiled") and self._is_precompiled(graph, named):
                return {"failed": "it is precompiled"}
            if named is not None and wrong_plan(graph, named.engine, dict(named.knobs)) is None:
                try:
                    pygraph = self._operation_graph(graph, all_sizes)
                    return _built(pygraph, graph, _create(pygraph, named), named, plan_filter)
                except DECLINED:  # also where the frontend does not know a knob of cuDNN
                    pass
            pygraph, failed = self._operation_graph(graph, all_sizes), NONE_USABLE
            choices = _choices(pygraph, graph, plan_filter)
            for place in sorted(choices, key=lambda place: named is None or choices[place].identity != named.identity):
                try:
                    return _built(pygraph, graph, place, choices[place], plan_filter)
                except DECLINED as error:
                    failed = ": ".join(reason_of(error))
            return {"failed": failed}
        except LoweringError as error:
            return {"failed": str(error)}
        except DECLINED as error:
            return {"failed": ": ".join(reason_of(error))}

    def plans(self, question: dict[str, Any]) -> dict[str, Any]:
        """Build the plans of `graph` that `choices` names, or else the first `count` of cuDNN's list.

        skip: plans not to build if none is named, by engine and knobs
        filter: the plans that may be used; default: all

        Answers with the plans, or with the reason why there is none, or not a named one.
        """
        graph = CudnnGraph.from_json(question["graph"])
        named = [Choice.from_json(choice) for choice in question["choices"]]
        plan_filter = PlanFilter.from_json(question.get("filter", {}))
        try:
            pygraph = self._operation_graph(graph)
            choices = _choices(pygraph, graph, plan_filter)
        except DECLINED as error:
            return {"failed": f"cuDNN has no plan for {self._target.name}: {': '.join(reason_of(error))}"}
        if named:
            offered = {choice.identity: place for place, choice in choices.items()}
            return self._named(pygraph, graph, named, offered, plan_filter)
        plans: list[dict[str, Any]] = []
        skip = {(engine, tuple((k, v) for k, v in knobs)) for engine, knobs in question["skip"]}
        reason = NONE_USABLE
        for place, choice in choices.items():
            if choice.identity in skip:
                continue
            skip.add(choice.identity)
            try:
                # not complete, because the device may know a better plan
                plans.append(_built(pygraph, graph, place, replace(choice, complete=False), plan_filter))
            except DECLINED as error:
                reason = reason_of(error)[1]
            if len(plans) == question["count"]:
                break
        return {"plans": plans} if plans else {"failed": f"no plan for {self._target.name} was built: {reason}"}

    def _named(
        self,
        pygraph: Any,
        graph: CudnnGraph,
        named: Sequence[Choice],
        offered: dict[Identity, int],
        plan_filter: PlanFilter,
    ) -> dict[str, Any]:
        """Build the plans named, also those that cuDNN does not list without a device.

        A plan of cuBLASLt, or of an engine that needs a device, is not built, and has no blob.
        """
        plans: list[dict[str, Any]] = []
        for choice in named:
            plans.append({"choice": choice.to_json(), "blob": None})
            if choice.engine == BLAS:
                continue
            try:
                place = offered.get(choice.identity)
                place = _create(pygraph, choice) if place is None else place
                plans[-1] = _built(pygraph, graph, place, choice, plan_filter)
            except DECLINED as error:
                if choice.engine not in DEVICE_ONLY:
                    what = f"engine {choice.engine} with knobs {dict(choice.knobs)}"
                    return {"failed": f"cuDNN builds no plan of {what} for {self._target.name}: {reason_of(error)[1]}"}
        return {"plans": plans}

    def _is_precompiled(self, graph: CudnnGraph, named: Choice) -> bool:
        plans = list_plans(self._operation_graph(graph), graph, PlanFilter()).plans.values()
        return any(plan.precompiled for plan in plans if (plan.engine, plan.knobs) == named.identity)

    def _operation_graph(self, graph: CudnnGraph, all_sizes: bool = False) -> Any:
        """Return the frontend graph with its operation graph built."""
        if all_sizes and self._kernels is None:
            self._kernels = kernel_cache()
        kernels = self._kernels if all_sizes else None
        pygraph = emit(graph, handle=self._handle, target=self._target, kernels=kernels)
        pygraph.validate()
        pygraph.build_operation_graph()
        return pygraph


def _create(pygraph: Any, choice: Choice) -> int:
    """Create a plan by name, and return its place in the list."""
    pygraph.create_execution_plan(choice.engine, {cudnn.knob_type(k): v for k, v in choice.knobs})
    return pygraph.get_execution_plan_count() - 1


def _choices(pygraph: Any, graph: CudnnGraph, plan_filter: PlanFilter) -> dict[int, Choice]:
    return {place: Choice.of(plan) for place, plan in list_plans(pygraph, graph, plan_filter).plans.items()}


def _built(pygraph: Any, graph: CudnnGraph, place: int, choice: Choice, plan_filter: PlanFilter) -> dict[str, Any]:
    """Build the plan at a place, and return it as JSON data, with its build time in seconds."""
    exclude_notes(pygraph, graph, plan_filter.deterministic)
    start = time.perf_counter()
    workspace_bytes = build(pygraph, place, choice.engine, plan_filter)
    seconds = time.perf_counter() - start
    blob = serialized(pygraph, place)
    choice = replace(choice, workspace_bytes=workspace_bytes)
    return {"choice": choice.to_json(), "blob": base64.b64encode(blob).decode(), "seconds": seconds}
