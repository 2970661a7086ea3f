"""Define the bench that builds, times and compares plans, and hold the plans ranked on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, Protocol

from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import Choice
from fusec.system.dataclass import dataclass


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


class RevivingPlanBench(PlanBench, Protocol):
    """Bench that also reads serialized plans, and creates plans by name."""

    def named(self, graph: CudnnGraph, choices: Sequence[Choice]) -> Sequence[Offer]:
        """Return the plans of these engines and knobs, without those that cuDNN refuses."""
        ...

    def revive(self, graph: CudnnGraph, blob: bytes) -> Any:
        """Read a serialized plan. Raises ExecutionError if cuDNN does not accept it."""
        ...

    def serialized(self, plan: Any) -> bytes | None:
        """Serialize a plan; None if cuDNN cannot."""
        ...

    def is_revived(self, plan: Any) -> bool:
        """Tell if a plan was read from its serialized form."""
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
