"""Check one graph with cuDNN: describe it, list its plans and build one. This runs in a worker process."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusec.errors import LoweringError
from fusec.gpu.cudnn.legality.verdict_json import encode
from fusec.gpu.cudnn.plans.emit import emit
from fusec.gpu.cudnn.plans.engine_ids import Identity
from fusec.gpu.cudnn.plans.error_messages import reason_of
from fusec.gpu.cudnn.plans.plan_list import (
    DECLINED,
    LeftOutError,
    build,
    compiles_slowly,
    exclude_notes,
    list_plans,
    serialized,
)
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.verdict import ONLY_TENSOR_CORES, Legal, Plan, Refused
from fusec.targets.target import Target


class GraphCheck:
    """Checks graphs: on the GPU of a handle, or without a device for a target."""

    def __init__(self, target: Target, handle: Any):
        self._target, self._handle = target, handle

    def verdict(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer with the verdict on `graph`: legal with the plans offered, if one of them builds; else refused.

        proven: `plans` and `engines` that were built for graphs that show that this one builds; if the first plan
            offered is one of them, none is compiled
        hand_over: answer also with the plan that was built, serialized, if it is cuDNN's first or compiled at run time
        filter: the plans that may be used; default: all
        """
        plan_filter = PlanFilter.from_json(question.get("filter", {}))
        graph = CudnnGraph.from_json(question["graph"])
        proven = {(engine, tuple((k, v) for k, v in knobs)) for engine, knobs in question["proven"]["plans"]}
        stage = "lower"
        try:
            pygraph = emit(graph, handle=self._handle, target=self._target)
            stage = "validate"
            pygraph.validate()
            stage = "build_operation_graph"
            pygraph.build_operation_graph()
            stage = "plan"
            listed = list_plans(pygraph, graph, plan_filter)
        except LoweringError as error:
            return encode(Refused(stage, "FUSEC", str(error)))
        except DECLINED as error:
            return encode(Refused(stage, *reason_of(error)))
        if listed.wrong and not listed.plans:
            return encode(Refused("plan", "KNOWN_WRONG", listed.wrong))
        if listed.left_out and not listed.plans:
            return encode(Refused("plan", "LEFT_OUT", f"cuDNN offers no other plan: {listed.left_out}"))
        compiled = graph.tensor_cores and not any(plan.precompiled for plan in listed.plans.values())
        offered, engines = tuple(listed.plans.values()), question["proven"]["engines"]
        if compiled and not plan_filter.needs_builds and _is_proven(graph, offered, proven, engines):
            return encode(Legal(offered))
        built, failures = _build(pygraph, graph, listed.plans, plan_filter)
        if not built:
            return encode(_refusal(graph, failures))
        proves_others = _proves_others(graph, plan_filter)
        legal = Legal(
            tuple(
                replace(plan, workspace_bytes=built.get(place, 0), built=place in built)
                for place, plan in listed.plans.items()
                if place in built or (proves_others and place not in failures)
            )
        )
        answer = encode(legal)
        (place, *_) = built
        if question["hand_over"] and (place == next(iter(listed.plans)) or not listed.plans[place].precompiled):
            with contextlib.suppress(*DECLINED):  # cuDNN cannot serialize every plan
                answer["blob"] = base64.b64encode(serialized(pygraph, place)).decode()
        return answer


def _proves_others(graph: CudnnGraph, plan_filter: PlanFilter) -> bool:
    """Tell if one plan that builds proves the others of its list.

    It does not where only a build shows if a plan is allowed: it may use tensor cores in fp32, add in no fixed order,
    or need a large workspace.
    """
    return graph.tensor_cores and not plan_filter.needs_builds


def _build(
    pygraph: Any, graph: CudnnGraph, plans: Mapping[int, Plan], plan_filter: PlanFilter
) -> tuple[dict[int, int], dict[int, BaseException]]:
    """Build plans until the verdict is certain; return the workspaces of those built, and why others were not.

    Where one built plan does not prove the others, each precompiled plan is built. Compiling a plan takes up to a
    second.
    """
    exclude_notes(pygraph, graph, plan_filter.deterministic)
    proves_others = _proves_others(graph, plan_filter)
    built: dict[int, int] = {}
    failures: dict[int, BaseException] = {}
    slow = {place: compiles_slowly(graph, plan.engine) for place, plan in plans.items()}
    for place in sorted(plans, key=lambda place: (not plans[place].precompiled, slow[place])):
        if built and (proves_others or not plans[place].precompiled):
            break
        try:
            built[place] = build(pygraph, place, plans[place].engine, plan_filter)
        except DECLINED as error:
            failures[place] = error
    return built, failures


def _is_proven(
    graph: CudnnGraph, offered: Sequence[Plan], plans: Collection[Identity], engines: Collection[int]
) -> bool:
    """Tell if the plan that would be built is the first one offered, and was built for other graphs."""
    if not offered or compiles_slowly(graph, offered[0].engine):
        return False
    return offered[0].engine in engines or (offered[0].engine, offered[0].knobs) in plans


def _refusal(graph: CudnnGraph, failures: Mapping[int, BaseException]) -> Refused:
    if not failures:
        return Refused("plan", "CUDNN_STATUS_NOT_SUPPORTED", "cuDNN offers no plan")
    first = next(iter(failures.values()))
    code, message = reason_of(first)
    if isinstance(first, LeftOutError):
        code = "LEFT_OUT"
    elif message.startswith("Deselecting") and graph.tensor_cores:
        code, message = "LEFT_OUT", "every plan adds in no fixed order, which the option deterministic leaves out"
    elif message.startswith("Deselecting"):
        code, message = "CUDNN_STATUS_NOT_SUPPORTED", ONLY_TENSOR_CORES
    return Refused("build", code, message)
