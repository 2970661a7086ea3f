"""The runtime's backend on an NVIDIA GPU: CuPy memory, cuDNN plans, CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import cudnn
import cupy
import numpy as np

from fusec.errors import ExecutionError
from fusec.gpu import device, kernels
from fusec.gpu.autotune.coordinate_descent import SECONDS, DescentResult, descend
from fusec.gpu.autotune.plan_bench import AnyPlan
from fusec.gpu.autotune.plan_selection import PlanSelector
from fusec.gpu.autotune.step_candidates import TunedChoices
from fusec.gpu.autotune.step_selection import StepSelector
from fusec.gpu.autotune.tuning_cache import Suggested, TuningCache, TuningEnvironment
from fusec.gpu.autotune.whole_model import WholeModelTrial
from fusec.gpu.cublaslt.algorithms import Blas, competitor
from fusec.gpu.cublaslt.lone_matmul import lone_product
from fusec.gpu.cudnn.build_pool import BuildPool
from fusec.gpu.launch.cuda_graph import Launch, in_order, or_side_by_side
from fusec.gpu.launch.kernel_launcher import Launcher, Memory
from fusec.gpu.launch.stream_calls import Ahead, AtOnce, Replay, Streams, feeder, fetcher
from fusec.gpu.measure.random_inputs import random_array
from fusec.gpu.measure.timer import Stopwatch
from fusec.ir import Array, TensorType
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import BLAS, Choice, Entry
from fusec.schedule.dependencies import Waits
from fusec.schedule.program import Partition, Program
from fusec.system.compile_timer import spent_on

HostBuffers = Mapping[int, np.ndarray[Any, Any]]  # flat, by uid


class CudnnBackend:
    """Executes cuDNN graphs through the frontend on the current device.

    Steps run on a stream of their own, so that they can be captured; such a call waits for what its caller's stream
    holds, and the caller's stream for the call. What is captured whole is queued on the caller's stream itself. tune,
    budget_s: see `plan_search`. progress: told the number of graphs whose plan is chosen. Plans and forms are kept in
    `store`. suggested, accept_incomplete: see `tuning_cache`; where plans made elsewhere were never measured, they
    alone compete. variants: for the key of a kernel, that of the one to take of those that do the same.
    kernel_cache: see `plan_bench`.
    `tuned`: what `improve` found. `descent`: what `tune_whole_model` did. side_by_side: steps that can are run so, and
    that is not measured; else it is, if anything is. builders: see `plan_bench`.
    """

    xp: Any = cupy

    def __init__(
        self,
        tune: str,
        progress: Callable[[str, int, int], None] | None = None,
        budget_s: float = float("inf"),
        store: PlanStore | None = None,
        suggested: Suggested | None = None,
        accept_incomplete: bool = False,
        variants: Mapping[str, str] | None = None,
        kernel_cache: Any = None,
        deterministic: bool = False,
        side_by_side: bool = False,
        builders: BuildPool | None = None,
    ):
        self.deterministic = deterministic
        self.name = device.device_name() or "GPU"
        self.tune = tune
        self._known_beside = side_by_side
        self.side_by_side = side_by_side or tune != "none"
        self.budget_s = budget_s
        self.descent: DescentResult | None = None
        here = device.detect()
        target = here.name if here is not None else ""
        driver, version = str(cupy.cuda.runtime.driverGetVersion()), str(cudnn.backend_version())
        frontend = [cudnn.__version__, competitor(), *(["deterministic"] if deterministic else [])]
        frontend += [] if kernel_cache is None else ["kernels for all sizes"]
        place = TuningEnvironment(target, self.name, driver, version, " ".join(word for word in frontend if word))
        kept = TuningCache(store or PlanStore(), place, tune, suggested, accept_incomplete)
        self._handle = cudnn.create_handle()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._streams = Streams(self._stream)
        self._stopwatch = Stopwatch(self._stream)
        cudnn.set_stream(handle=self._handle, stream=self._stream.ptr)
        named = any(entry.choice.engine == BLAS for entries in (suggested or {}).values() for entry in entries)
        self._blas = Blas.open(lambda: int(cupy.cuda.get_current_stream().ptr))
        # kernels that allocate do so here: what a CUDA graph holds addresses of must not be given to others
        self._pool = cupy.cuda.MemoryPool()
        self._workspace: Array | None = None
        self._lane_workspace: Array | None = None
        self._products: set[Partition] = set()  # that cuDNN declines and cuBLASLt runs
        self._right: dict[str, list[Choice]] = {}  # how, by graph
        self._launcher = Launcher()
        self._builders = builders
        shared = (self._blas, named, kernel_cache, deterministic, builders)
        self.plans = PlanSelector(self._handle, self._stream, self._stopwatch, kept, tune, budget_s, progress, *shared)
        timed = (self._stream, self._stopwatch, tune, variants or {}, builders)
        self.steps = StepSelector(self.plans, self._launcher, *timed)

    @property
    def tuned(self) -> TunedChoices | None:
        """The form of each step, and which of the kernels that do the same; None before `improve`."""
        return self.steps.tuned

    def tune_steps(
        self, program: Program, tensor_cores: bool, launch_us: float, kept: bool = False, prefer_kernels: bool = False
    ) -> Program:
        """See `Forms.improve`."""

        def bind(graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
            self._reserve(self.plans.workspace_bytes([graph.key]))
            return self.bind(graph, buffers)

        return self.steps.tune_steps(program, tensor_cores, launch_us, bind, kept, prefer_kernels)

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
        found = self.steps.found(others)
        with ThreadPoolExecutor(1, thread_name_prefix="fusec-kernels") as beside:  # NVRTC lets go of Python's lock
            kernels_ready = beside.submit(self._launcher.compile, found)
            self._ready(graphs, footprint_bytes)
            kernels_ready.result()
        self.plans.keep(graphs.values(), footprint_bytes)

    def _ready(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> None:
        self.plans.require(graphs, footprint_bytes)
        if self._builders is not None:
            self._builders.close()
        self._reserve(self.plans.workspace_bytes(graphs))

    @spent_on("the whole is timed")
    def tune_whole_model(
        self,
        inputs: Sequence[tuple[Array, TensorType]],
        works: Sequence[CudnnGraph | Partition],
        runs: Sequence[Callable[[], None]],
        bound: Callable[[int], Callable[[], None]],
    ) -> list[int]:
        """Of plans and kernels that are about as fast by themselves, take those that are fastest within the whole model
        (`coordinate_descent`): the steps to bind anew, by number. runs: the steps, over memory whose inputs are filled
        here; works: what they run. bound: binds a step to its memory anew."""
        seconds = min(SECONDS.get(self.tune, 0.0), self.budget_s)
        if seconds <= 0.0:
            return []
        found = [work if isinstance(work, CudnnGraph) else kernels.find(work.nodes, work.outputs) for work in works]
        tuned = self.plans.ranked
        how = (tuned, self._launcher, self._streams, self.scratch, self.time_us)
        whole = WholeModelTrial(found, runs, bound, *how)
        tried = whole.contests()
        plans = [plan for contest in tried if contest.key in tuned for _, plan in tuned[contest.key].plans]
        self._reserve(max((plan.workspace_bytes for plan in plans), default=0))
        end = time.monotonic() + seconds
        try:
            if not tried:
                return []
            for array, type in inputs:
                array[...] = random_array(type)[: array.size]
            with self.scratch():
                for run in runs:  # step by step, as a first call
                    run()
            self.finish()
            self.descent = descend(tried, whole, lambda: time.monotonic() < end)
        except ExecutionError:  # the first call will find the step, and another plan for it
            return []
        if self.descent is None:
            return []
        changed: list[str] = []
        for key, option in self.descent.options.items():
            way = whole.way(key, option)
            if self.plans.prefer(key, option) if way is None else self.steps.prefer_variant(*way):
                changed.append(key)
        self.plans.keep([tuned[key].graph for key in changed if key in tuned], self.plans.footprint_bytes)
        return [number for key in changed for number in whole.places[key]]

    def library(self, work: CudnnGraph | Partition) -> str:
        if isinstance(work, CudnnGraph):
            return self.plans.ranked[work.key].plans[0][0].library
        return "cublaslt" if work in self._products else work.kind.value

    def give_up(self, graph: CudnnGraph, reason: str) -> bool:
        """Turn to the next plan of a graph, whose first one failed; False if there is none."""
        there = self.plans.give_up(graph, reason)
        if there:
            self._reserve(self.plans.workspace_bytes([graph.key]))
        return there

    def choices(self) -> dict[str, Choice]:
        """What was chosen, by `CudnnGraph.key`."""
        return self.plans.choices()

    def entries(self, graphs: Iterable[str]) -> dict[str, Entry]:
        """The plans of graphs, by `CudnnGraph.key`, serialized where they can be."""
        return self.plans.entries(graphs)

    def _reserve(self, workspace_bytes: int) -> None:
        """Scratch memory for the plan that needs the most."""
        if self._workspace is None or self._workspace.size < workspace_bytes:
            with self._stream:
                self._workspace = cupy.empty(workspace_bytes, cupy.uint8)

    def bind(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
        plan, handle, workspace = self.plans.plan(graph.key), self._handle, self._workspace
        scratch = 0 if workspace is None else workspace.data.ptr
        addresses = plan.addresses({uid: array.data.ptr for uid, array in buffers.items()})
        kept = [workspace, *buffers.values()]  # alive as long as what runs over them

        def run() -> None:
            lane = self._lane_workspace
            try:
                plan.execute(addresses, scratch if lane is None else lane.data.ptr, handle)
            except RuntimeError as error:
                raise ExecutionError(f"cuDNN failed to run\n{graph} over {len(kept) - 1} buffers\n{error}") from error

        return Launch(run, plan.workspace_bytes)

    def kernel(self, step: Partition, memory: Memory) -> Callable[[], None] | None:
        kernel = kernels.find(step.nodes, step.outputs)
        if kernel is None or not self._launcher.runs(kernel):
            return self._product(step, memory)
        shares = self._launcher.fastest(kernel).scratch_bytes > 0
        return Launch(self._launcher.bind(kernel, memory), shares_scratch=shares, is_kernel=True)

    def _product(self, step: Partition, memory: Memory) -> Callable[[], None] | None:
        """A product that cuDNN declines, by cuBLASLt."""
        with self._stream:
            product = None if self._blas is None else lone_product(self._blas, step, self._right)
        if product is None:
            return None
        self._products.add(step)
        self._reserve(product.plan.workspace_bytes)
        run = product.bound(memory, self._workspace, lambda: self._lane_workspace)
        return Launch(run, product.plan.workspace_bytes)

    def feeder(self, buffer: Array, type: TensorType) -> Callable[[Array], None]:
        return feeder(self._streams, buffer, type)

    def fetcher(self, buffer: Array, type: TensorType) -> Callable[[Array | None, bool], Array]:
        return fetcher(self._streams, buffer, type)

    def record(
        self,
        runs: Sequence[Callable[[], None]],
        waits: Waits | None = None,
        ahead: tuple[int, Mapping[int, Array]] | None = None,
    ) -> Replay:
        """CUDA graphs of what can be captured. With `waits`, also side by side on several streams; the faster stays. A
        kernel that runs ahead is launched by itself in front of them."""
        first = runs[ahead[0]] if ahead is not None else None
        if ahead is None or waits is None or not isinstance(first, Launch) or not first.is_kernel:
            return self._recorded(runs, waits)
        at = ahead[0]
        rest = [_nothing if i == at else run for i, run in enumerate(runs)]
        told = tuple(None if w is None or i == at else tuple(b for b in w if b != at) for i, w in enumerate(waits))
        replay = self._recorded(rest, told)
        replay.ahead = Ahead(first.run, ahead[1])
        return replay

    def _recorded(self, runs: Sequence[Callable[[], None]], waits: Waits | None) -> Replay:
        ordered = in_order(self._streams, runs, self.scratch)
        if waits is None or not self.side_by_side:
            return ordered
        return or_side_by_side(
            ordered, self._streams, runs, waits, self._on_lane, None if self._known_beside else self.time_us
        )

    @contextmanager
    def _on_lane(self, stream: Any, workspace: Array | None) -> Generator[None]:
        """Plans run on a stream, with scratch memory of that."""
        cudnn.set_stream(handle=self._handle, stream=stream.ptr)
        self._lane_workspace = workspace
        try:
            with stream:
                yield
        finally:
            self._lane_workspace = None
            cudnn.set_stream(handle=self._handle, stream=self._stream.ptr)

    def time_us(self, run: Callable[[], None], count: int, alone: bool = False) -> list[float]:
        """By events on the device; of what leaves in the cache what it reads, if that has room for it."""
        footprint_bytes = self.plans.footprint_bytes
        return [self._stopwatch.within_us(run, footprint_bytes, whole=not alone) for _ in range(count)]

    def calling(self, at_once: bool = False) -> AbstractContextManager[None]:
        return AtOnce(self._streams) if at_once else self._streams.own_call()

    def scratch(self) -> AbstractContextManager[None]:
        return cupy.cuda.using_allocator(self._pool.malloc)

    def run_on_host(self, graph: CudnnGraph, buffers: HostBuffers) -> None:
        """As `simulate.simulate`: read and write flat buffers in host memory, by the plan on the GPU."""
        self._ready({graph.key: graph}, 0)
        self._on_host(graph, buffers, lambda device: self.bind(graph, device)())

    def plan_runners(
        self, graph: CudnnGraph, per_engine: int
    ) -> Iterator[tuple[Choice, Callable[[HostBuffers], None]]]:
        """Build the first plans of each engine, and yield what runs each over flat buffers in host memory."""
        for choice, plan in self.plans.of_each_engine(graph, per_engine):

            def execute(device: Mapping[int, Array], plan: AnyPlan = plan) -> None:
                scratch = cupy.empty(max(plan.workspace_bytes, 1), cupy.uint8)
                addresses = plan.addresses({uid: array.data.ptr for uid, array in device.items()})
                try:
                    plan.execute(addresses, scratch.data.ptr, self._handle)
                except RuntimeError as error:
                    raise ExecutionError(f"cuDNN failed to run\n{graph}\n{error}") from error
                self.finish()

            yield choice, partial(self._on_host, graph, execute=execute)

    def _on_host(self, graph: CudnnGraph, buffers: HostBuffers, execute: Callable[[Mapping[int, Array]], None]) -> None:
        with self.calling():
            device = {uid: cupy.asarray(buffer) for uid, buffer in buffers.items()}
            execute(device)
            self.finish()
            for tensor in graph.outputs:
                buffers[tensor.uid][...] = device[tensor.uid].get()

    def finish(self) -> None:
        try:
            self._streams.synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise ExecutionError(f"the GPU reported an error: {error}") from error


def _nothing() -> None:
    """What is done elsewhere."""
