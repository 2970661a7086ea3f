"""Run cuDNN graphs on the GPU over buffers in host memory, to compare them with the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import cupy
import numpy as np

from fusec.errors import ExecutionError
from fusec.gpu.autotune.plans.plan_bench import AnyPlan
from fusec.gpu.autotune.plans.plan_selection import PlanSelector
from fusec.gpu.launch.stream_calls import Streams
from fusec.ir import Array
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import Choice

HostBuffers = Mapping[int, np.ndarray[Any, Any]]  # flat, by uid


def run_over(
    buffers: HostBuffers, graph: CudnnGraph, streams: Streams, execute: Callable[[Mapping[int, Array]], None]
) -> None:
    """Copy buffers to the device, execute a graph over them there, and copy its outputs back.

    They are copied as bytes, because CuPy knows no floats of 8 bits.
    """
    with streams.own_call():
        device = {uid: cupy.asarray(buffer.view(np.uint8)) for uid, buffer in buffers.items()}
        execute(device)
        streams.finish()
        for tensor in graph.outputs:
            buffers[tensor.uid].view(np.uint8)[...] = device[tensor.uid].get()


def plan_runners(
    plans: PlanSelector, graph: CudnnGraph, streams: Streams, per_engine: int
) -> Iterator[tuple[Choice, Callable[[HostBuffers], None]]]:
    """Yield the first plans of each engine, with functions that run them over buffers in host memory."""
    for choice, plan in plans.of_each_engine(graph, per_engine):

        def execute(device: Mapping[int, Array], plan: AnyPlan = plan) -> None:
            scratch = cupy.empty(max(plan.workspace_bytes, 1), cupy.uint8)
            addresses = plan.addresses({uid: array.data.ptr for uid, array in device.items()})
            try:
                plan.execute(addresses, scratch.data.ptr, plans.context.handle)
            except RuntimeError as error:
                raise ExecutionError(f"cuDNN failed to run\n{graph}\n{error}") from error
            streams.finish()  # here, because `scratch` is free after it

        yield choice, partial(run_over, graph=graph, streams=streams, execute=execute)
