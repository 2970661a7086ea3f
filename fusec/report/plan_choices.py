"""Tell which plan runs each cuDNN step, how it was chosen, and what else cuDNN offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusec.execution.compilation import Compiled
from fusec.lockfile import work_of
from fusec.plans.lock_record import Lock
from fusec.plans.plan_record import BLAS, Choice, Entry
from fusec.plans.verdict import Plan
from fusec.report.knob_names import knobs_text
from fusec.report.records import PlanChoice, ReportedPlan
from fusec.schedule.program import Partition

Plans = Mapping[str, Sequence[Entry]]  # by key of the cuDNN graph, best first
FIRST = "the first plan that cuDNN built; no plan was timed"


def plan_choices(compiled: Compiled, plans: Plans) -> list[PlanChoice | None]:
    """Return the plans of each step; None for steps that are no cuDNN graph.

    plans: what a backend prepared, or a `.fusec` file holds; other steps have the plan of the file's lock, or the
        first one that cuDNN built.
    """
    found: dict[str, PlanChoice] = {}
    result: list[PlanChoice | None] = []
    for index, (step, lowered) in enumerate(zip(compiled.program.steps, compiled.lowered, strict=True)):
        if lowered is None:
            result.append(None)
            continue
        key = lowered.graph.key
        if key not in found:
            offered = () if step.verdict is None else step.verdict.plans
            chosen, why = _chosen(compiled, step, offered, plans.get(key, ()))
            row = None if chosen is None else _row(chosen, offered)
            found[key] = PlanChoice(row, why, tuple(map(_offer, offered)), str(lowered.graph), index)
        result.append(found[key])
    return result


def _chosen(
    compiled: Compiled, step: Partition, offered: Sequence[Plan], entries: Sequence[Entry]
) -> tuple[Choice | None, str]:
    """Return the plan of a step, and how it was chosen."""
    lock = compiled.tuned if isinstance(compiled.tuned, Lock) else None
    choice = entries[0].choice if entries else None
    if choice is None and lock is not None:
        choice = lock.choice(work_of(step, compiled.graph, compiled.options.tensor_cores), compiled.target.name)
    if choice is not None:
        by = "prepared" if lock is None else "as its lock says"
        return choice, f"{by}; {'no plan was timed' if choice.time_us is None else 'timed on a GPU'}"
    if not offered:
        return None, "cuDNN was not asked"
    return Choice.of(next((plan for plan in offered if plan.built), offered[0])), FIRST


def _row(choice: Choice, offered: Sequence[Plan]) -> ReportedPlan:
    same = [plan for plan in offered if (plan.engine, plan.knobs) == choice.identity]
    compiled = _compiled(same[0]) if same else ""
    knobs = knobs_text(choice.engine, choice.knobs)
    return ReportedPlan(choice.name, knobs, compiled, choice.workspace_bytes, choice.time_us)


def _offer(plan: Plan) -> ReportedPlan:
    name = "cuBLASLt" if plan.engine == BLAS else f"engine {plan.engine}"
    return ReportedPlan(name, knobs_text(plan.engine, plan.knobs), _compiled(plan), plan.workspace_bytes)


def _compiled(plan: Plan) -> str:
    return "precompiled" if plan.precompiled else "at run time"
