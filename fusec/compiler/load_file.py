"""Load a compiled model from a `.fusec` file; nothing is compiled."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from dataclasses import replace

from fusec import lockfile
from fusec.artifacts import fusec_file
from fusec.compiler.choose_target import require_cudnn, require_runs_on_gpu
from fusec.compiler.compile_ahead import candidates_compiled_ahead
from fusec.compiler.gpu_executable import autotune
from fusec.errors import ModelError
from fusec.execution.shared_weights import SharedWeights
from fusec.execution.simulator_backend import SimulatorBackend
from fusec.gpu import device
from fusec.gpu.autotune.step_choices import apply_choices
from fusec.gpu.cudnn.load_engines import load_engines_once
from fusec.gpu.cudnn.without_driver.deviceless import load_cudnn
from fusec.plans.plan_cache import PlanStore
from fusec.runtime import Executable
from fusec.system.garbage import seldom_collected


def load(
    path: str | os.PathLike[str], *, target: str = "auto", tune: str = "quick", simulate: bool = False
) -> Executable:
    """Load the program of a `.fusec` file, the first one if it has several, and return it ready to call.

    Parameters as in `fusec.dynamic_shapes.load_shapes.load`.
    """
    with seldom_collected():
        with nullcontext() if simulate else device.woken(target, load_engines_once):
            artifact = load_artifact(path, target, simulate)
        return executable_of(artifact, tune, simulate)


def executable_of(
    artifact: fusec_file.Artifact, tune: str, simulate: bool, weights: SharedWeights | None = None
) -> Executable:
    """Prepare the program of a file: on the GPU if it is this machine's, else in simulation.

    weights: shared with the other programs of the file.
    """
    if simulate or not device.is_present(artifact.compiled.target):
        return Executable(artifact.compiled, SimulatorBackend(), weights)
    require_cudnn()
    require_runs_on_gpu(artifact.compiled)
    load_cudnn()
    for note in artifact.notes:
        warnings.warn(note, stacklevel=2)
    return _on_gpu(artifact, tune, weights)


def load_artifact(path: str | os.PathLike[str], target: str = "auto", simulate: bool = False) -> fusec_file.Artifact:
    """Read what a `.fusec` file holds for a target, of its first program if it has several; see `load`."""
    return fusec_file.load(os.fspath(path), target_of(path, target, simulate))


def target_of(path: str | os.PathLike[str], target: str, simulate: bool = False) -> str:
    """Return the target of a file to load; for `auto` that of this machine's GPU, or the file's first without one."""
    if target != "auto":
        return target
    file = os.fspath(path)
    here, known = None if simulate else device.detect(), fusec_file.targets(file)
    if here is not None and here.name not in known:
        raise ModelError(f"{file}: was compiled for {', '.join(known)}; this machine's GPU is {here.name}")
    return here.name if here is not None else known[0]


def _on_gpu(artifact: fusec_file.Artifact, tune: str, weights: SharedWeights | None) -> Executable:
    """Prepare the file's program with the choices of the file's lock.

    A file that was made without a GPU names no variants of kernels, and perhaps no choices for its steps. The variants
    are timed once, and so are the candidates of each step, as far as the file has plans of them. The cache stores what
    was chosen for the next load.
    """
    from fusec.gpu.autotune.cache.tuning_cache import KnownChoices, TuningCache
    from fusec.gpu.autotune.cache.tuning_environment import environment_here
    from fusec.gpu.backend import CudnnBackend  # needs cupy and cudnn, which only a GPU machine must have
    from fusec.gpu.launch.cubins import forget_ahead
    from fusec.gpu.launch.kernel_launcher import forget_loaded

    compiled, lock = artifact.compiled, artifact.lock
    options = compiled.options
    competes = artifact.open_choices and tune == "quick" and not options.deterministic
    program = apply_choices(compiled.program, {}, compiled.figures, options.as_source)
    known = KnownChoices(
        {} if options.deterministic else artifact.plans,  # a file's plans were not chosen for that
        variants=lockfile.variants(lock, program, compiled.target, options.tensor_cores) if lock.timed else {},
        kernels=artifact.kernels,
        accept_incomplete=tune != "full",
        side_by_side=tune != "full" and lockfile.side_by_side(lock, compiled.target),
    )
    if competes:
        environment = environment_here(device.device_name() or "GPU", options.plan_filter, False)
        with candidates_compiled_ahead(compiled, TuningCache(PlanStore(), environment, tune, known)):
            backend = CudnnBackend(tune, known, plan_filter=options.plan_filter)
        own = (lowered.graph.key for lowered in compiled.lowered if lowered is not None)
        executable = autotune(compiled, backend, weights, only=frozenset((*own, *artifact.plans)))
        forget_ahead()
        forget_loaded()
        return executable
    backend = CudnnBackend(tune, known, plan_filter=options.plan_filter)
    backend.time_variants(program)
    return Executable(replace(compiled, program=program), backend, weights)
