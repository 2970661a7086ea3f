"""Build the plans of programs for GPUs that this machine may not have, and apply a lock to programs.

Plans that are built here are trusted: this machine may read their machine code.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from fusec import lockfile
from fusec.errors import CheckError
from fusec.execution.compilation import Compiled
from fusec.execution.compile_options import Progress
from fusec.gpu.autotune.candidates.candidate_times import kernels_of
from fusec.gpu.autotune.step_choices import apply_choices
from fusec.gpu.cudnn.plans import plan_serialization
from fusec.gpu.cudnn.without_driver.deviceless import cudnn_number, nvrtc_libraries
from fusec.gpu.kernels import Kernel
from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.gpu.launch.cubins import CompiledKernels, compile_all
from fusec.plans.lock_record import Lock
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import Choice, Entry
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class PlansAndKernels:
    """Hold what a `.fusec` file has of programs apart from their steps.

    plans: serialized plans, by target and key of the cuDNN graph, best first
    kernels: compiled kernels, by target and key of the source (`cubins.CudaSource`)
    """

    plans: lockfile.Plans
    kernels: CompiledKernels


def build_plans(
    compiled: Sequence[Compiled], report: Progress, choices: Sequence[Mapping[str, Choice]] | None = None
) -> PlansAndKernels:
    """Build and serialize the plans of programs, and compile their kernels.

    Where nothing is chosen, these are also the plans and kernels of other candidates of the steps, which a GPU times at
    first load.

    choices: for each program the plans of a lock, by key; None for the first plans that cuDNN offers.
    """
    store, cudnn = PlanStore(), cudnn_number()
    plans: dict[tuple[str, str], Sequence[Entry]] = {}
    kernels: dict[tuple[str, str], Entry] = {}
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
        found = compile_all(
            _kernels(c), c.target.sm, nvrtc_libraries(), lambda done, total: report("kernels", done, total)
        )
        kernels.update({(c.target.name, key): entry for key, entry in found.items()})
    made_here = itertools.chain(*plans.values(), kernels.values())
    store.trust(*(entry.blob for entry in made_here if entry.blob is not None))
    return PlansAndKernels(plans, kernels)


def _kernels(compiled: Compiled) -> list[Kernel]:
    """List the kernels that may run steps of a program: with all variants, or with the one that was chosen."""
    if compiled.tuned is None:
        return list(compiled.candidate_kernels.values())
    lock = compiled.tuned if isinstance(compiled.tuned, Lock) else lockfile.make([compiled])
    named = lockfile.variants(lock, compiled.program, compiled.target, compiled.options.tensor_cores)
    program = apply_choices(compiled.program, {}, compiled.figures, compiled.options.as_source)
    found = ((kernel, named.get(kernel.key, kernel.key)) for kernel in kernels_of(program, compiled.figures))
    return [variant for kernel, key in found for variant in variants_of(kernel) if variant.key == key]


def apply_lock(path: Path, compiled: Sequence[Compiled]) -> list[lockfile.LockedProgram]:
    """Apply a lock file to each program.

    Raises CheckError if a step has no entry, or its plan is in quarantine.
    """
    lock, store, cudnn = lockfile.read(path), PlanStore(), cudnn_number()
    programs = [lockfile.apply(lock, c) for c in compiled]
    for c, each in zip(compiled, programs, strict=True):
        for key, choice in each.choices.items():
            for engine, knobs, reason in store.quarantined(key, c.target.name, cudnn):
                if (engine, knobs) == choice.identity:
                    raise CheckError(f"{path}: engine {engine} on {c.target.name} is in quarantine: {reason}")
    return programs
