"""Choose the candidate that runs each step on this GPU, and the variant of each kernel: timed, or from the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fusec.errors import ExecutionError
from fusec.gpu import kernels
from fusec.gpu.autotune.candidate_runner import Bind, bind_candidate, graphs_of
from fusec.gpu.autotune.concat_choice import (
    TimeSteps,
    concat_choices,
    concats_in_place,
    copy_concats,
    keep_faster_concats,
)
from fusec.gpu.autotune.plan_selection import PlanSelector
from fusec.gpu.autotune.step_candidates import (
    Candidate,
    StepChoice,
    StepTuning,
    Timers,
    TunedChoices,
    apply_choices,
    can_run_as_kernel,
    choose_steps,
    has_candidates,
    replace_steps,
    step_key,
    step_times_us,
)
from fusec.gpu.autotune.step_fusion import fuse_steps
from fusec.gpu.autotune.step_split import split_epilogues, split_prologues
from fusec.gpu.kernels import Kernel
from fusec.gpu.launch.kernel_launcher import Launcher, variants_of
from fusec.gpu.launch.stream_calls import out_of_memory
from fusec.ir import Graph
from fusec.passes.partition.concat_in_place import ConcatGroup
from fusec.plans.plan_record import Part
from fusec.schedule.memory_plan import plan_memory
from fusec.schedule.program import Kind, Partition, Program
from fusec.system.compile_timer import spent_on

KERNEL_RUNS = 7


class StepSelector:
    """Choices for the steps of a program.

    plans: chooses the plans of cuDNN graphs
    launcher: compiles and times kernels
    variants: for the key of a kernel, the key of the variant to run
    tuned: what `tune_steps` chose; None before
    """

    def __init__(self, plans: PlanSelector, launcher: Launcher, variants: Mapping[str, str]):
        self.tuned: TunedChoices | None = None
        self._plans, self._cache, self._launcher = plans, plans.cache, launcher
        self._level, self._variants = plans.options.level, variants
        self._stream, self._stopwatch = plans.context.stream, plans.context.stopwatch
        self._build_pool = plans.context.build_pool

    @spent_on("candidates are compared")
    def tune_steps(
        self, program: Program, tuning: StepTuning, bind: Bind, as_source: bool = False, prefer_kernels: bool = False
    ) -> Program:
        """Replace each step by its fastest candidate on this GPU, and fuse kernels with their neighbours.

        bind: returns a function that runs a cuDNN graph over memory
        as_source: try nothing that rounds otherwise than the model
        prefer_kernels: run pointwise steps as kernels, without timing that
        """
        constants = sum(v.type.nbytes for v in program.graph.values() if v.literal is not None)
        footprint_bytes = plan_memory(program).nbytes + constants
        tuning = replace(tuning, level="none" if as_source else self._level)
        is_timed = tuning.level != "none"
        timers = Timers(
            lambda graphs: self._plans.times_us(graphs, footprint_bytes),
            lambda asked: self._kernels_us(asked, footprint_bytes),
            self._compile_soon,
        )

        def times_us(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
            return step_times_us(graph, steps, tuning, timers)

        def unchanged_us(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
            return step_times_us(graph, steps, replace(tuning, level="none"), replace(timers, compile_soon=None))

        def sequence_us(asked: Sequence[Candidate]) -> Sequence[float]:
            return self._sequence_us(asked, tuning.tensor_cores, bind, footprint_bytes)

        concats = concats_in_place(program)
        partitioned = self._with_concats(program, concats, tuning.launch_us, times_us) if is_timed else program
        concat_choice = concat_choices(concats, partitioned)
        program = partitioned if as_source else fuse_steps(partitioned, products=True)
        known = self._stored_choices(program, tuning) if is_timed else {}
        if prefer_kernels:
            pointwise = [step for step in program.steps if can_run_as_kernel(step)]
            known |= {step_key(program.graph, step): (Part(len(step.nodes), "kernel"),) for step in pointwise}
        new = choose_steps(program, tuning, timers, known, sequence_us)
        best = [ranked.plans[0][0] for ranked in self._plans.ranked.values() if ranked.plans]
        if is_timed and all(choice.complete for choice in best):  # an incomplete search goes on the next time
            for key, choice in new.items():
                self._cache.store_step_choice(_cache_name(key, tuning.tensor_cores), tuning.launch_us, choice)
            for key, place in concat_choice.items():
                runs = "in place" if place.in_place else "copy"
                self._cache.store_step_choice(key, tuning.launch_us, [Part(0, runs)])
        chosen = {**known, **new}
        if is_timed:
            for split in (split_epilogues, split_prologues):
                chosen |= split(program, chosen, lambda tried: apply_choices(partitioned, tried), unchanged_us)
        program = apply_choices(partitioned, chosen, as_source)
        found = {k.key: k for k in self.kernels_of(program.steps) if k.others}
        if self._level != "none":
            timers.kernels_us({key: k for key, k in found.items() if not self._launcher.is_measured(k)})
        variants = {key: self._launcher.fastest(k).key for key, k in found.items() if self._launcher.is_measured(k)}
        self.tuned = TunedChoices(partitioned, chosen, variants, concat_choice)
        return program

    def _with_concats(
        self, program: Program, concats: Mapping[str, Sequence[ConcatGroup]], launch_us: float, times_us: TimeSteps
    ) -> Program:
        """Replace concats in place by copies where those are faster, by the cache or by time."""
        known = {key: self._cache.step_choice(key, launch_us) for key in concats}
        if all(choice is not None for choice in known.values()):
            return copy_concats(program, {key for key, choice in known.items() if choice and choice[0].runs == "copy"})
        return keep_faster_concats(program, times_us)

    def kernels_of(self, steps: Iterable[Partition]) -> list[Kernel]:
        """Return the kernels of steps that cuDNN does not run, each as its named variant.

        Raises ExecutionError when a kernel has no variant of that name.
        """
        found = (kernels.find(step.nodes, step.outputs) for step in steps if step.kind is Kind.KERNEL)
        wanted = [kernel for kernel in found if kernel is not None]
        for kernel in wanted:
            if kernel.key in self._variants and not self._launcher.take(kernel, self._variants[kernel.key]):
                raise ExecutionError(f"{kernel.name}: it has no variant {self._variants[kernel.key]}")
        return wanted

    def _stored_choices(self, program: Program, tuning: StepTuning) -> dict[str, StepChoice]:
        """Return the choices that the cache has for a program; none if one of them does not fit."""
        known: dict[str, StepChoice] = {}
        for key in {step_key(program.graph, step) for step in program.steps if has_candidates(step)}:
            choice = self._cache.step_choice(_cache_name(key, tuning.tensor_cores), tuning.launch_us)
            if choice is not None:
                known[key] = choice
        try:
            replace_steps(program, known)
        except ValueError:
            return {}
        return known

    def _kernels_us(self, asked: Mapping[str, Kernel], footprint_bytes: int) -> dict[str, float]:
        """Time kernels, by key, each as its fastest variant; infinite for one that does not compile."""
        times: dict[str, float] = {}
        for key, kernel in asked.items():
            known = self._measured(kernel)
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
                    fastest, keys = self._launcher.fastest(kernel).key, [variant.key for variant in variants_of(kernel)]
                    self._cache.store_kernel_variant(key, {"ways": keys, "fastest": fastest, "time_us": times[key]})
        return times

    def _measured(self, kernel: Kernel) -> Mapping[str, Any] | None:
        """Return what the cache has on a kernel's variants, if they are the same as now."""
        known = self._cache.kernel_variant(kernel.key)
        return known if known.get("ways") == [variant.key for variant in variants_of(kernel)] else None

    def _compile_soon(self, asked: Mapping[str, Kernel]) -> None:
        """Compile kernels in other processes while plans are timed, because NVRTC in this one would disturb that."""
        unknown = [
            variant for kernel in asked.values() if self._measured(kernel) is None for variant in variants_of(kernel)
        ]
        if self._build_pool is not None and unknown:
            self._build_pool.expect_kernels([launch for _, launch in self._launcher.missing(unknown)])

    def _compile_kernels(self, asked: Iterable[Kernel]) -> None:
        if self._build_pool is not None:  # kernels that the pool has not begun are compiled here, on all cores
            self._build_pool.expect_kernels([])
        self._launcher.compile(each for kernel in asked for each in variants_of(kernel))

    @spent_on("candidates are timed")
    def _sequence_us(
        self, asked: Sequence[Candidate], tensor_cores: bool, bind: Bind, footprint_bytes: int
    ) -> list[float]:
        """Time candidates of several steps as a sequence; infinite where a step fails."""
        graphs = graphs_of(asked, tensor_cores)
        self._plans.choose(graphs, footprint_bytes)
        times: list[float] = []
        with out_of_memory("timing candidates"), self._stream:
            for candidate in asked:
                run = bind_candidate(candidate, tensor_cores, bind, self._launcher)
                try:
                    times.append(self._median_us(run, footprint_bytes))
                except ExecutionError:
                    times.append(float("inf"))
        return times

    def prefer_variant(self, kernel: Kernel, variant: Kernel) -> bool:
        """Run another variant of a kernel from now on; False if its results differ."""
        keys = [each.key for each in variants_of(kernel)]
        with self._stream:
            if not self._launcher.agree(self._launcher.fastest(kernel), variant):
                return False
        time_us = self._launcher.times_us(kernel)[keys.index(variant.key)]
        self._launcher.take(kernel, variant.key)
        self._cache.store_kernel_variant(kernel.key, {"ways": keys, "fastest": variant.key, "time_us": time_us})
        if self.tuned is not None:
            self.tuned = replace(self.tuned, variants={**self.tuned.variants, kernel.key: variant.key})
        return True

    def _median_us(self, run: Callable[[], None], footprint_bytes: int) -> float:
        """Return the median time of some runs, after one that warms up."""
        times = [self._stopwatch.within_us(run, footprint_bytes) for _ in range(1 + KERNEL_RUNS)]
        return statistics.median(times[1:])


def _cache_name(key: str, tensor_cores: bool) -> str:
    return key + ("" if tensor_cores else "\nno tensor cores")
