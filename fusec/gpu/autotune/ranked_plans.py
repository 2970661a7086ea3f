"""Define the bench that builds, times and compares plans, hold the plans ranked on it, and reject wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fusec.gpu.measure.tolerance import TOLERANCE
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import BLAS, Choice


@dataclass(frozen=True)
class Offer:
    """Plan that cuDNN or cuBLASLt offers for a graph, before it is built.

    is_slow: it takes several times as long to compile as others of the list
    named: created by engine and knobs; `place` is among such plans, and not in cuDNN's list
    """

    place: int
    choice: Choice
    precompiled: bool
    is_slow: bool = False
    named: bool = False


class PlanBench(Protocol):
    """Device that builds, times and compares plans."""

    def offers(self, graph: CudnnGraph) -> Sequence[Offer]:
        """List cuDNN's plans in its order, without those known to be wrong, then those of cuBLASLt.

        Raises ExecutionError if there are none.
        """
        ...

    def expect(self, orders: Sequence[tuple[CudnnGraph, Offer]]) -> None:
        """Announce the plans to build, in order; they replace those announced before."""
        ...

    def build(self, graph: CudnnGraph, offer: Offer) -> Any:
        """Build a plan. Raises ExecutionError if it does not build, or needs more memory than is free."""
        ...

    def time_us(self, graph: CudnnGraph, plan: Any) -> float:
        """Time one run as within the model, in microseconds. Raises ExecutionError when it fails."""
        ...

    def once_us(self, graph: CudnnGraph, plan: Any) -> float:
        """Time one run whatever the caches hold, in microseconds. Raises ExecutionError when it fails."""
        ...

    def error(self, graph: CudnnGraph, plan: Any, other: Any | None) -> float | None:
        """Compare a plan's results with another plan's, or with the reference where `other` is None.

        Returns the relative L2 error, NaN if an element is NaN; None if the reference would take too long.
        """
        ...

    def quarantine(self, graph: CudnnGraph, choice: Choice, reason: str) -> None:
        """Never use this plan again."""
        ...


@dataclass
class RankedPlans:
    """Built plans of one graph, the best first, and the reasons why others were rejected.

    revived: the only plan was read from its serialized form
    rival_us: the time of the fastest other way to run the steps of the graph, as far as known
    is_beaten: plans were not tried, or not timed exactly, because the rival is far faster
    """

    graph: CudnnGraph
    plans: list[tuple[Choice, Any]] = field(default_factory=list[tuple[Choice, Any]])
    rejected: list[str] = field(default_factory=list[str])
    revived: bool = False
    rival_us: float = float("inf")
    is_beaten: bool = False

    @property
    def time_us(self) -> float:
        """Return the time of the best plan; infinite if there is none."""
        if not self.plans:
            return float("inf")
        time_us = self.plans[0][0].time_us
        return 0.0 if time_us is None else time_us

    def reject(self, choice: Choice, reason: object) -> None:
        """Record why a plan is not used."""
        self.rejected.append(f"{choice.name} {dict(choice.knobs)}: {reason}")


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
