"""Load a compiled model from a `.fusec` file; nothing is compiled."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from dataclasses import replace

from fusec import lockfile
from fusec.artifacts import fusec_file
from fusec.compiler.choose_target import require_cudnn, require_runs_on_gpu
from fusec.errors import ModelError
from fusec.execution.backend import SimulatorBackend
from fusec.gpu import device
from fusec.gpu.autotune.step_choices import apply_choices
from fusec.runtime import Executable


def load(
    path: str | os.PathLike[str], *, target: str = "auto", tune: str = "quick", simulate: bool = False
) -> Executable:
    """Load a model that was saved as a `.fusec` file, and return it ready to call.

    target: one of those it was compiled for; `auto`: this machine's GPU, or the file's first target without one.
    tune: `quick` takes the plans of the file, and times only these if they were built without a GPU; `none` takes
        the first plan of each step; `full` chooses again.
    simulate: run in simulation, also if the target's GPU is present.
    Raises ModelError when the file is damaged, or does not have the target.
    """
    with nullcontext() if simulate else device.woken(target):
        artifact = load_artifact(path, target)
    if simulate or not device.is_present(artifact.compiled.target):
        return Executable(artifact.compiled, SimulatorBackend())
    require_cudnn()
    require_runs_on_gpu(artifact.compiled)
    for note in artifact.notes:
        warnings.warn(note, stacklevel=2)
    return _on_gpu(artifact, tune)


def load_artifact(path: str | os.PathLike[str], target: str = "auto") -> fusec_file.Artifact:
    """Read what a `.fusec` file holds for a target; see `load`."""
    file = os.fspath(path)
    if target == "auto":
        here, known = device.detect(), fusec_file.targets(file)
        if here is not None and here.name not in known:
            raise ModelError(f"{file}: was compiled for {', '.join(known)}; this machine's GPU is {here.name}")
        target = here.name if here is not None else known[0]
    return fusec_file.load(file, target)


def _on_gpu(artifact: fusec_file.Artifact, tune: str) -> Executable:
    """Prepare the file's program with the choices of the file's lock."""
    from fusec.gpu.autotune.tuning_cache import KnownChoices
    from fusec.gpu.backend import CudnnBackend  # needs cupy and cudnn, which only a GPU machine must have

    compiled, lock = artifact.compiled, artifact.lock
    options = compiled.options
    program = apply_choices(compiled.program, {}, options.as_source)
    known = KnownChoices(
        {} if options.deterministic else artifact.plans,  # a file's plans were not chosen for that
        lockfile.variants(lock, program, compiled.target, options.tensor_cores),
        accept_incomplete=tune != "full",
        side_by_side=tune != "full" and lockfile.side_by_side(lock, compiled.target),
    )
    backend = CudnnBackend(tune, known, deterministic=options.deterministic)
    return Executable(replace(compiled, program=program), backend)
