"""`fusec compile -o model.fusec` and `fusec lock`: what a compilation decided, written down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusec.cli_io import Report

if TYPE_CHECKING:
    from fusec.compiled import Compiled

# What a command needs is imported inside it, as in cli.py.


def save(path: Path, compiled: Sequence[Compiled], report: Report) -> None:
    """Write a `.fusec` file with plans built here, also for GPUs this machine does not have."""
    from fusec import artifact
    from fusec.gpu import blobs
    from fusec.plan_store import PlanStore
    from fusec.plans import Entry

    store = PlanStore()
    plans: dict[tuple[str, str], Sequence[Entry]] = {}
    for c in compiled:
        graphs = [lowered.graph for lowered in c.lowered if lowered is not None]
        cudnn = artifact.versions()["cudnn"]
        skip = {g.key: [(e, k) for e, k, _ in store.quarantined(g.key, c.target.name, cudnn)] for g in graphs}
        made = blobs.serialize(graphs, c.target, skip=skip, progress=lambda done, total: report("plans", done, total))
        plans.update({(c.target.name, key): entries for key, entries in made.items()})
    for entries in plans.values():
        for entry in entries:
            if entry.blob is not None:
                store.trust(entry.blob)  # built by this very machine
    artifact.save(path, compiled, plans)
