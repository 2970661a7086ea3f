"""Record cuDNN's answer about a graph: legal, with the plans it offers, or refused, with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """One execution plan cuDNN offers. `engine` and `knobs` identify it; its place in a list drifts."""

    engine: int
    knobs: tuple[tuple[int, int], ...]  # (knob type, value), sorted
    precompiled: bool  # False: compiled at run time by NVRTC
    workspace_bytes: int = 0
    built: bool = False  # finalised by cuDNN, not only offered


@dataclass(frozen=True)
class Legal:
    """Legal: at least one of `plans` was built, or the same plan for a graph of other sizes.

    Without plans cuDNN was not asked: see `PROPOSED`.
    """

    plans: tuple[Plan, ...]

    @property
    def precompiled(self) -> int:
        return sum(p.precompiled for p in self.plans)

    @property
    def kind(self) -> str:
        """Return `precompiled` if any plan is, else `runtime`; `proposed` if cuDNN was not asked."""
        if not self.plans:
            return "proposed"
        return "precompiled" if self.precompiled else "runtime"


@dataclass(frozen=True)
class Refused:
    """Refused. `stage` is lower, validate, build_operation_graph, plan, build or crash."""

    stage: str
    code: str  # cuDNN status name where there is one
    message: str  # cuDNN's own words (for stage `lower`: fusec's)


Verdict = Legal | Refused

# What fusec's rules say of a graph that they would put to cuDNN, where cuDNN cannot be asked. It claims no plan.
PROPOSED = Legal(())
