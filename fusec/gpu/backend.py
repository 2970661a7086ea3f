"""Run programs on an NVIDIA GPU: CuPy memory, cuDNN plans, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import cudnn
import cupy

from fusec.gpu import device, kernels
from fusec.gpu.autotune.cache.tuning_cache import KnownChoices, TuningCache
from fusec.gpu.autotune.cache.tuning_environment import environment_here
from fusec.gpu.autotune.candidates.candidate_times import StepTuning
from fusec.gpu.autotune.model.coordinate_descent import SECONDS
from fusec.gpu.autotune.model.whole_model import WholeModelTrial
from fusec.gpu.autotune.plans.plan_bench import CudnnContext
from fusec.gpu.autotune.plans.plan_search import TuningOptions
from fusec.gpu.autotune.plans.plan_selection import PlanSelector
from fusec.gpu.autotune.plans.product_selection import ProductSelector
from fusec.gpu.autotune.step_choices import TunedChoices
from fusec.gpu.autotune.steps.step_selection import StepSelector
from fusec.gpu.cublaslt.algorithms import Blas
from fusec.gpu.cudnn.handles import create_handle
from fusec.gpu.cudnn.without_driver.deviceless import nvrtc_libraries
from fusec.gpu.cudnn.worker_processes.build_pool import BuildPool
from fusec.gpu.device_arrays import DeviceArrays
from fusec.gpu.host_buffers import HostBuffers, plan_runners, run_over
from fusec.gpu.launch import reorder
from fusec.gpu.launch.capture import StepCapture
from fusec.gpu.launch.cubins import Cubins
from fusec.gpu.launch.kernel_launcher import Launcher, Memory
from fusec.gpu.launch.stream_calls import CallOnCallersStream, Replay, Streams, feeder, fetcher, read_later
from fusec.gpu.launch.workspace import Workspace
from fusec.gpu.measure.random_inputs import random_array
from fusec.gpu.measure.timer import Stopwatch
from fusec.gpu.step_launches import StepLaunches
from fusec.ir import Array, TensorType
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import Choice, Entry
from fusec.schedule.dependencies import Waits
from fusec.schedule.program import Partition, Program
from fusec.system.compile_timer import spent_on
from fusec.targets.target import DEFAULT, load


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
        self.descent: dict[str, int] | None = None
        environment = environment_here(self.name, plan_filter, kernel_cache is not None)
        cache = TuningCache(store or PlanStore(), environment, tuning.level, known)
        self._handle = create_handle()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._streams = Streams(self._stream)
        self._stopwatch = Stopwatch(self._stream)
        cudnn.set_stream(handle=self._handle, stream=self._stream.ptr)
        blas = Blas.open(lambda: int(cupy.cuda.get_current_stream().ptr))
        self.workspace = Workspace(self._handle, self._stream)
        self._launcher = Launcher(Cubins(cache.cubin, cache.store_cubins, nvrtc_libraries()))
        self._build_pool = build_pool
        context = CudnnContext(self._handle, self._stream, self._stopwatch, kernel_cache, plan_filter, build_pool)
        self.plans = PlanSelector(context, cache, tuning, blas)
        self.steps = StepSelector(self.plans, self._launcher, known.variants)
        # FUSEC_DEVICE=none hides the GPU from `detect`, but not from CuPy
        figures = kernels.GpuFigures.of(device.detect() or load(DEFAULT))
        products = None if blas is None else ProductSelector(self.plans, blas)
        self._launches = StepLaunches(self.plans, self._launcher, figures, products, self.workspace)
        untimed = known.side_by_side
        self.side_by_side = untimed or tuning.level != "none"
        self._capture = StepCapture(self._streams, self.workspace, self.side_by_side, None if untimed else self.time_us)
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
        only: frozenset[str] | None = None,
    ) -> Program:
        """Replace each step by its fastest candidate: see `StepSelector.tune_steps`."""

        def bind(graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
            self.workspace.reserve(self.plans.workspace_bytes([graph.key]))
            return self.bind(graph, buffers)

        tuning = StepTuning(tensor_cores, launch_us, self.tune, self._launches.figures, only)
        return self.steps.tune_steps(program, tuning, bind, as_source, prefer_kernels)

    def time_variants(self, program: Program) -> None:
        """Choose the fastest variant of each kernel of a program that was not tuned here; nothing with level `none`."""
        self.steps.time_variants(program, self._launches.figures)

    def from_any(self, array: Any) -> Array:
        return DeviceArrays().from_any(array)

    def packed(self, array: Array, type: TensorType) -> Array:
        return DeviceArrays().packed(array, type)

    def prepare(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int, others: Sequence[Partition] = ()) -> None:
        """Choose and build a plan of each graph, and compile the kernels of other steps.

        Raises ExecutionError when a graph has no plan.
        """
        wanted = self.steps.variants.kernels_of(others, self._launches.figures)
        orders = reorder.kernels_of_weights()
        with ThreadPoolExecutor(1, thread_name_prefix="fusec-kernels") as pool:  # NVRTC releases Python's lock
            kernels_ready = pool.submit(self._launcher.compile, wanted)
            self._ready(graphs, footprint_bytes)
            kernels_ready.result()
            reorder.use(self._launcher.loaded(orders))
        self._launcher.store_cubins([*wanted, *orders])
        self.plans.store(graphs.values(), footprint_bytes)

    def _ready(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> None:
        self.plans.require(graphs, footprint_bytes)
        if self._build_pool is not None:
            self._build_pool.close()
        self.workspace.reserve(self.plans.workspace_bytes(graphs))

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
        found = [each if isinstance(each, CudnnGraph) else self._launches.kernel(each) for each in code]
        using = (self.plans, self.steps, self._launcher, self._streams, self.scratch, self.time_us)
        trial = WholeModelTrial(found, runs, bind_step, *using)

        def rehearse(workspace_bytes: int) -> None:
            self.workspace.reserve(workspace_bytes)
            self.run_once(inputs, runs)

        self.descent = trial.descend(seconds, rehearse)
        if self.descent is None:
            return []
        changed = trial.adopt(self.descent)
        self._launcher.store_cubins(each for each in found if isinstance(each, kernels.Kernel))
        return changed

    def run_once(self, inputs: Sequence[tuple[Array, TensorType]], runs: Sequence[Callable[[], None]]) -> None:
        """Run steps one by one, as in a first call, over random inputs, whose memory is given."""
        for array, type in inputs:
            array[...] = random_array(type)[: array.size]
        with self.scratch():
            for run in runs:
                run()
        self.finish()

    def library(self, work: CudnnGraph | Partition) -> str:
        return self._launches.library(work)

    def bind(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
        return self._launches.bind(graph, buffers)

    def kernel(self, step: Partition, memory: Memory) -> Callable[[], None] | None:
        return self._launches.bind_kernel(step, memory)

    def capture(
        self,
        runs: Sequence[Callable[[], None]],
        waits: Waits | None = None,
        ahead: tuple[int, Mapping[int, Array]] | None = None,
    ) -> Replay:
        """Capture steps as CUDA graphs, as far as they can be captured: see `StepCapture.capture`."""
        return self._capture.capture(runs, waits, ahead)

    def give_up(self, graph: CudnnGraph, reason: str) -> bool:
        """Drop the first plan of a graph, which failed, and use the next; False if there is none."""
        has_next = self.plans.give_up(graph, reason)
        if has_next:
            self.workspace.reserve(self.plans.workspace_bytes([graph.key]))
        return has_next

    def choices(self) -> dict[str, Choice]:
        """Return the plan chosen for each graph, by `CudnnGraph.key`."""
        return self.plans.choices()

    def entries(self, graphs: Iterable[str]) -> dict[str, Entry]:
        """Return the plans of graphs, by `CudnnGraph.key`, serialized where cuDNN can."""
        return self.plans.entries(graphs)

    def feeder(self, buffer: Array, type: TensorType) -> Callable[[Array], None]:
        return feeder(self._streams, buffer, type)

    def fetcher(self, buffer: Array, type: TensorType) -> Callable[[Array | None, bool], Array]:
        return fetcher(self._streams, buffer, type)

    def time_us(self, run: Callable[[], None], count: int, alone: bool = False) -> list[float]:
        """Time runs with CUDA events, in microseconds.

        alone: empty the L2 cache before each run if the model does not fit into it
        """
        footprint_bytes = self.plans.footprint_bytes
        return [self._stopwatch.within_us(run, footprint_bytes, whole=not alone) for _ in range(count)]

    def calling(self, at_once: bool = False) -> AbstractContextManager[None]:
        return CallOnCallersStream(self._streams) if at_once else self._streams.own_call()

    def scratch(self) -> AbstractContextManager[None]:
        return self.workspace.allocations()

    def run_on_host(self, graph: CudnnGraph, buffers: HostBuffers) -> None:
        """Run a graph on the GPU over flat buffers in host memory, as `simulator.simulate` does."""
        self._ready({graph.key: graph}, 0)
        run_over(buffers, graph, self._streams, lambda device: self.bind(graph, device)())

    def plan_runners(
        self, graph: CudnnGraph, per_engine: int
    ) -> Iterator[tuple[Choice, Callable[[HostBuffers], None]]]:
        """Yield the first plans of each engine, with functions that run them over buffers in host memory."""
        return plan_runners(self.plans, graph, self._streams, per_engine)

    def read_later(self, array: Array) -> Callable[[], Array]:
        return read_later(array)

    def finish(self) -> None:
        self._streams.finish()
