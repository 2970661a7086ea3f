"""Run programs on an NVIDIA GPU: CuPy memory, cuDNN plans, CUDA graphs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import cudnn
import cupy
import numpy as np

from fusec.errors import ExecutionError
from fusec.gpu import device, kernels
from fusec.gpu.autotune.candidate_times import StepTuning
from fusec.gpu.autotune.coordinate_descent import SECONDS, DescentResult, descend
from fusec.gpu.autotune.plan_bench import AnyPlan, CudnnContext
from fusec.gpu.autotune.plan_search import TuningOptions
from fusec.gpu.autotune.plan_selection import PlanSelector
from fusec.gpu.autotune.step_choices import TunedChoices
from fusec.gpu.autotune.step_selection import StepSelector
from fusec.gpu.autotune.tuning_cache import KnownChoices, TuningCache, TuningEnvironment
from fusec.gpu.autotune.whole_model import WholeModelTrial
from fusec.gpu.cublaslt.algorithms import Blas, competitor
from fusec.gpu.cublaslt.lone_matmul import lone_product
from fusec.gpu.cudnn.build_pool import BuildPool
from fusec.gpu.launch.cuda_graph import StepLaunch, in_order, or_side_by_side
from fusec.gpu.launch.kernel_launcher import Launcher, Memory
from fusec.gpu.launch.stream_calls import Ahead, CallOnCallersStream, Replay, Streams, feeder, fetcher
from fusec.gpu.measure.random_inputs import random_array
from fusec.gpu.measure.timer import Stopwatch
from fusec.ir import Array, TensorType
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.dlpack import from_dlpack
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import Choice, Entry
from fusec.schedule.dependencies import Waits
from fusec.schedule.program import Partition, Program
from fusec.system.compile_timer import spent_on
from fusec.targets.target import DEFAULT, load

WHOLE_RUNS = 9  # timings of a whole model, of which the median counts
HostBuffers = Mapping[int, np.ndarray[Any, Any]]  # flat, by uid


class DeviceArrays:
    """Arrays on the device, also for what runs no program. name: that of the device; xp: their module."""

    @property
    def name(self) -> str:
        return device.device_name() or "cuda"

    @property
    def xp(self) -> Any:
        return cupy

    def from_any(self, array: Any) -> Array:
        """Return a CuPy array from a NumPy or CuPy array, or any object with DLPack."""
        if isinstance(array, cupy.ndarray):
            return array
        device = getattr(array, "__dlpack_device__", None)
        if device is not None and not isinstance(array, np.ndarray) and device()[0] == 2:  # DLPack: kDLCUDA
            return from_dlpack(cupy, array)
        if device is not None and not isinstance(array, (np.ndarray, np.generic)):
            return cupy.asarray(from_dlpack(np, array))
        return cupy.asarray(array)


class CudnnBackend:
    """Backend that runs cuDNN graphs and kernels on the current CUDA device.

    tuning: the tuning level with its budget, or a level alone
    known: choices of a lock file, a compiled file or another input shape
    store: where choices are stored; default: the cache folder
    kernel_cache, plan_filter, build_pool: see `plan_bench.CudnnContext`

    Steps run on a stream of the backend, so that they can be captured. A call waits for work on its caller's stream,
    and that stream waits for the call. A program captured as one CUDA graph runs on the caller's stream.

    descent: the result of `tune_whole_model`; None before, or if the model cannot be captured
    """

    xp: Any = cupy
    loads_ahead = True

    def __init__(
        self,
        tuning: TuningOptions | str,
        known: KnownChoices | None = None,
        store: PlanStore | None = None,
        kernel_cache: Any = None,
        plan_filter: PlanFilter | None = None,
        build_pool: BuildPool | None = None,
    ):
        tuning = TuningOptions(tuning) if isinstance(tuning, str) else tuning
        known = known or KnownChoices()
        self.plan_filter = plan_filter = plan_filter or PlanFilter()
        self.name = device.device_name() or "GPU"
        self.tune = tuning.level
        self._known_side_by_side = known.side_by_side
        self.side_by_side = known.side_by_side or tuning.level != "none"
        self.descent: DescentResult | None = None
        self.whole_us: float | None = None  # by `time_whole_model`
        environment = _environment(self.name, plan_filter, kernel_cache is not None)
        cache = TuningCache(store or PlanStore(), environment, tuning.level, known)
        self._handle = cudnn.create_handle()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._streams = Streams(self._stream)
        self._stopwatch = Stopwatch(self._stream)
        cudnn.set_stream(handle=self._handle, stream=self._stream.ptr)
        self._blas = Blas.open(lambda: int(cupy.cuda.get_current_stream().ptr))
        # Kernels that allocate use a pool of their own, because captured CUDA graphs hold addresses of its memory.
        self._pool = cupy.cuda.MemoryPool()
        self._workspace: Array | None = None
        self._lane_workspace: Array | None = None
        self._products: set[Partition] = set()  # steps that cuDNN refuses and cuBLASLt runs
        self._right_choices: dict[str, list[Choice]] = {}  # cuBLASLt's algorithms with right results, by graph
        self._launcher = Launcher()
        # FUSEC_DEVICE=none hides the GPU from `detect`, but not from CuPy
        self._figures = kernels.GpuFigures.of(device.detect() or load(DEFAULT))
        self._build_pool = build_pool
        context = CudnnContext(self._handle, self._stream, self._stopwatch, kernel_cache, plan_filter, build_pool)
        self.plans = PlanSelector(context, cache, tuning, self._blas)
        self.steps = StepSelector(self.plans, self._launcher, known.variants)
        self._budget_s = tuning.budget_s

    @property
    def tuned(self) -> TunedChoices | None:
        """Return the choices made for steps and kernels; None before `tune_steps`."""
        return self.steps.tuned

    def tune_steps(
        self,
        program: Program,
        tensor_cores: bool,
        launch_us: float,
        as_source: bool = False,
        prefer_kernels: bool = False,
    ) -> Program:
        """Replace each step by its fastest candidate: see `StepSelector.tune_steps`."""

        def bind(graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
            self._reserve(self.plans.workspace_bytes([graph.key]))
            return self.bind(graph, buffers)

        tuning = StepTuning(tensor_cores, launch_us, self.tune, self._figures)
        return self.steps.tune_steps(program, tuning, bind, as_source, prefer_kernels)

    def from_any(self, array: Any) -> Array:
        return DeviceArrays().from_any(array)

    def prepare(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int, others: Sequence[Partition] = ()) -> None:
        """Choose and build a plan of each graph, and compile the kernels of other steps.

        Raises ExecutionError when a graph has no plan.
        """
        wanted = self.steps.variants.kernels_of(others, self._figures)
        with ThreadPoolExecutor(1, thread_name_prefix="fusec-kernels") as pool:  # NVRTC releases Python's lock
            kernels_ready = pool.submit(self._launcher.compile, wanted)
            self._ready(graphs, footprint_bytes)
            kernels_ready.result()
        self.plans.store(graphs.values(), footprint_bytes)

    def _ready(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> None:
        self.plans.require(graphs, footprint_bytes)
        if self._build_pool is not None:
            self._build_pool.close()
        self._reserve(self.plans.workspace_bytes(graphs))

    @spent_on("the whole is timed")
    def tune_whole_model(
        self,
        inputs: Sequence[tuple[Array, TensorType]],
        code: Sequence[CudnnGraph | Partition],
        runs: Sequence[Callable[[], None]],
        bind_step: Callable[[int], Callable[[], None]],
    ) -> list[int]:
        """Choose plans and kernels that are about as fast alone by their times within the model.

        inputs: the memory of the model's inputs, which is filled here
        code: the graph or step that each of `runs` executes
        runs: the steps, bound to memory
        bind_step: binds a step again, by number

        Returns the numbers of the steps to bind again. See `coordinate_descent`.
        """
        seconds = min(SECONDS.get(self.tune, 0.0), self._budget_s)
        if seconds <= 0.0:
            return []
        found = [each if isinstance(each, CudnnGraph) else self._kernel_of(each) for each in code]
        using = (self.plans, self.steps, self._launcher, self._streams, self.scratch, self.time_us)
        trial = WholeModelTrial(found, runs, bind_step, *using)
        contests = trial.contests()
        if not contests:
            return []
        self._reserve(trial.workspace_bytes(contests))
        end = time.monotonic() + seconds
        try:
            self._run_once(inputs, runs)
            self.descent = descend(contests, trial, lambda: time.monotonic() < end)
        except ExecutionError:  # the first call names the failing step, and uses another plan
            return []
        return [] if self.descent is None else trial.adopt(self.descent.options)

    def time_whole_model(
        self,
        inputs: Sequence[tuple[Array, TensorType]],
        code: Sequence[CudnnGraph | Partition],
        runs: Sequence[Callable[[], None]],
        bind_step: Callable[[int], Callable[[], None]],
    ) -> list[int]:
        """Set `whole_us` to the time of all steps as one CUDA graph. Takes what `tune_whole_model` takes."""
        try:
            self._run_once(inputs, runs)
            replay = in_order(self._streams, runs, self.scratch)
            self.whole_us = statistics.median(self.time_us(replay, WHOLE_RUNS))
        except ExecutionError:  # the first call names the failing step
            self.whole_us = None
        return []

    def _run_once(self, inputs: Sequence[tuple[Array, TensorType]], runs: Sequence[Callable[[], None]]) -> None:
        """Run all steps one by one, as in a first call, over random inputs."""
        for array, type in inputs:
            array[...] = random_array(type)[: array.size]
        with self.scratch():
            for run in runs:
                run()
        self.finish()

    def library(self, work: CudnnGraph | Partition) -> str:
        if isinstance(work, CudnnGraph):
            return self.plans.ranked[work.key].plans[0][0].library
        return "cublaslt" if work in self._products else work.kind.value

    def give_up(self, graph: CudnnGraph, reason: str) -> bool:
        """Drop the first plan of a graph, which failed, and use the next; False if there is none."""
        has_next = self.plans.give_up(graph, reason)
        if has_next:
            self._reserve(self.plans.workspace_bytes([graph.key]))
        return has_next

    def choices(self) -> dict[str, Choice]:
        """Return the plan chosen for each graph, by `CudnnGraph.key`."""
        return self.plans.choices()

    def entries(self, graphs: Iterable[str]) -> dict[str, Entry]:
        """Return the plans of graphs, by `CudnnGraph.key`, serialized where cuDNN can."""
        return self.plans.entries(graphs)

    def _reserve(self, workspace_bytes: int) -> None:
        """Allocate a workspace at least as large as this."""
        if self._workspace is None or self._workspace.size < workspace_bytes:
            with self._stream:
                self._workspace = cupy.empty(workspace_bytes, cupy.uint8)

    def bind(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
        plan, handle, workspace = self.plans.plan(graph.key), self._handle, self._workspace
        scratch = 0 if workspace is None else workspace.data.ptr
        addresses = plan.addresses({uid: array.data.ptr for uid, array in buffers.items()})
        held = [workspace, *buffers.values()]  # `run` holds them, because it has only their addresses

        def run() -> None:
            lane = self._lane_workspace
            try:
                plan.execute(addresses, scratch if lane is None else lane.data.ptr, handle)
            except RuntimeError as error:
                raise ExecutionError(f"cuDNN failed to run\n{graph} over {len(held) - 1} buffers\n{error}") from error

        return StepLaunch(run, plan.workspace_bytes)

    def kernel(self, step: Partition, memory: Memory) -> Callable[[], None] | None:
        kernel = self._kernel_of(step)
        if kernel is None or not self._launcher.runs(kernel):
            return self._product(step, memory)
        shares_scratch = self._launcher.fastest(kernel).scratch_bytes > 0
        return StepLaunch(self._launcher.bind(kernel, memory), shares_scratch=shares_scratch, is_kernel=True)

    def _kernel_of(self, step: Partition) -> kernels.Kernel | None:
        return kernels.find(step.nodes, step.outputs, self._figures)

    def _product(self, step: Partition, memory: Memory) -> Callable[[], None] | None:
        """Bind a product that cuDNN refuses, to run by cuBLASLt; None if that has no algorithm with right results."""
        with self._stream:
            known, limit = self._right_choices, self.plan_filter.workspace_limit
            product = None if self._blas is None else lone_product(self._blas, step, known, limit)
        if product is None:
            return None
        self._products.add(step)
        self._reserve(product.plan.workspace_bytes)
        run = product.bound(memory, self._workspace, lambda: self._lane_workspace)
        return StepLaunch(run, product.plan.workspace_bytes)

    def feeder(self, buffer: Array, type: TensorType) -> Callable[[Array], None]:
        return feeder(self._streams, buffer, type)

    def fetcher(self, buffer: Array, type: TensorType) -> Callable[[Array | None, bool], Array]:
        return fetcher(self._streams, buffer, type)

    def capture(
        self,
        runs: Sequence[Callable[[], None]],
        waits: Waits | None = None,
        ahead: tuple[int, Mapping[int, Array]] | None = None,
    ) -> Replay:
        """Capture steps as CUDA graphs, as far as they can be captured.

        waits: the steps that each step waits for; with it the program is also captured on several streams, and the
            faster of the two is used
        ahead: a kernel that is launched before the graphs, and the inputs that it alone reads
        """
        first = runs[ahead[0]] if ahead is not None else None
        if ahead is None or waits is None or not isinstance(first, StepLaunch) or not first.is_kernel:
            return self._captured(runs, waits)
        at = ahead[0]
        rest = [_do_nothing if i == at else run for i, run in enumerate(runs)]
        waits = tuple(None if w is None or i == at else tuple(b for b in w if b != at) for i, w in enumerate(waits))
        replay = self._captured(rest, waits)
        replay.ahead = Ahead(first.run, ahead[1])
        return replay

    def _captured(self, runs: Sequence[Callable[[], None]], waits: Waits | None) -> Replay:
        ordered = in_order(self._streams, runs, self.scratch)
        if waits is None or not self.side_by_side:
            return ordered
        return or_side_by_side(
            ordered, self._streams, runs, waits, self._on_lane, None if self._known_side_by_side else self.time_us
        )

    @contextmanager
    def _on_lane(self, stream: Any, workspace: Array | None) -> Generator[None]:
        """Run plans on another stream, with a workspace of its own."""
        cudnn.set_stream(handle=self._handle, stream=stream.ptr)
        self._lane_workspace = workspace
        try:
            with stream:
                yield
        finally:
            self._lane_workspace = None
            cudnn.set_stream(handle=self._handle, stream=self._stream.ptr)

    def time_us(self, run: Callable[[], None], count: int, alone: bool = False) -> list[float]:
        """Time runs with CUDA events, in microseconds.

        alone: empty the L2 cache before each run if the model does not fit into it
        """
        footprint_bytes = self.plans.footprint_bytes
        return [self._stopwatch.within_us(run, footprint_bytes, whole=not alone) for _ in range(count)]

    def calling(self, at_once: bool = False) -> AbstractContextManager[None]:
        return CallOnCallersStream(self._streams) if at_once else self._streams.own_call()

    def scratch(self) -> AbstractContextManager[None]:
        return cupy.cuda.using_allocator(self._pool.malloc)

    def run_on_host(self, graph: CudnnGraph, buffers: HostBuffers) -> None:
        """Run a graph on the GPU over flat buffers in host memory, as `simulator.simulate` does."""
        self._ready({graph.key: graph}, 0)
        self._on_host(graph, buffers, lambda device: self.bind(graph, device)())

    def plan_runners(
        self, graph: CudnnGraph, per_engine: int
    ) -> Iterator[tuple[Choice, Callable[[HostBuffers], None]]]:
        """Yield the first plans of each engine, with functions that run them over buffers in host memory."""
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


def _do_nothing() -> None:
    """Stand for a step that is launched before the CUDA graph."""


def _environment(device_name: str, plan_filter: PlanFilter, all_sizes: bool) -> TuningEnvironment:
    """Describe this GPU, its libraries and the plans that may be used, for cache keys.

    all_sizes: plans share kernels for all input shapes.
    """
    here = device.detect()
    words = [cudnn.__version__, competitor()]
    words += ["deterministic"] if plan_filter.deterministic else []
    words += [replace(plan_filter, deterministic=False).key]
    words += ["kernels for all sizes"] if all_sizes else []
    driver, version = str(cupy.cuda.runtime.driverGetVersion()), str(cudnn.backend_version())
    target, figures = ("", "") if here is None else (here.name, here.figures_digest)
    return TuningEnvironment(target, device_name, driver, version, " ".join(word for word in words if word), figures)
