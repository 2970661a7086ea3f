"""List the plans that cuDNN offers for a frontend graph, without those that fusec does not use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cudnn

from fusec.gpu.cudnn.engine_ids import PYTHON_ENGINES, identity_of
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.known_bugs import wrong_plan
from fusec.plans.verdict import Plan

DECLINED = (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError)


@dataclass(frozen=True)
class PlanList:
    """Plans by place in cuDNN's list, and why the first of the others is known to be wrong, if one is."""

    plans: dict[int, Plan]
    wrong: str | None


def list_plans(pygraph: Any, graph: CudnnGraph) -> PlanList:
    """List the plans of a frontend graph whose operation graph is built. Raises an error of DECLINED without any."""
    pygraph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    plans: dict[int, Plan] = {}
    wrong: str | None = None
    for place in range(pygraph.get_execution_plan_count()):
        engine, knobs = identity_of(pygraph, place)
        if not 0 <= engine < PYTHON_ENGINES:
            continue
        reason = wrong_plan(graph, engine, dict(knobs))
        if reason is None:
            notes = pygraph.get_behavior_notes_for_plan_at_index(place)
            plans[place] = Plan(engine, knobs, cudnn.behavior_note.RUNTIME_COMPILATION not in notes)
        wrong = wrong or reason
    return PlanList(plans, wrong)


def exclude_notes(pygraph: Any, graph: CudnnGraph, deterministic: bool = False) -> None:
    """Let plans not build that a graph excludes: with tensor cores, or not deterministic. Takes effect at the build."""
    excluded = {"TENSOR_CORE": not graph.tensor_cores, "NONDETERMINISTIC": deterministic}
    notes = [getattr(cudnn.numerical_note, name) for name, out in excluded.items() if out]
    if notes:
        pygraph.deselect_numeric_notes(notes)


def serialized(pygraph: Any, place: int) -> bytes:
    """Build the plan at a place of the list, if it is not built yet, and serialize it."""
    pygraph.build_plan_at_index(place)  # also selects it for `serialize`
    return bytes(pygraph.serialize())
