"""Record the answer of cuDNN about a graph: legal, with the plans it offers, or refused, with the reason."""

from __future__ import annotations

from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class Plan:
    """An execution plan that cuDNN offers. Engine and knobs identify it, because its place in cuDNN's list changes."""

    engine: int
    knobs: tuple[tuple[int, int], ...]  # (knob type, value), sorted
    precompiled: bool  # False: compiled at run time by NVRTC
    workspace_bytes: int = 0
    built: bool = False  # cuDNN has built it, and not only offered it


@dataclass(frozen=True)
class Legal:
    """Legal: cuDNN built at least one of these plans, for this graph or for the same graph with other sizes.

    Without plans, cuDNN was not asked: see `PROPOSED`.
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


# Not a status of cuDNN, because verdicts with a status of fusec are not stored.
ONLY_TENSOR_CORES = "every plan uses tensor cores, which fp32 excludes (tf32)"


@dataclass(frozen=True)
class Refused:
    """Refused. stage: lower, validate, build_operation_graph, plan, build or crash."""

    stage: str
    code: str  # cuDNN status name where there is one
    message: str  # of cuDNN; for stage `lower` of fusec

    @property
    def needs_tensor_cores(self) -> bool:
        """Tell if cuDNN has only plans that round fp32 to tf32."""
        return self.message == ONLY_TENSOR_CORES


# The refusal of a graph that was not asked about, because the budget of the compilation was spent. Never stored.
UNASKED = Refused("fusec", "FUSEC_BUDGET", "the budget was spent before cuDNN was asked about this")

Verdict = Legal | Refused

# The verdict of fusec's rules on a graph that they would ask cuDNN about, where cuDNN is not installed.
PROPOSED = Legal(())
