"""Run cuDNN graphs and kernels on the GPU over buffers in host memory, to compare what they compute."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import cupy
import numpy as np

from fusec.errors import ExecutionError
from fusec.gpu.autotune.plans.plan_bench import AnyPlan
from fusec.gpu.autotune.plans.plan_selection import PlanSelector
from fusec.gpu.kernels.codegen.kernel import Kernel
from fusec.gpu.launch.kernel_launcher import Launcher
from fusec.gpu.launch.stream_calls import Streams
from fusec.ir import Array, TensorType, Value
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import Choice

HostBuffers = Mapping[int, np.ndarray[Any, Any]]  # flat, by uid
KernelBuffers = Mapping[tuple[Value, TensorType], np.ndarray[Any, Any]]  # flat


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


class HostLauncher:
    """Launcher that copies buffers to the GPU, launches a kernel once, and copies all of them back."""

    xp: Any = cupy

    def __init__(self) -> None:
        self._launcher = Launcher()

    def runs(self, kernel: Kernel) -> bool:
        """Return False if this GPU has no room for the kernel or lacks its instructions.

        A source that NVRTC refuses raises the warning of `Launcher.compile`, because that is an error of fusec.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="NVRTC refuses")
            return self._launcher.runs(kernel)

    def run(self, kernel: Kernel, buffers: KernelBuffers) -> None:
        """Launch the kernel over flat buffers, and copy GPU memory into them afterwards."""
        try:
            held = {key: cupy.asarray(buffer.view(np.uint8)) for key, buffer in buffers.items()}
            self._launcher.bind(kernel, lambda *key: held[key])()
            for key, buffer in buffers.items():
                buffer.view(np.uint8)[...] = held[key].get()
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
            raise ExecutionError(f"the kernel for {kernel.name} failed on the GPU: {error}") from error
