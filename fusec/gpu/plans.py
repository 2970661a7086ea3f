"""Choose and build one execution plan of a cuDNN graph on this machine's GPU."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fusec.cudnn_graph import CudnnGraph
from fusec.errors import ExecutionError
from fusec.gpu.emit import emit
from fusec.gpu.worker import knobs_of
from fusec.hazards import wrong_plan
from fusec.ir import DType
from fusec.simulate import extent

# cuDNN's lists run to some forty plans and end in ones a hundred times slower than the best; the best was
# among the first dozen of every layer measured on an H200.
CANDIDATES = 12
REPEATS = 5


@dataclass(frozen=True)
class BuiltPlan:
    """A finalised plan, ready to execute: the frontend graph that owns it and its place there."""

    pygraph: Any
    index: int
    workspace_bytes: int
    scalars: Mapping[int, np.ndarray[Any, Any]]  # passed by value, from host memory
    time_us: float | None  # median of a few runs, None if it was not timed

    def addresses(self, buffers: Mapping[int, int]) -> dict[int, int]:
        """What `execute` takes: device addresses by uid, and host addresses of numbers passed by value."""
        return {**buffers, **{uid: scalar.ctypes.data for uid, scalar in self.scalars.items()}}

    def execute(self, addresses: dict[int, int], workspace: int, handle: Any) -> None:
        """Queue the plan on the handle's stream, with scratch memory at the address `workspace`."""
        self.pygraph.execute_plan_at_index(addresses, workspace, self.index, handle)


def choose(graph: CudnnGraph, handle: Any, tune: str) -> BuiltPlan:
    """Build cuDNN's plans on the GPU of `handle`: the first that builds (`none`) or the fastest of the
    first dozen (`quick`). ExecutionError if none builds."""
    import cudnn  # present wherever a backend with a handle is

    pygraph = emit(graph, handle=handle)
    pygraph.validate()
    pygraph.build_operation_graph()
    pygraph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    if not graph.tensor_cores:
        pygraph.deselect_numeric_notes([cudnn.numerical_note.TENSOR_CORE])
    scalars = {t.uid: np.full(1, t.value, t.dtype.numpy) for t in graph.tensors if t.value is not None}
    built: list[BuiltPlan] = []
    reason = "it offers no plan"
    for index in range(pygraph.get_execution_plan_count()):
        engine, knobs = pygraph.get_engine_and_knobs_at_index(index)
        wrong = wrong_plan(graph, int(engine), knobs_of(knobs))
        if wrong is not None:
            reason = wrong
            continue
        try:
            pygraph.build_plan_at_index(index)
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
            reason = str(error)
            continue
        built.append(BuiltPlan(pygraph, index, pygraph.get_workspace_size_plan_at_index(index), scalars, None))
        if tune == "none" or len(built) == CANDIDATES:
            break
    if not built:
        raise ExecutionError(f"cuDNN built no plan on this GPU for\n{graph}\n{reason}")
    return built[0] if len(built) == 1 else _fastest(graph, built, handle)


def _fastest(graph: CudnnGraph, plans: list[BuiltPlan], handle: Any) -> BuiltPlan:
    import cupy

    stored = [t for t in graph.tensors if not t.virtual and t.value is None]
    # random bits would hold NaN and run no slower; normal numbers exercise what real data does
    memory = {
        t.uid: cupy.random.standard_normal(max(extent(t), 1)).astype(
            cupy.float16 if t.dtype is DType.BF16 else t.dtype.numpy
        )
        for t in stored
    }
    pointers = {uid: array.data.ptr for uid, array in memory.items()}
    timed: list[BuiltPlan] = []
    for plan in plans:
        addresses = plan.addresses(pointers)
        workspace = cupy.empty(plan.workspace_bytes, cupy.uint8) if plan.workspace_bytes else None
        times: list[float] = []
        for _ in range(REPEATS + 1):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            plan.execute(addresses, 0 if workspace is None else workspace.data.ptr, handle)
            stop.record()
            stop.synchronize()
            times.append(1000.0 * cupy.cuda.get_elapsed_time(start, stop))
        # the first run loads the kernel
        timed.append(replace(plan, time_us=statistics.median(times[1:])))
    return min(timed, key=lambda plan: plan.time_us or 0.0)
