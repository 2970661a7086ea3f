"""List the plans that cuDNN offers for a frontend graph, without those that fusec does not use."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import cudnn

from fusec.gpu.cudnn.plans.engine_ids import identity_of
from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.known_bugs import wrong_plan
from fusec.plans.engine_numbers import PYTHON_ENGINES, SLOW_BUILD_OF_INTEGERS
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import Choice
from fusec.plans.verdict import Plan
from fusec.system.dataclass import dataclass

DECLINED = (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError)


class LeftOutError(ValueError):
    """A plan was built, and the filter leaves it out."""


@dataclass(frozen=True)
class PlanList:
    """Plans by place in cuDNN's list.

    wrong: why the first of the others is known to be wrong; None if none is
    left_out: which engines the filter leaves out; None if it takes all
    """

    plans: dict[int, Plan]
    wrong: str | None
    left_out: str | None = None


def modes_of(plan_filter: PlanFilter) -> list[Any]:
    """Return the modes of cuDNN's heuristics that a filter names."""
    return [getattr(cudnn.heur_mode, mode.upper()) for mode in plan_filter.heuristics]


def list_plans(pygraph: Any, graph: CudnnGraph, plan_filter: PlanFilter) -> PlanList:
    """List the plans of a frontend graph whose operation graph is built. Raises an error of DECLINED without any."""
    pygraph.create_execution_plans(modes_of(plan_filter))
    plans: dict[int, Plan] = {}
    wrong: str | None = None
    left_out: set[int] = set()
    for place in range(pygraph.get_execution_plan_count()):
        engine, knobs = identity_of(pygraph, place)
        if not 0 <= engine < PYTHON_ENGINES:
            continue
        reason, other = wrong_plan(graph, engine, dict(knobs)), plan_filter.reason(engine)
        if reason is None and other is None:
            plans[place] = Plan(engine, knobs, is_precompiled(pygraph, place))
        wrong = wrong or reason
        if other is not None:
            left_out.add(engine)
    return PlanList(plans, wrong, _left_out_text(left_out) if left_out else None)


def _left_out_text(engines: Set[int]) -> str:
    """Name the engines that the filter leaves out, so that the user sees which there are."""
    numbers = ", ".join(str(engine) for engine in sorted(engines))
    return f"{f'engine {numbers} is' if len(engines) == 1 else f'engines {numbers} are'} left out by the option engines"


def is_precompiled(pygraph: Any, place: int) -> bool:
    """Tell if a plan is compiled already, and not at run time."""
    return cudnn.behavior_note.RUNTIME_COMPILATION not in pygraph.get_behavior_notes_for_plan_at_index(place)


def create(pygraph: Any, choice: Choice) -> int:
    """Create a plan by its engine and knobs, which takes less time than a list, and return its place.

    Raises an error of DECLINED if cuDNN declines it, also where the frontend does not know a knob of cuDNN.
    """
    pygraph.create_execution_plan(choice.engine, {cudnn.knob_type(k): v for k, v in choice.knobs})
    return pygraph.get_execution_plan_count() - 1


def compiles_slowly(graph: CudnnGraph, engine: int) -> bool:
    """Tell if plans of an engine take several times as long to compile as others of their list."""
    return engine == SLOW_BUILD_OF_INTEGERS and any(call.compute is DType.I32 for call in graph.calls)


def build(pygraph: Any, place: int, engine: int, plan_filter: PlanFilter) -> int:
    """Build the plan at a place of the list, and return the bytes of its workspace.

    Raises an error of DECLINED if it does not build, LeftOutError if its workspace exceeds the limit.
    """
    pygraph.build_plan_at_index(place)
    workspace_bytes = int(pygraph.get_workspace_size_plan_at_index(place))
    if reason := plan_filter.reason(engine, workspace_bytes):
        raise LeftOutError(reason)
    return workspace_bytes


def exclude_notes(pygraph: Any, graph: CudnnGraph, deterministic: bool) -> None:
    """Let plans not build that a graph excludes: with tensor cores, or not deterministic. Takes effect at the build."""
    excluded = {"TENSOR_CORE": not graph.tensor_cores, "NONDETERMINISTIC": deterministic}
    notes = [getattr(cudnn.numerical_note, name) for name, out in excluded.items() if out]
    if notes:
        pygraph.deselect_numeric_notes(notes)


def serialized(pygraph: Any, place: int) -> bytes:
    """Build the plan at a place of the list, if it is not built yet, and serialize it."""
    pygraph.build_plan_at_index(place)  # also selects it for `serialize`
    return bytes(pygraph.serialize())
