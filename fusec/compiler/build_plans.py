"""Build the plans of programs for GPUs that this machine may not have, and apply a lock to programs.

Plans that are built here are trusted: this machine may read their machine code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fusec import lockfile
from fusec.errors import CheckError
from fusec.execution.compilation import Compiled
from fusec.execution.compile_options import Progress
from fusec.gpu.cudnn import plan_serialization
from fusec.gpu.cudnn.deviceless import cudnn_number
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import Choice, Entry


def build_plans(
    compiled: Sequence[Compiled], report: Progress, choices: Sequence[Mapping[str, Choice]] | None = None
) -> dict[tuple[str, str], Sequence[Entry]]:
    """Build and serialize the plans of programs, by target and key of the cuDNN graph.

    Where nothing is chosen, these are also the plans of other candidates of the steps, which a GPU times at first load.

    choices: for each program the plans of a lock, by key; None for the first plans that cuDNN offers.
    """
    store, cudnn = PlanStore(), cudnn_number()
    plans: dict[tuple[str, str], Sequence[Entry]] = {}
    for index, c in enumerate(compiled):
        graphs = [lowered.graph for lowered in c.lowered if lowered is not None]
        own = {graph.key for graph in graphs}
        others = {} if choices is not None or c.tuned is not None else c.candidate_graphs
        graphs += [graph for key, graph in others.items() if key not in own]
        skip = {g.key: [(e, k) for e, k, _ in store.quarantined(g.key, c.target.name, cudnn)] for g in graphs}
        wanted = None if choices is None else {key: [choice] for key, choice in choices[index].items()}
        made = plan_serialization.serialize(
            graphs,
            c.target,
            choices=wanted,
            skip=skip,
            optional=others.keys() - own,
            plan_filter=c.options.plan_filter,
            progress=lambda done, total: report("plans", done, total),
        )
        plans.update({(c.target.name, key): entries for key, entries in made.items()})
    for entries in plans.values():
        for entry in entries:
            if entry.blob is not None:
                store.trust(entry.blob)
    return plans


def apply_lock(path: Path, compiled: Sequence[Compiled]) -> list[lockfile.LockedProgram]:
    """Apply a lock file to each program.

    Raises CheckError: when a step has no entry, or its plan is in quarantine.
    """
    lock, store, cudnn = lockfile.read(path), PlanStore(), cudnn_number()
    programs = [lockfile.apply(lock, c) for c in compiled]
    for c, each in zip(compiled, programs, strict=True):
        for key, choice in each.choices.items():
            for engine, knobs, reason in store.quarantined(key, c.target.name, cudnn):
                if (engine, knobs) == choice.identity:
                    raise CheckError(f"{path}: engine {engine} on {c.target.name} is in quarantine: {reason}")
    return programs
