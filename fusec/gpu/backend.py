"""The runtime's backend on an NVIDIA GPU: CuPy memory, cuDNN plans, CUDA graphs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import cudnn
import cupy
import numpy as np

from fusec.cudnn_graph import CudnnGraph
from fusec.errors import ExecutionError
from fusec.gpu.device import device_name
from fusec.gpu.plans import BuiltPlan, choose
from fusec.ir import Array

RELAXED = 2  # cudaStreamCaptureModeRelaxed: libraries may allocate while a stream is captured


class CudnnBackend:
    """Executes cuDNN graphs through the frontend on the current device.

    Steps run on a stream of their own, so that they can be captured; each call waits for what its caller's stream
    holds, and the caller's stream for the call. tune: see `gpu.plans.choose`. progress: told the number of plans
    made ready.
    """

    xp: Any = cupy

    def __init__(self, tune: str, progress: Callable[[str, int, int], None] | None = None):
        self.name = device_name() or "GPU"
        self.tune = tune
        self.progress = progress
        self._handle = cudnn.create_handle()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        cudnn.set_stream(handle=self._handle, stream=self._stream.ptr)
        # kernels that allocate do so here: what a CUDA graph holds addresses of must not be given to others
        self._pool = cupy.cuda.MemoryPool()
        self._lock = threading.Lock()
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
        with _out_of_memory(f"timing plans of\n{graph}"), self._stream:
            plan = self._plans[graph.key] = choose(graph, self._handle, self.tune)
            if self._workspace is None or self._workspace.size < plan.workspace_bytes:
                self._workspace = cupy.empty(plan.workspace_bytes, cupy.uint8)
        if self.progress is not None:
            self.progress("plans", len(self._plans), 0)

    def bind(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
        plan, handle, workspace = self._plans[graph.key], self._handle, self._workspace
        scratch = 0 if workspace is None else workspace.data.ptr
        addresses = plan.addresses({uid: array.data.ptr for uid, array in buffers.items()})
        kept = [workspace, *buffers.values()]  # alive as long as what runs over them

        def run() -> None:
            try:
                plan.execute(addresses, scratch, handle)
            except RuntimeError as error:
                raise ExecutionError(f"cuDNN failed to run\n{graph} over {len(kept) - 1} buffers\n{error}") from error

        return run

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """One CUDA graph of all that `run` launches; `run` itself, with a warning, if that cannot be captured."""
        self._stream.synchronize()
        try:
            self._stream.begin_capture(mode=RELAXED)
            try:
                with self.scratch():
                    run()
            finally:
                graph = self._stream.end_capture()
        except (cupy.cuda.runtime.CUDARuntimeError, ExecutionError, RuntimeError) as error:
            warnings.warn(f"the steps run one by one, since they cannot be captured: {error}", stacklevel=2)
            return run
        graph.upload(self._stream)
        return lambda: graph.launch(self._stream)

    @contextmanager
    def calling(self) -> Generator[None]:
        with self._lock, _out_of_memory("running the model"):
            caller = cupy.cuda.get_current_stream()
            self._stream.wait_event(caller.record())
            with self._stream:
                yield
            caller.wait_event(self._stream.record())

    def scratch(self) -> AbstractContextManager[None]:
        return cupy.cuda.using_allocator(self._pool.malloc)

    def run_on_host(self, graph: CudnnGraph, buffers: Mapping[int, np.ndarray[Any, Any]]) -> None:
        """As `simulate.simulate`: read and write flat buffers in host memory, by the plan on the GPU."""
        self.prepare(graph)
        with self.calling():
            device = {uid: cupy.asarray(buffer) for uid, buffer in buffers.items()}
            self.bind(graph, device)()
            self.finish()
            for tensor in graph.outputs:
                buffers[tensor.uid][...] = device[tensor.uid].get()

    def finish(self) -> None:
        try:
            self._stream.synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise ExecutionError(f"the GPU reported an error: {error}") from error


@contextmanager
def _out_of_memory(what: str) -> Generator[None]:
    try:
        yield
    except cupy.cuda.memory.OutOfMemoryError as error:
        cupy.get_default_memory_pool().free_all_blocks()
        free, total = cupy.cuda.runtime.memGetInfo()
        raise ExecutionError(
            f"out of memory while {what}: {error}; {free >> 20} MB of {total >> 20} MB are free"
        ) from error
