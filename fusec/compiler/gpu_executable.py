"""Prepare a program for this machine's GPU: choose plans and kernels by timing them, or take those of a lock."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from fusec import lockfile
from fusec.compiler.choose_judge import CudnnWorkers
from fusec.errors import CheckError
from fusec.execution.compilation import Compiled
from fusec.execution.compile_options import CompileOptions
from fusec.execution.shape_family import ShapeFamily
from fusec.execution.shared_weights import SharedWeights
from fusec.gpu.autotune.plans.plan_search import TuningOptions
from fusec.ir import Array
from fusec.plans.plan_record import Entry
from fusec.runtime import Executable, SimulatorBackend

if TYPE_CHECKING:
    from fusec.gpu.backend import CudnnBackend

# fusec.gpu.backend is imported within functions, because it needs cupy and cudnn, which only a GPU machine must have.


def tuned_executable(
    compiled: Compiled, options: CompileOptions, workers: CudnnWorkers, family: ShapeFamily | None
) -> Executable:
    """Time candidates of each step on the GPU, and prepare the fastest.

    workers: may hold plans that were built to judge graphs.
    family: the programs of the same model for other input shapes, which share weights and kernels.
    """
    from fusec.gpu.backend import CudnnBackend
    from fusec.gpu.launch.cubins import forget_ahead

    plan_filter = compiled.options.plan_filter
    backend = CudnnBackend(
        TuningOptions(options.tune, options.budget_s, options.progress),
        plan_filter=plan_filter,
        kernel_cache=None if family is None else family.shared_kernels(),
        build_pool=workers.builders(plan_filter),
    )
    executable = autotune(compiled, backend, None if family is None else family.weights)
    forget_ahead()
    if family is None:  # with several input shapes, timing each whole model would take too long
        executable.rehearse(backend.tune_whole_model)
    return executable


def tune_whole(executable: Executable, state: Mapping[str, Array]) -> None:
    """Choose plans and kernels of a program with state by the time of the whole, before the first call.

    Nothing is tried in simulation, or without tuning.
    state: values that some inputs of the state have meanwhile; see `Executable.rehearse`.
    """
    if isinstance(executable.backend, SimulatorBackend):
        return
    from fusec.gpu.backend import CudnnBackend

    assert isinstance(executable.backend, CudnnBackend)
    if executable.backend.tune != "none":
        executable.rehearse(executable.backend.tune_whole_model, state)


def locked_executable(
    locked: lockfile.LockedProgram, path: str | os.PathLike[str], options: CompileOptions, workers: CudnnWorkers
) -> Executable:
    """Prepare the plans and kernels that a lock names; nothing is timed.

    path: path of the lock, for messages.
    workers: are closed, because nothing is asked any more.
    Raises CheckError when a plan of the lock does not build on this GPU.
    """
    from fusec.gpu.autotune.cache.tuning_cache import KnownChoices
    from fusec.gpu.backend import CudnnBackend

    workers.close()
    plans = {key: [Entry(choice)] for key, choice in locked.choices.items()}
    backend = CudnnBackend(
        TuningOptions(progress=options.progress),
        KnownChoices(plans, locked.variants, side_by_side=locked.side_by_side),
        plan_filter=locked.compiled.options.plan_filter,
    )
    executable = Executable(locked.compiled, backend)
    for key, choice in backend.choices().items():
        if choice.identity != locked.choices[key].identity:
            raise CheckError(f"{os.fspath(path)}: {locked.choices[key].name} does not build on this GPU")
    return executable


def autotune(
    compiled: Compiled,
    backend: CudnnBackend,
    weights: SharedWeights | None,
    prefer_kernels: bool = False,
    only: frozenset[str] | None = None,
) -> Executable:
    """Let the backend replace steps by candidates that it finds faster, and prepare the result.

    prefer_kernels: run a pointwise step as a kernel of fusec's without timing it.
    only: the keys of the cuDNN graphs that compete; None: all.
    """
    tensor_cores, as_source = compiled.options.tensor_cores, compiled.options.as_source
    given = (compiled.program, tensor_cores, compiled.target.launch_us, as_source, prefer_kernels)
    program = backend.tune_steps(*given, only=only)
    return Executable(replace(compiled, program=program, tuned=backend.tuned), backend, weights)
