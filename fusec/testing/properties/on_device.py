"""Check that a GPU computes what the graph means: the whole program, and each cuDNN graph by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol
from unittest import SkipTest

import numpy as np

from fusec.compiler.choose_target import require_runs_on_gpu
from fusec.errors import ExecutionError, TargetError
from fusec.gpu import device
from fusec.ir import Array, Graph, Node, Value, print_node
from fusec.ops import Scatter
from fusec.runtime import Executable
from fusec.targets.target import load
from fusec.testing.case import Case
from fusec.testing.error_bounds.bounds import allowed, compare, execution
from fusec.testing.properties.compiling import lowered_agrees
from fusec.testing.properties.fixtures import CASE, LoweredStep, Prepared, prepared

if TYPE_CHECKING:
    from fusec.gpu.backend import CudnnBackend


class Device(Protocol):
    """A backend that computes on a GPU through CuPy."""

    xp: Any


FAULTED = 70  # exit status of a process whose CUDA context is lost


def device_agrees(graph: Graph, case: Case = CASE) -> None:
    """Check that a graph compiled for this GPU and run on it gives the outputs of the model, and so does each step.

    cuDNN judges what is legal. Elements that depend on NaN or infinities are not checked. On a GPU the maximum of NaN
    and a number is the number (IEEE 754's maxNum). So relu, clip, max and min lose NaNs that the reference has, and
    some engines lose infinities. A memory fault ends the process, because nothing runs on the GPU after it.
    """
    shared = on_this_gpu(graph, case, "cudnn")
    compiled, backend = shared.compiled, gpu_backend()
    rounding = execution(case.options.tensor_cores, device=True)
    try:
        require_runs_on_gpu(compiled)
    except TargetError as error:
        raise SkipTest(str(error)) from error
    try:
        options, goal = compiled.options, compiled.target
        joined = backend.tune_steps(compiled.program, options.tensor_cores, goal.launch_us, options.as_source)
        executable = Executable(replace(compiled, program=joined), backend)
        for step in different_graphs(shared):
            lowered_agrees(replace(step, what=f"{step.what} on the GPU"), rounding, backend.run_on_host)
        names = [spec.name for spec in executable.outputs]
        # The first call runs step by step. It leaves other numbers in memory, and the replay must overwrite them.
        executable.run(None, {name: np.roll(array, 1) for name, array in shared.feeds.items()})
        got = dict(zip(names, executable.run(None, dict(shared.feeds)), strict=True))
    except ExecutionError as error:
        leave_if_faulted(error, backend)
        raise
    added = allowed(compiled.graph, shared.feeds, rounding)
    compare({name: np.asarray(array) for name, array in got.items()}, [shared.narrowed_meaning, added], "the GPU")


def on_this_gpu(graph: Graph, case: Case, judge: str) -> Prepared:
    """Compile a graph for the GPU of this machine, with ties in place of NaN and infinities.

    Raises TargetError if the machine has no GPU of the case's target, SkipTest if the graph has no fixed result.
    """
    if not device.is_present(load(case.target)):
        raise TargetError(f"this machine has no GPU that is a {case.target}")
    shared = prepared(graph, replace(case, judge=judge, style="ties" if case.style == "special" else case.style))
    for node in shared.compiled.graph.nodes:
        if isinstance(node.op, Scatter) and node.op.reduction == "none" and _replaces_twice(node, shared.values):
            raise SkipTest(f"{print_node(node)}: updates replace the same row, and any of them may stay")
    return shared


def _replaces_twice(scatter: Node, values: Mapping[Value, Array]) -> bool:
    """Tell if a row has several updates. Random graphs have none, but they may appear while a graph is shrunk."""
    x, indices = scatter.operands[:2]
    at = values[indices] if indices.literal is None else indices.literal.array
    return len(np.unique(at % max(1, x.type.shape[0]))) < at.size


def different_graphs(shared: Prepared) -> list[LoweredStep]:
    """Return one step for each different cuDNN graph."""
    return list({step.lowered.graph.key: step for step in shared.lowered_steps}.values())


def leave_if_faulted(error: ExecutionError, backend: Device) -> None:
    """End the process if its GPU no longer runs anything after an error."""
    if not _alive(backend):
        print(f"the GPU faulted: {error}", flush=True)
        os._exit(FAULTED)


@cache
def gpu_backend() -> CudnnBackend:
    """Open the backend that this process runs its graphs on, without tuning."""
    from fusec.gpu.backend import CudnnBackend  # needs cupy and cudnn, which only a GPU machine must have

    return CudnnBackend("none")


def _alive(backend: Device) -> bool:
    """Tell if the GPU still computes for this process."""
    try:
        return int(backend.xp.ones(2).sum()) == 2
    except Exception:  # noqa: BLE001 - cupy has an error class for each library below it
        return False
