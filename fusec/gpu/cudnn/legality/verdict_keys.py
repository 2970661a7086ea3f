"""Compute what a stored verdict depends on, for its key, and tell which verdicts are stored."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

from fusec.gpu.cudnn.without_driver.deviceless import cudnn_version, nvrtc_libraries
from fusec.lowering import known_bugs
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.verdict import Legal, Verdict
from fusec.system.installed import installed_version
from fusec.targets.target import Target

SCHEMA = 14  # of stored verdicts: raise it when their meaning changes
# Codes that describe the state of the machine, not the graph.
PASSING = ("CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED")


def verdict_environment(target: Target, device: bool, plan_filter: PlanFilter | None = None) -> str:
    """Return a digest of what a verdict depends on, apart from the graph. No wheel is loaded for it."""
    filtered = [] if plan_filter is None or plan_filter.is_default else [plan_filter.key]
    nvrtc = [Path(library).name for library in nvrtc_libraries()]  # the name of the builtins has the minor version
    versions = [installed_version("nvidia-cudnn-frontend") or "", cudnn_version(), *nvrtc]
    text = json.dumps([SCHEMA, _rules_digest(), target.digest, device, versions, *filtered])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def _rules_digest() -> str:
    """Return a digest of the rules that leave plans out, because a stored verdict holds the plans that they left."""
    sources = sorted(Path(known_bugs.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def lasts(verdict: Verdict) -> bool:
    """Return True if a verdict holds the next time."""
    if isinstance(verdict, Legal):
        return True
    return verdict.code not in PASSING and not verdict.code.startswith("FUSEC_")


def is_listed(verdict: Verdict) -> bool:
    """Return True if a graph is legal because of plans that were built for others."""
    return isinstance(verdict, Legal) and not any(plan.built for plan in verdict.plans)
