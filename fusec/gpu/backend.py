"""The runtime's backend on an NVIDIA GPU: CuPy memory, cuDNN plans, CUDA graphs."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import cudnn
import cupy
import numpy as np

from fusec.account import spent_on
from fusec.cudnn_graph import CudnnGraph
from fusec.errors import ExecutionError
from fusec.gpu import device, kernels
from fusec.gpu.ahead import Builders
from fusec.gpu.calls import Ahead, AtOnce, Replay, Streams, feeder, fetcher, out_of_memory
from fusec.gpu.capture import Launch, in_order, or_side_by_side
from fusec.gpu.cublaslt import Blas, competitor
from fusec.gpu.end_to_end import SECONDS, Found, descend
from fusec.gpu.forms import (
    Decided,
    Form,
    Parts,
    arrange,
    arranged,
    canonical_of,
    decide,
    has_forms,
    prices_us,
    runs_as_kernel,
)
from fusec.gpu.heads import given_back
from fusec.gpu.joins import Prices, copied, families, placed, worthwhile
from fusec.gpu.kept import Carried, Kept, Place, Suggested
from fusec.gpu.kernels import Kernel
from fusec.gpu.kernels.group import grouped
from fusec.gpu.kernels.launch import Launcher, Memory, ways
from fusec.gpu.lab import WARM_RUNS, GpuLaboratory
from fusec.gpu.products import lone_product
from fusec.gpu.rehearsal import Rehearsal
from fusec.gpu.samples import random_array
from fusec.gpu.stopwatch import Stopwatch
from fusec.gpu.tails import taken_along
from fusec.gpu.together import bound, graphs_of
from fusec.gpu.tune import TOLERANCE, Tuned, tune
from fusec.ir import Array, Graph, TensorType
from fusec.memory import plan_memory
from fusec.parallel import Waits
from fusec.passes.partition.in_place import Family
from fusec.plan_store import PlanStore
from fusec.plans import BLAS, Choice, Entry, Part
from fusec.program import Kind, Partition, Program

KERNEL_RUNS = 7


class CudnnBackend:
    """Executes cuDNN graphs through the frontend on the current device.

    Steps run on a stream of their own, so that they can be captured; such a call waits for what its caller's stream
    holds, and the caller's stream for the call. What is captured whole is queued on the caller's stream itself. tune,
    budget_s: see `gpu.tune`. progress: told the number of graphs whose plan is chosen. Plans and forms are kept in
    `store`. suggested, settled: see `gpu.kept`; where plans made elsewhere were never measured, they alone compete.
    ways: for the key of a kernel, that of the one to take of those that do the same. kernels: see `gpu.lab`. `decided`:
    what `improve` found. `rehearsed`: what `rehearse` did. side_by_side: steps that can are run so, and that is not
    measured; else it is, if anything is. builders: see `gpu.lab`.
    """

    xp: Any = cupy

    def __init__(
        self,
        tune: str,
        progress: Callable[[str, int, int], None] | None = None,
        budget_s: float = float("inf"),
        store: PlanStore | None = None,
        suggested: Suggested | None = None,
        settled: bool = False,
        ways: Mapping[str, str] | None = None,
        kernels: Any = None,
        deterministic: bool = False,
        side_by_side: bool = False,
        builders: Builders | None = None,
    ):
        self.deterministic = deterministic
        self.name = device.device_name() or "GPU"
        self.tune = tune
        self._known_beside = side_by_side
        self.side_by_side = side_by_side or tune != "none"
        self.progress = progress
        self.budget_s = budget_s
        self.decided: Decided | None = None
        self.rehearsed: Found | None = None
        self._ways = ways or {}
        self._kernels = kernels
        here = device.detect()
        target = here.name if here is not None else ""
        driver, version = str(cupy.cuda.runtime.driverGetVersion()), str(cudnn.backend_version())
        frontend = [cudnn.__version__, competitor(), *(["deterministic"] if deterministic else [])]
        frontend += [] if kernels is None else ["kernels for all sizes"]
        place = Place(target, self.name, driver, version, " ".join(word for word in frontend if word))
        self._kept = Kept(store or PlanStore(), place, tune, suggested, settled)
        self._handle = cudnn.create_handle()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._streams = Streams(self._stream)
        self._stopwatch = Stopwatch(self._stream)
        cudnn.set_stream(handle=self._handle, stream=self._stream.ptr)
        named = any(entry.choice.engine == BLAS for entries in (suggested or {}).values() for entry in entries)
        self._blas = Blas.open(lambda: int(cupy.cuda.get_current_stream().ptr))
        self._competes = tune != "none" or named
        # kernels that allocate do so here: what a CUDA graph holds addresses of must not be given to others
        self._pool = cupy.cuda.MemoryPool()
        self._tuned: dict[str, Tuned] = {}
        self._footprint_bytes = 0
        self._chosen_again: set[str] = set()
        self._workspace: Array | None = None
        self._lane_workspace: Array | None = None
        self._products: set[Partition] = set()  # that cuDNN declines and cuBLASLt runs
        self._right: dict[str, list[Choice]] = {}  # how, by graph
        self._launcher = Launcher()
        self._builders = builders

    def from_any(self, array: Any) -> Array:
        if isinstance(array, cupy.ndarray):
            return array
        device = getattr(array, "__dlpack_device__", None)
        if device is not None and not isinstance(array, np.ndarray) and device()[0] == 2:  # DLPack: kDLCUDA
            return cupy.from_dlpack(array)
        if device is not None and not isinstance(array, (np.ndarray, np.generic)):
            return cupy.asarray(np.from_dlpack(array))
        return cupy.asarray(array)

    def unkept(self, graphs: Mapping[str, CudnnGraph]) -> dict[str, CudnnGraph]:
        """Those of the graphs for which no serialized plan is kept."""
        entries = {key: self._kept.entry(key) for key in graphs}
        return {key: graph for key, graph in graphs.items() if (entry := entries[key]) is None or entry.blob is None}

    def receive(self, arriving: Iterable[tuple[CudnnGraph, Entry]]) -> dict[str, Entry]:
        """Take plans that another process of this machine just built, where no others are known: revived as they come,
        then kept, all at once."""
        received: dict[str, Entry] = {}
        with out_of_memory("reviving plans"), self._stream:
            lab = self._laboratory(0)
            for graph, entry in arriving:
                received[graph.key] = entry
                known = self._kept.entry(graph.key)
                other = known is not None and known.choice.identity != entry.choice.identity
                wrong = self._kept.wrong(graph.key, entry.choice) is not None
                if entry.blob is not None and not other and not wrong and graph.key not in self._tuned:
                    try:
                        plan = lab.revive(graph, entry.blob)
                    except ExecutionError:  # it is tried once more, and then built, when its turn comes
                        continue
                    self._tuned[graph.key] = Tuned(graph, [(entry.choice, plan)], revived=True)
        self._kept.take(received)
        return received

    def suggest(self, choices: Mapping[str, Choice]) -> None:
        """Take these plans of graphs, with `tune` none, where they are offered."""
        self._kept.suggest(choices)
        self._competes = self._competes or any(choice.engine == BLAS for choice in choices.values())

    def prepare(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int, others: Sequence[Partition] = ()) -> None:
        """Choose and build a plan of each graph, and compile the kernels of other steps; ExecutionError if a graph has
        no plan."""
        found = self._found(others)
        with ThreadPoolExecutor(1, thread_name_prefix="fusec-kernels") as beside:  # NVRTC lets go of Python's lock
            kernels_ready = beside.submit(self._launcher.compile, found)
            self._ready(graphs, footprint_bytes)
            kernels_ready.result()
        self._keep(graphs.values(), footprint_bytes)

    def _ready(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> None:
        self._choose(graphs, footprint_bytes)
        for key, graph in graphs.items():
            if not self._tuned[key].plans:
                reasons = "\n".join(self._tuned[key].rejected)
                raise ExecutionError(f"cuDNN built no plan on this GPU for\n{graph}\n{reasons}")
        if self._builders is not None:
            self._builders.close()
        self._reserve_for(graphs)

    def times_us(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> dict[str, float]:
        """How long graphs take; those without a plan are left out. What is known from before is not built."""
        known: dict[str, float] = {}
        for key in graphs:
            entry = self._kept.entry(key) if self.tune != "none" else None
            if entry is not None and self._kept.enough(entry) and entry.choice.time_us is not None:
                known[key] = entry.choice.time_us
        self._choose({key: graph for key, graph in graphs.items() if key not in known}, footprint_bytes)
        found = {key: self._tuned[key].time_us for key in graphs if key in self._tuned and self._tuned[key].plans}
        return {**known, **found}

    def _choose(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> None:
        """Revive or build plans of those graphs that have none yet, and time what has to be."""
        self._footprint_bytes = footprint_bytes
        missing = {key: graph for key, graph in graphs.items() if key not in self._tuned}
        if not missing:
            return

        def report(done: int, total: int) -> None:
            if self.progress is not None:
                self.progress("plans", done, total)

        with out_of_memory("choosing plans"), self._stream:
            lab = self._laboratory(footprint_bytes)
            self._tuned.update(self._kept.revived(missing, lab))
            missing = {key: graph for key, graph in missing.items() if key not in self._tuned}
            entries = {key: entry for key in missing if (entry := self._kept.entry(key)) is not None}
            tuned: dict[str, Tuned] = {}
            if self.tune == "quick":
                carried = {key: g for key, g in missing.items() if key not in entries and self._kept.carried(key)}
                tuned = tune(carried, Carried(lab, self._kept), "full", self.budget_s, progress=report)
                tuned = {key: result for key, result in tuned.items() if result.plans}
            enough = {key: self._kept.enough(entry) for key, entry in entries.items()}
            known = {key: replace(e.choice, complete=enough[key]) for key, e in entries.items()}
            untried = {*tuned, *(key for key, e in entries.items() if not e.choice.complete and enough[key])}
            rest = {key: graph for key, graph in missing.items() if key not in tuned}
            tuned |= tune(rest, lab, self.tune, self.budget_s, known, report)
        for key, result in tuned.items():
            if key in untried:  # there are plans that were not timed
                result.plans = [(replace(choice, complete=False), plan) for choice, plan in result.plans]
            if result.plans and self.tune != "none":
                self._kept.choose(key, result.plans[0][0])
        self._tuned.update(tuned)

    def _laboratory(self, footprint_bytes: int) -> GpuLaboratory:
        kept = self._kept
        shared = (self._kernels, self._blas if self._competes else None, self.deterministic, self._builders)
        return GpuLaboratory(
            self._handle, self._stream, self._stopwatch, footprint_bytes, kept.wrong, kept.note, *shared
        )

    @spent_on("plans are kept")
    def _keep(self, graphs: Iterable[CudnnGraph], footprint_bytes: int) -> None:
        """Keep the plans of these graphs that were built, as cuDNN serializes them."""
        built = [graph for graph in graphs if not self._tuned[graph.key].revived]
        if not built:
            return
        with out_of_memory("keeping plans"), self._stream:
            lab = self._laboratory(footprint_bytes)
            for graph in built:
                choice, plan = self._tuned[graph.key].plans[0]
                best = self.tune == "none" and not self._kept.carried(graph.key)  # else somebody named it
                self._kept.keep(graph, choice, plan, lab, best)

    @spent_on("forms are compared")
    def improve(
        self, program: Program, tensor_cores: bool, launch_us: float, kept: bool = False, own_kernels: bool = False
    ) -> Program:
        """The program with each step in the form that is fastest on this GPU, or in one that runs, and kernels joined
        with what is beside them. kept: what would round otherwise is not tried. own_kernels: fusec's kernels run what
        is pointwise."""
        constants = sum(v.type.nbytes for v in program.graph.values() if v.literal is not None)
        footprint_bytes = plan_memory(program).nbytes + constants

        def time_us(graphs: Mapping[str, CudnnGraph]) -> Mapping[str, float]:
            return self.times_us(graphs, footprint_bytes)

        def kernels_us(asked: Mapping[str, Kernel]) -> Mapping[str, float]:
            return self._kernels_us(asked, footprint_bytes)

        def prices(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
            return prices_us(graph, steps, tensor_cores, launch_us, level, time_us, kernels_us, self._kernels_soon)

        level = "none" if kept else self.tune
        concats = families(program)
        partitioned = self._with_concats(program, concats, launch_us, prices) if level != "none" else program
        where = placed(concats, partitioned)
        program = partitioned if kept else grouped(partitioned, products=True)
        known = self._known_forms(program, tensor_cores, launch_us) if level != "none" else {}
        if own_kernels:
            flat = [step for step in program.steps if runs_as_kernel(step)]
            known |= {canonical_of(program.graph, step): (Part(len(step.nodes), "kernel"),) for step in flat}

        def together_us(asked: Sequence[Form]) -> Sequence[float]:
            return self._together_us(asked, tensor_cores, footprint_bytes)

        soon = self._kernels_soon
        decided = decide(program, tensor_cores, launch_us, level, time_us, kernels_us, known, together_us, soon)
        best = [result.plans[0][0] for result in self._tuned.values() if result.plans]
        if level != "none" and all(choice.complete for choice in best):  # nothing was left for the next time
            for work, parts in decided.items():
                self._kept.keep_form(_name(work, tensor_cores), launch_us, parts)
            for work, place in where.items():
                self._kept.keep_form(work, launch_us, [Part(0, "in place" if place.in_place else "copy")])
        forms = {**known, **decided}
        if level != "none":

            def alone_us(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
                return prices_us(graph, steps, tensor_cores, launch_us, "none", time_us, kernels_us)

            forms |= taken_along(program, forms, lambda tried: arrange(partitioned, tried), alone_us)
            forms |= given_back(program, forms, lambda tried: arrange(partitioned, tried), alone_us)
        program = arrange(partitioned, forms, kept)
        found = {k.key: k for k in self._found(program.steps) if k.others}
        if self.tune != "none":
            kernels_us({key: k for key, k in found.items() if not self._launcher.is_measured(k)})
        ways = {key: self._launcher.fastest(k).key for key, k in found.items() if self._launcher.is_measured(k)}
        self.decided = Decided(partitioned, forms, ways, where)
        return program

    def _with_concats(
        self, program: Program, concats: Mapping[str, Sequence[Family]], launch_us: float, prices_us: Prices
    ) -> Program:
        """The program with those of its concats as copies that are faster so, measured or as it is known."""
        known = {work: self._kept.form(work, launch_us) for work in concats}
        if all(form is not None for form in known.values()):
            return copied(program, {work for work, form in known.items() if form and form[0].runs == "copy"})
        return worthwhile(program, prices_us)

    def _found(self, steps: Iterable[Partition]) -> list[Kernel]:
        """The kernels of steps that cuDNN does not run; of several that do the same, those named are taken."""
        found = (kernels.find(step.nodes, step.outputs) for step in steps if step.kind is Kind.KERNEL)
        wanted = [kernel for kernel in found if kernel is not None]
        for kernel in wanted:
            if kernel.key in self._ways and not self._launcher.take(kernel, self._ways[kernel.key]):
                raise ExecutionError(f"{kernel.name}: there is no kernel {self._ways[kernel.key]}")
        return wanted

    def _known_forms(self, program: Program, tensor_cores: bool, launch_us: float) -> dict[str, Parts]:
        """The forms that were found to be the fastest earlier, of those steps where they still fit."""
        known: dict[str, Parts] = {}
        for work in {canonical_of(program.graph, step) for step in program.steps if has_forms(step)}:
            parts = self._kept.form(_name(work, tensor_cores), launch_us)
            if parts is not None:
                known[work] = parts
        try:
            arranged(program, known)
        except ValueError:
            return {}
        return known

    def _kernels_us(self, asked: Mapping[str, Kernel], footprint_bytes: int) -> dict[str, float]:
        """How long kernels take, by key, each as it is fastest; infinite for what does not compile."""
        times: dict[str, float] = {}
        for key, kernel in asked.items():
            known = self._known_way(kernel)
            if known is not None and self._launcher.take(kernel, known["fastest"]):
                times[key] = float(known["time_us"])
        asked = {key: kernel for key, kernel in asked.items() if key not in times}
        if not asked:
            return times
        self._compile_kernels(asked.values())
        with out_of_memory("timing kernels"), self._stream:
            lab = GpuLaboratory(self._handle, self._stream, self._stopwatch, footprint_bytes)

            for key, kernel in asked.items():
                times[key] = self._launcher.measure(kernel, partial(_median_us, lab))
                if times[key] < float("inf"):
                    fastest, keys = self._launcher.fastest(kernel).key, [way.key for way in ways(kernel)]
                    self._kept.keep_ways(key, {"ways": keys, "fastest": fastest, "time_us": times[key]})
        return times

    def _known_way(self, kernel: Kernel) -> Mapping[str, Any] | None:
        """What was measured of a kernel earlier, if that was among the same."""
        known = self._kept.ways(kernel.key)
        return known if known.get("ways") == [way.key for way in ways(kernel)] else None

    def _kernels_soon(self, asked: Mapping[str, Kernel]) -> None:
        """Have kernels compiled in other processes while plans are timed: NVRTC in this one would disturb that."""
        unknown = [way for kernel in asked.values() if self._known_way(kernel) is None for way in ways(kernel)]
        if self._builders is not None and unknown:
            self._builders.expect_kernels([launch for _, launch in self._launcher.missing(unknown)])

    def _compile_kernels(self, asked: Iterable[Kernel]) -> None:
        if self._builders is not None:  # what it has not begun is compiled here, on all cores
            self._builders.expect_kernels([])
        self._launcher.compile(each for kernel in asked for each in ways(kernel))

    @spent_on("forms are timed")
    def _together_us(self, asked: Sequence[Form], tensor_cores: bool, footprint_bytes: int) -> list[float]:
        """How long forms of several steps take as a whole; infinite where one of these fails."""
        graphs = graphs_of(asked, tensor_cores)
        self._choose(graphs, footprint_bytes)
        self._reserve_for(key for key in graphs if self._tuned[key].plans)
        times: list[float] = []
        with out_of_memory("timing forms"), self._stream:
            lab = GpuLaboratory(self._handle, self._stream, self._stopwatch, footprint_bytes)
            for form in asked:
                run = bound(form, tensor_cores, self.bind, self._launcher)
                try:
                    times.append(_median_us(lab, run))
                except ExecutionError:
                    times.append(float("inf"))
        return times

    @spent_on("the whole is timed")
    def rehearse(
        self,
        inputs: Sequence[tuple[Array, TensorType]],
        works: Sequence[CudnnGraph | Partition],
        runs: Sequence[Callable[[], None]],
        bound: Callable[[int], Callable[[], None]],
    ) -> list[int]:
        """Of plans and kernels that are about as fast by themselves, take those that are fastest within the whole model
        (`gpu.end_to_end`): the steps to bind anew, by number. runs: the steps, over memory whose inputs are filled
        here; works: what they run. bound: binds a step to its memory anew."""
        seconds = min(SECONDS.get(self.tune, 0.0), self.budget_s)
        if seconds <= 0.0:
            return []
        found = [work if isinstance(work, CudnnGraph) else kernels.find(work.nodes, work.outputs) for work in works]
        how = (self._tuned, self._launcher, self._streams, self.scratch, self.time_us)
        whole = Rehearsal(found, runs, bound, *how)
        tried = whole.contests()
        plans = [plan for contest in tried if contest.key in self._tuned for _, plan in self._tuned[contest.key].plans]
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
            self.rehearsed = descend(tried, whole, lambda: time.monotonic() < end)
        except ExecutionError:  # the first call will find the step, and another plan for it
            return []
        if self.rehearsed is None:
            return []
        changed: list[str] = []
        for key, option in self.rehearsed.options.items():
            way = whole.way(key, option)
            if self._prefer(key, option) if way is None else self._prefer_way(*way):
                changed.append(key)
        self._keep([self._tuned[key].graph for key in changed if key in self._tuned], self._footprint_bytes)
        return [number for key in changed for number in whole.places[key]]

    def _prefer(self, key: str, option: int) -> bool:
        """Take another plan of a graph from now on, unless it computes something else."""
        tuned = self._tuned[key]
        choice, plan = tuned.plans[option]
        with self._stream:
            error = self._laboratory(self._footprint_bytes).error(tuned.graph, plan, tuned.plans[0][1])
        if error is None or not error <= TOLERANCE:
            return False
        tuned.plans = [(replace(choice, error=error), plan), *(p for p in tuned.plans if p[1] is not plan)]
        self._kept.choose(key, tuned.plans[0][0])
        return True

    def _prefer_way(self, kernel: Kernel, way: Kernel) -> bool:
        """Take another of the kernels that do the same from now on, unless it computes something else."""
        keys = [each.key for each in ways(kernel)]
        with self._stream:
            if not self._launcher.agree(self._launcher.fastest(kernel), way):
                return False
        time_us = self._launcher.times_us(kernel)[keys.index(way.key)]
        self._launcher.take(kernel, way.key)
        self._kept.keep_ways(kernel.key, {"ways": keys, "fastest": way.key, "time_us": time_us})
        if self.decided is not None:
            self.decided = replace(self.decided, ways={**self.decided.ways, kernel.key: way.key})
        return True

    def give_up(self, graph: CudnnGraph, reason: str) -> bool:
        """Turn to the next plan of a graph, whose first one failed; False if there is none."""
        result = self._tuned[graph.key]
        choice, _ = result.plans.pop(0)
        what = choice.name
        if result.revived:  # perhaps it is not the engine's fault
            what = f"the serialized plan of {what}"
            self._kept.drop(graph.key, choice, reason)
        else:
            self._kept.note(graph.key, choice, reason)
        if not result.plans and (result.revived or graph.key not in self._chosen_again):
            if not result.revived:
                self._chosen_again.add(graph.key)
            del self._tuned[graph.key]
            self._choose({graph.key: graph}, self._footprint_bytes)
            result = self._tuned[graph.key]
        if result.plans:
            warnings.warn(f"{what} failed and gave way to the next plan: {reason}", stacklevel=2)
            self._reserve(result.plans[0][1].workspace_bytes)
        return bool(result.plans)

    def choices(self) -> dict[str, Choice]:
        """What was chosen, by `CudnnGraph.key`."""
        return {key: result.plans[0][0] for key, result in self._tuned.items()}

    def entries(self, graphs: Iterable[str]) -> dict[str, Entry]:
        """The plans of graphs, by `CudnnGraph.key`, serialized where they can be."""
        found: dict[str, Entry] = {}
        for key in graphs:
            choice, plan = self._tuned[key].plans[0]
            known = self._kept.entry(key)
            same = known is not None and known.choice.identity == choice.identity
            found[key] = Entry(choice, plan.blob or (known.blob if same and known is not None else None))
        return found

    def library(self, work: CudnnGraph | Partition) -> str:
        if isinstance(work, CudnnGraph):
            return self._tuned[work.key].plans[0][0].library
        return "cublaslt" if work in self._products else work.kind.value

    def _reserve_for(self, graphs: Iterable[str]) -> None:
        self._reserve(max((self._tuned[key].plans[0][1].workspace_bytes for key in graphs), default=0))

    def _reserve(self, workspace_bytes: int) -> None:
        """Scratch memory for the plan that needs the most."""
        if self._workspace is None or self._workspace.size < workspace_bytes:
            with self._stream:
                self._workspace = cupy.empty(workspace_bytes, cupy.uint8)

    def bind(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
        (_, plan), handle, workspace = self._tuned[graph.key].plans[0], self._handle, self._workspace
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
        cold = self._stopwatch.overflows(self._footprint_bytes)
        runs = 1 if cold else WARM_RUNS
        return [self._stopwatch.us(run, runs, swept=cold and alone) for _ in range(count)]

    def calling(self, at_once: bool = False) -> AbstractContextManager[None]:
        return AtOnce(self._streams) if at_once else self._streams.own_call()

    def scratch(self) -> AbstractContextManager[None]:
        return cupy.cuda.using_allocator(self._pool.malloc)

    def run_on_host(self, graph: CudnnGraph, buffers: Mapping[int, np.ndarray[Any, Any]]) -> None:
        """As `simulate.simulate`: read and write flat buffers in host memory, by the plan on the GPU."""
        self._ready({graph.key: graph}, 0)
        with self.calling():
            device = {uid: cupy.asarray(buffer) for uid, buffer in buffers.items()}
            self.bind(graph, device)()
            self.finish()
            for tensor in graph.outputs:
                buffers[tensor.uid][...] = device[tensor.uid].get()

    def finish(self) -> None:
        try:
            self._streams.synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise ExecutionError(f"the GPU reported an error: {error}") from error


def _median_us(lab: GpuLaboratory, run: Callable[[], None]) -> float:
    """Of some runs, behind one that warms up."""
    lab.run_us(run)
    return statistics.median(lab.run_us(run) for _ in range(KERNEL_RUNS))


def _nothing() -> None:
    """What is done elsewhere."""


def _name(work: str, tensor_cores: bool) -> str:
    return work + ("" if tensor_cores else "\nno tensor cores")
