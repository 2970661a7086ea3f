"""In which form each step runs on this GPU, and by which of the kernels that do the same: measured, or kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fusec.errors import ExecutionError
from fusec.gpu import kernels
from fusec.gpu.autotune.candidate_runner import Bind, bound, graphs_of
from fusec.gpu.autotune.concat_choice import Prices, copied, families, placed, worthwhile
from fusec.gpu.autotune.epilogue_split import taken_along
from fusec.gpu.autotune.plan_selection import Plans
from fusec.gpu.autotune.prologue_split import given_back
from fusec.gpu.autotune.step_candidates import (
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
from fusec.gpu.autotune.step_fusion import grouped
from fusec.gpu.cudnn.build_pool import Builders
from fusec.gpu.kernels import Kernel
from fusec.gpu.launch.kernel_launcher import Launcher, ways
from fusec.gpu.launch.stream_calls import out_of_memory
from fusec.gpu.measure.timer import Stopwatch
from fusec.ir import Graph
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.passes.partition.concat_in_place import ConcatGroup
from fusec.plans.plan_record import Part
from fusec.schedule.memory_plan import plan_memory
from fusec.schedule.program import Kind, Partition, Program
from fusec.system.compile_timer import spent_on

KERNEL_RUNS = 7


class Forms:
    """The forms of a program's steps.

    plans: of cuDNN graphs. launcher: of kernels. stream: what is measured runs there. level: see `plan_search`. ways:
    for the key of a kernel, that of the one to take of those that do the same. builders: compile kernels beforehand.
    `decided`: what `improve` found.
    """

    def __init__(
        self,
        plans: Plans,
        launcher: Launcher,
        stream: Any,
        stopwatch: Stopwatch,
        level: str,
        ways: Mapping[str, str],
        builders: Builders | None,
    ):
        self.decided: Decided | None = None
        self._plans, self._kept, self._launcher = plans, plans.kept, launcher
        self._stream, self._stopwatch = stream, stopwatch
        self._tune, self._ways, self._builders = level, ways, builders

    @spent_on("forms are compared")
    def improve(
        self,
        program: Program,
        tensor_cores: bool,
        launch_us: float,
        bind: Bind,
        kept: bool = False,
        own_kernels: bool = False,
    ) -> Program:
        """The program with each step in the form that is fastest on this GPU, or in one that runs, and kernels joined
        with what is beside them. bind: what runs a graph over memory. kept: what would round otherwise is not tried.
        own_kernels: fusec's kernels run what is pointwise."""
        constants = sum(v.type.nbytes for v in program.graph.values() if v.literal is not None)
        footprint_bytes = plan_memory(program).nbytes + constants

        def time_us(graphs: Mapping[str, CudnnGraph]) -> Mapping[str, float]:
            return self._plans.times_us(graphs, footprint_bytes)

        def kernels_us(asked: Mapping[str, Kernel]) -> Mapping[str, float]:
            return self._kernels_us(asked, footprint_bytes)

        def prices(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
            return prices_us(graph, steps, tensor_cores, launch_us, level, time_us, kernels_us, self._kernels_soon)

        level = "none" if kept else self._tune
        concats = families(program)
        partitioned = self._with_concats(program, concats, launch_us, prices) if level != "none" else program
        where = placed(concats, partitioned)
        program = partitioned if kept else grouped(partitioned, products=True)
        known = self._known_forms(program, tensor_cores, launch_us) if level != "none" else {}
        if own_kernels:
            flat = [step for step in program.steps if runs_as_kernel(step)]
            known |= {canonical_of(program.graph, step): (Part(len(step.nodes), "kernel"),) for step in flat}

        def together_us(asked: Sequence[Form]) -> Sequence[float]:
            return self._together_us(asked, tensor_cores, bind, footprint_bytes)

        soon = self._kernels_soon
        decided = decide(program, tensor_cores, launch_us, level, time_us, kernels_us, known, together_us, soon)
        best = [result.plans[0][0] for result in self._plans.tuned.values() if result.plans]
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
        found = {k.key: k for k in self.found(program.steps) if k.others}
        if self._tune != "none":
            kernels_us({key: k for key, k in found.items() if not self._launcher.is_measured(k)})
        ways = {key: self._launcher.fastest(k).key for key, k in found.items() if self._launcher.is_measured(k)}
        self.decided = Decided(partitioned, forms, ways, where)
        return program

    def _with_concats(
        self, program: Program, concats: Mapping[str, Sequence[ConcatGroup]], launch_us: float, prices_us: Prices
    ) -> Program:
        """The program with those of its concats as copies that are faster so, measured or as it is known."""
        known = {work: self._kept.form(work, launch_us) for work in concats}
        if all(form is not None for form in known.values()):
            return copied(program, {work for work, form in known.items() if form and form[0].runs == "copy"})
        return worthwhile(program, prices_us)

    def found(self, steps: Iterable[Partition]) -> list[Kernel]:
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
        time_us = partial(self._median_us, footprint_bytes=footprint_bytes)
        with out_of_memory("timing kernels"), self._stream:
            for key, kernel in asked.items():
                times[key] = self._launcher.measure(kernel, time_us)
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
    def _together_us(self, asked: Sequence[Form], tensor_cores: bool, bind: Bind, footprint_bytes: int) -> list[float]:
        """How long forms of several steps take as a whole; infinite where one of these fails."""
        graphs = graphs_of(asked, tensor_cores)
        self._plans.choose(graphs, footprint_bytes)
        times: list[float] = []
        with out_of_memory("timing forms"), self._stream:
            for form in asked:
                run = bound(form, tensor_cores, bind, self._launcher)
                try:
                    times.append(self._median_us(run, footprint_bytes))
                except ExecutionError:
                    times.append(float("inf"))
        return times

    def prefer_way(self, kernel: Kernel, way: Kernel) -> bool:
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

    def _median_us(self, run: Callable[[], None], footprint_bytes: int) -> float:
        """Of some runs, behind one that warms up."""
        times = [self._stopwatch.within_us(run, footprint_bytes) for _ in range(1 + KERNEL_RUNS)]
        return statistics.median(times[1:])


def _name(work: str, tensor_cores: bool) -> str:
    return work + ("" if tensor_cores else "\nno tensor cores")
