"""The runtime's backend on an NVIDIA GPU: CuPy memory, cuDNN plans, one stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import cudnn
import cupy
import numpy as np

from fusec.cudnn_graph import CudnnGraph
from fusec.errors import ExecutionError
from fusec.gpu.device import device_name
from fusec.gpu.plans import BuiltPlan, choose
from fusec.ir import Array


class CudnnBackend:
    """Executes cuDNN graphs through the frontend on the current device's current stream.

    tune: see `gpu.plans.choose`. progress: told the number of plans made ready.
    """

    xp: Any = cupy

    def __init__(self, tune: str, progress: Callable[[str, int, int], None] | None = None):
        self.name = device_name() or "GPU"
        self.tune = tune
        self.progress = progress
        self._handle = cudnn.create_handle()
        self._plans: dict[str, BuiltPlan] = {}
        self._workspace: Array | None = None

    def from_any(self, array: Any) -> Array:
        if isinstance(array, cupy.ndarray):
            return array
        device = getattr(array, "__dlpack_device__", None)
        if device is not None and not isinstance(array, np.ndarray) and device()[0] == 2:  # DLPack: kDLCUDA
            return cupy.from_dlpack(array)
        if device is not None and not isinstance(array, (np.ndarray, np.generic)):
            return cupy.asarray(np.from_dlpack(array))
        return cupy.asarray(array)

    def prepare(self, graph: CudnnGraph) -> None:
        if graph.key in self._plans:
            return
        plan = self._plans[graph.key] = choose(graph, self._handle, self.tune)
        if self._workspace is None or self._workspace.size < plan.workspace_bytes:
            self._workspace = cupy.empty(plan.workspace_bytes, cupy.uint8)
        if self.progress is not None:
            self.progress("plans", len(self._plans), 0)

    def execute(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> None:
        addresses = {uid: array.data.ptr for uid, array in buffers.items()}
        cudnn.set_stream(handle=self._handle, stream=cupy.cuda.get_current_stream().ptr)
        try:
            self._plans[graph.key].execute(addresses, self._workspace, self._handle)
        except RuntimeError as error:
            raise ExecutionError(f"cuDNN failed to run\n{graph}\n{error}") from error

    def run_on_host(self, graph: CudnnGraph, buffers: Mapping[int, np.ndarray[Any, Any]]) -> None:
        """As `simulate.simulate`: read and write flat buffers in host memory, by the plan on the GPU."""
        self.prepare(graph)
        device = {uid: cupy.asarray(buffer) for uid, buffer in buffers.items()}
        self.execute(graph, device)
        self.finish()
        for tensor in graph.outputs:
            buffers[tensor.uid][...] = device[tensor.uid].get()

    def finish(self) -> None:
        try:
            cupy.cuda.get_current_stream().synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise ExecutionError(f"the GPU reported an error: {error}") from error
