"""The runtime's backend on an NVIDIA GPU: CuPy memory, cuDNN plans, CUDA graphs."""

from __future__ import annotations

import statistics
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import cudnn
import cupy
import numpy as np

from fusec.cudnn_graph import CudnnGraph
from fusec.errors import ExecutionError
from fusec.gpu import device, kernels
from fusec.gpu.blas import product_of
from fusec.gpu.cublaslt import Blas, competitor
from fusec.gpu.forms import rewrite
from fusec.gpu.kernels import Kernel
from fusec.gpu.kernels.group import grouped
from fusec.gpu.kernels.launch import Launcher, Memory
from fusec.gpu.lab import GpuLaboratory
from fusec.gpu.tune import Tuned, tune
from fusec.ir import Array
from fusec.memory import plan_memory
from fusec.plan_store import PlanStore
from fusec.plans import Choice, Entry, PlanKey
from fusec.program import Kind, Partition, Program

KERNEL_RUNS = 7
RELAXED = 2  # cudaStreamCaptureModeRelaxed: libraries may allocate while a stream is captured


class CudnnBackend:
    """Executes cuDNN graphs through the frontend on the current device.

    Steps run on a stream of their own, so that they can be captured; each call waits for what its caller's stream
    holds, and the caller's stream for the call. tune, budget_s: see `gpu.tune`. progress: told the number of graphs
    whose plan is chosen. Choices are kept in `store`. suggested: choices by graph key made elsewhere, taken where
    nothing is known and they were measured, or nothing shall be. kernels: see `gpu.lab`.
    """

    xp: Any = cupy

    def __init__(
        self,
        tune: str,
        progress: Callable[[str, int, int], None] | None = None,
        budget_s: float = float("inf"),
        store: PlanStore | None = None,
        suggested: Mapping[str, Choice] | None = None,
        kernels: Any = None,
    ):
        self.name = device.device_name() or "GPU"
        self.tune = tune
        self.progress = progress
        self.budget_s = budget_s
        self._store = store or PlanStore()
        self._suggested = suggested or {}
        self._kernels = kernels
        here = device.detect()
        self._target = here.name if here is not None else ""
        self._driver = str(cupy.cuda.runtime.driverGetVersion())
        self._cudnn = str(cudnn.backend_version())
        self._handle = cudnn.create_handle()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        cudnn.set_stream(handle=self._handle, stream=self._stream.ptr)
        self._blas = Blas.open(self._stream.ptr)
        # kernels that allocate do so here: what a CUDA graph holds addresses of must not be given to others
        self._pool = cupy.cuda.MemoryPool()
        self._lock = threading.Lock()
        self._tuned: dict[str, Tuned] = {}
        self._workspace: Array | None = None
        self._launcher = Launcher()

    def from_any(self, array: Any) -> Array:
        if isinstance(array, cupy.ndarray):
            return array
        device = getattr(array, "__dlpack_device__", None)
        if device is not None and not isinstance(array, np.ndarray) and device()[0] == 2:  # DLPack: kDLCUDA
            return cupy.from_dlpack(array)
        if device is not None and not isinstance(array, (np.ndarray, np.generic)):
            return cupy.asarray(np.from_dlpack(array))
        return cupy.asarray(array)

    def prepare(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int, others: Sequence[Partition] = ()) -> None:
        """Choose and build a plan of each graph, and compile the kernels of other steps; ExecutionError if a graph has
        no plan."""
        found = (kernels.find(step.nodes, step.outputs) for step in others)
        self._launcher.compile(kernel for kernel in found if kernel is not None)
        self._choose(graphs, footprint_bytes)
        for key, graph in graphs.items():
            if not self._tuned[key].plans:
                reasons = "\n".join(self._tuned[key].rejected)
                raise ExecutionError(f"cuDNN built no plan on this GPU for\n{graph}\n{reasons}")
        need = max((self._tuned[key].plans[0][1].workspace_bytes for key in graphs), default=0)
        self._reserve(need)

    def times_us(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> dict[str, float]:
        """How long graphs take; those without a plan are left out. What is known from before is not built."""
        known: dict[str, float] = {}
        for key in graphs:
            entry = self._store.get(self._key(graphs[key])) if self.tune != "none" else None
            if entry is not None and entry.choice.complete and entry.choice.time_us is not None:
                known[key] = entry.choice.time_us
        self._choose({key: graph for key, graph in graphs.items() if key not in known}, footprint_bytes)
        found = {key: self._tuned[key].time_us for key in graphs if key in self._tuned and self._tuned[key].plans}
        return {**known, **found}

    def _choose(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> None:
        """Build and time plans of those graphs that have none yet."""
        missing = {key: graph for key, graph in graphs.items() if key not in self._tuned}
        if not missing:
            return
        keys = (
            {key: self._key(graph) for key, graph in missing.items()} if self.tune != "none" else {}
        )  # which measures nothing
        taken = self._suggested.items()
        known = {key: choice for key, choice in taken if self.tune == "none" or choice.time_us is not None}
        known |= {key: entry.choice for key, at in keys.items() if (entry := self._store.get(at)) is not None}

        def report(done: int, total: int) -> None:
            if self.progress is not None:
                self.progress("plans", done, total)

        with _out_of_memory("choosing plans"), self._stream:
            lab = GpuLaboratory(
                self._handle, self._stream, footprint_bytes, self._wrong, self._note, self._kernels, self._blas
            )
            tuned = tune(missing, lab, self.tune, self.budget_s, known, report)
        for key, result in tuned.items():
            if key in keys and result.plans and known.get(key) != result.plans[0][0]:
                self._store.put(keys[key], Entry(result.plans[0][0]))
        self._tuned.update(tuned)

    def improve(self, program: Program, tensor_cores: bool, launch_us: float, kept: bool = False) -> Program:
        """The program with each step in the form that is fastest on this GPU, or in one that runs, and kernels joined
        with what is beside them. kept: what would round otherwise is not tried."""
        program = program if kept else self.joined(program)
        constants = sum(v.type.nbytes for v in program.graph.values() if v.literal is not None)
        footprint_bytes = plan_memory(program).nbytes + constants

        def time_us(graphs: Mapping[str, CudnnGraph]) -> Mapping[str, float]:
            return self.times_us(graphs, footprint_bytes)

        def kernels_us(asked: Mapping[str, Kernel]) -> Mapping[str, float]:
            return self._kernels_us(asked, footprint_bytes)

        program = rewrite(program, tensor_cores, launch_us, "none" if kept else self.tune, time_us, kernels_us)
        program = program if kept else self.joined(program)
        if self.tune != "none":
            found = (kernels.find(step.nodes, step.outputs) for step in program.steps if step.kind is Kind.KERNEL)
            kernels_us({k.key: k for k in found if k is not None and k.others and not self._launcher.is_measured(k)})
        return program

    def joined(self, program: Program) -> Program:
        """The program with steps joined where one kernel runs them all; nothing is measured for that."""
        return grouped(program)

    def _kernels_us(self, asked: Mapping[str, Kernel], footprint_bytes: int) -> dict[str, float]:
        """How long kernels take, by key, each as it is fastest; infinite for what does not compile."""
        if not asked:
            return {}
        self._launcher.compile(each for kernel in asked.values() for each in (kernel, *kernel.others))
        times: dict[str, float] = {}
        with _out_of_memory("timing kernels"), self._stream:
            lab = GpuLaboratory(self._handle, self._stream, footprint_bytes)

            def time_us(run: Callable[[], None]) -> float:
                lab.run_us(run)
                return statistics.median(lab.run_us(run) for _ in range(KERNEL_RUNS))

            for key, kernel in asked.items():
                times[key] = self._launcher.measure(kernel, time_us)
        return times

    def give_up(self, graph: CudnnGraph, reason: str) -> bool:
        """Turn to the next plan of a graph, whose first one failed; False if there is none."""
        result = self._tuned[graph.key]
        choice, _ = result.plans.pop(0)
        self._note(graph.key, choice, reason)
        if result.plans:
            warnings.warn(f"{choice.name} failed and gave way to the next plan: {reason}", stacklevel=2)
            self._reserve(result.plans[0][1].workspace_bytes)
        return bool(result.plans)

    def choices(self) -> dict[str, Choice]:
        """What was chosen, by `CudnnGraph.key`."""
        return {key: result.plans[0][0] for key, result in self._tuned.items()}

    def _reserve(self, workspace_bytes: int) -> None:
        """Scratch memory for the plan that needs the most."""
        if self._workspace is None or self._workspace.size < workspace_bytes:
            with self._stream:
                self._workspace = cupy.empty(workspace_bytes, cupy.uint8)

    def library(self, graph: CudnnGraph) -> str:
        return self._tuned[graph.key].plans[0][0].library

    def _key(self, graph: CudnnGraph) -> PlanKey:
        competes = self._blas is not None and product_of(graph) is not None
        libraries = f"{self._cudnn} {competitor()}" if competes else self._cudnn
        return PlanKey(graph.key, self._target, self.name, self._driver, libraries, cudnn.__version__, self.tune)

    def _wrong(self, graph: str, choice: Choice) -> str | None:
        """Why a plan is in quarantine; None if it is not."""
        found = self._store.quarantined(graph, self._target, self._cudnn)
        return next((why for engine, knobs, why in found if (engine, knobs) == choice.identity), None)

    def _note(self, graph: str, choice: Choice, reason: str) -> None:
        self._store.quarantine(graph, self._target, self._cudnn, choice.engine, choice.knobs, reason)

    def bind(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
        (_, plan), handle, workspace = self._tuned[graph.key].plans[0], self._handle, self._workspace
        scratch = 0 if workspace is None else workspace.data.ptr
        addresses = plan.addresses({uid: array.data.ptr for uid, array in buffers.items()})
        kept = [workspace, *buffers.values()]  # alive as long as what runs over them

        def run() -> None:
            try:
                plan.execute(addresses, scratch, handle)
            except RuntimeError as error:
                raise ExecutionError(f"cuDNN failed to run\n{graph} over {len(kept) - 1} buffers\n{error}") from error

        return run

    def kernel(self, step: Partition, memory: Memory) -> Callable[[], None] | None:
        kernel = kernels.find(step.nodes, step.outputs)
        return self._launcher.bind(kernel, memory) if kernel is not None and self._launcher.runs(kernel) else None

    def record(self, runs: Sequence[Callable[[], None]]) -> Callable[[], None]:
        """CUDA graphs of what can be captured, one if all can be; what cannot runs by itself between them."""
        parts: list[Callable[[], None]] = []
        start = 0
        while start < len(runs):
            graph, end = self._captured(runs, start)
            if graph is not None:
                graph.upload(self._stream)
                parts.append(partial(graph.launch, self._stream))
            if end < len(runs):
                parts.append(runs[end])
            start = end + 1

        def replay() -> None:
            for part in parts:
                part()

        return replay

    def _captured(self, runs: Sequence[Callable[[], None]], start: int) -> tuple[Any, int]:
        """One CUDA graph from a run on, and the next one that is not in it: the first that cannot be captured."""
        end = len(runs)
        while start < end:
            self._stream.synchronize()
            failed = end
            try:
                self._stream.begin_capture(mode=RELAXED)
                try:
                    with self.scratch():
                        for index in range(start, end):
                            failed = index
                            runs[index]()
                        failed = end
                finally:
                    graph = self._stream.end_capture()
                return graph, end
            except (cupy.cuda.runtime.CUDARuntimeError, ExecutionError, RuntimeError):
                # most often CuPy's own word on cuBLAS, or on what waits for the device
                end = failed if failed < end else start + (end - start) // 2
        return None, end

    def time_us(self, run: Callable[[], None], count: int) -> list[float]:
        """By events on the device. What is timed is queued behind some work, so that no launch is waited for."""
        times: list[float] = []
        ballast = cupy.empty(1 << 26, cupy.uint8)
        for _ in range(count):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            ballast.fill(0)
            start.record(self._stream)
            run()
            stop.record(self._stream)
            stop.synchronize()
            times.append(1000.0 * float(cupy.cuda.get_elapsed_time(start, stop)))
        return times

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
        self.prepare({graph.key: graph}, 0)
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
