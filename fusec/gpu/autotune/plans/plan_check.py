"""Reject plans whose results are wrong, by the reference or by a vote of three plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fusec.gpu.autotune.ranked_plans import PlanBench, RankedPlans
from fusec.gpu.measure.tolerance import TOLERANCE
from fusec.plans.plan_record import BLAS


def reject_wrong_plans(bench: PlanBench, result: RankedPlans) -> None:
    """Reject the best plan while its results are wrong, by the reference or by a vote of three plans."""
    while result.plans:
        choice, plan = result.plans[0]
        error = bench.error(result.graph, plan, None)
        others = _voters(result)
        if error is None and others:
            errors: list[float | None] = []
            for other in others:  # until one agrees
                errors.append(bench.error(result.graph, plan, other))
                if (last := errors[-1]) is not None and last <= TOLERANCE:
                    break
            agreeing = [e for e in errors if e is not None and e <= TOLERANCE]
            error = agreeing[0] if agreeing else errors[0]
        if error is None or error <= TOLERANCE:
            result.plans[0] = (replace(choice, error=error), plan)
            return
        reason = f"its results are off by {error:.2g}"
        result.reject(choice, reason)
        bench.quarantine(result.graph, choice, reason)
        del result.plans[0]


def _voters(result: RankedPlans) -> list[Any]:
    """Choose at most two plans to compare the best with.

    They use other engines if possible, because plans of one engine may share an error. One of them is of the other
    library if there is one.
    """
    choice = result.plans[0][0]
    rest = sorted(result.plans[1:], key=lambda p: p[0].engine == choice.engine)
    same = [plan for c, plan in rest if c.library == choice.library]
    others = [plan for c, plan in rest if c.library != choice.library]
    if choice.engine == BLAS:
        return others[:2] or same[:2]
    return [*others[:1], *same, *others[1:]][:2]
