"""Choose what runs each step on this GPU, cuDNN or a kernel: from the cache, or timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fusec.errors import ExecutionError
from fusec.gpu.autotune.candidates.candidate_runner import Bind, RandomMemory, bind_candidate, graphs_of
from fusec.gpu.autotune.candidates.candidate_times import (
    StepTuning,
    Timers,
    choose_steps,
    kernels_of,
    precision_times,
    step_times_us,
)
from fusec.gpu.autotune.candidates.neighbour_times import GAIN
from fusec.gpu.autotune.candidates.step_candidates import Candidate
from fusec.gpu.autotune.plans.plan_selection import PlanSelector
from fusec.gpu.autotune.step_choices import (
    ConcatChoice,
    StepChoice,
    TunedChoices,
    before_choices,
    can_run_as_kernel,
    has_candidates,
    replace_steps,
    step_key,
    with_choices,
)
from fusec.gpu.autotune.steps.concat_choice import (
    TimeSteps,
    concat_choices,
    concats_in_place,
    copy_concats,
    keep_faster_concats,
)
from fusec.gpu.autotune.steps.step_split import join_norms, split_epilogues, split_prologues
from fusec.gpu.autotune.steps.variant_selection import VariantSelector
from fusec.gpu.kernels import GpuFigures, Kernel
from fusec.gpu.launch.kernel_launcher import Launcher
from fusec.gpu.launch.stream_calls import out_of_memory
from fusec.gpu.measure.runs_in_turn import is_faster
from fusec.gpu.measure.timer import Stopwatch
from fusec.ir import Graph
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.passes.partition.concat_in_place import ConcatGroup
from fusec.plans.plan_record import Part
from fusec.schedule.memory_plan import live_bytes
from fusec.schedule.program import Partition, Program
from fusec.system.compile_timer import spent_on
from fusec.system.dataclass import dataclass


class StepSelector:
    """Choices for the steps of a program.

    plans: chooses the plans of cuDNN graphs
    launcher: launches kernels
    named: for the key of a kernel, the key of the variant to run
    variants: chooses the variants of kernels
    tuned: what `tune_steps` chose; None before
    """

    def __init__(self, plans: PlanSelector, launcher: Launcher, named: Mapping[str, str]):
        self.tuned: TunedChoices | None = None
        self._plans, self._cache, self._launcher = plans, plans.cache, launcher
        self._level, self._context = plans.options.level, plans.context
        self.variants = VariantSelector(plans.context, plans.cache, launcher, named)

    @spent_on("candidates are compared")
    def tune_steps(
        self, program: Program, tuning: StepTuning, bind: Bind, as_source: bool = False, prefer_kernels: bool = False
    ) -> Program:
        """Replace each step by its fastest candidate on this GPU, and fuse kernels with their neighbours.

        bind: returns a function that runs a cuDNN graph over memory
        as_source: try nothing that rounds otherwise than the model
        prefer_kernels: run pointwise steps as kernels without timing them
        """
        footprint_bytes = _footprint_bytes(program)
        tuning = replace(tuning, level="none" if as_source else self._level)
        figures, is_timed = tuning.figures, tuning.level != "none"
        timers = Timers(
            lambda graphs, rivals_us: self._plans.times_us(_competing(graphs, tuning), footprint_bytes, rivals_us),
            lambda asked: self.variants.times_us(asked, footprint_bytes),
            self.variants.compile_soon,
            lambda other, best: self._is_faster((other, best), tuning, bind, footprint_bytes),
        )

        def times_us(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
            return step_times_us(graph, steps, tuning, timers)

        def unchanged_us(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
            return step_times_us(graph, steps, replace(tuning, level="none"), replace(timers, compile_soon=None))

        def sequence_us(asked: Sequence[Candidate]) -> Sequence[float]:
            return self._sequence_us(asked, tuning, bind, footprint_bytes)

        concats = concats_in_place(program)
        partitioned = self._with_concats(program, concats, tuning, times_us) if is_timed else program
        concat_choice = concat_choices(concats, partitioned)
        program = before_choices(partitioned, figures, as_source)
        known = self._stored_choices(program, tuning) if is_timed else {}
        if tuning.only is not None:  # kernels of steps without candidates, which are needed in any case
            ready = with_choices(program, known, figures, as_source)
            self.variants.compile_soon({kernel.key: kernel for kernel in kernels_of(ready, figures)})
        if prefer_kernels:
            pointwise = [step for step in program.steps if can_run_as_kernel(step, figures)]
            known |= {step_key(program.graph, step): (Part(len(step.nodes), "kernel"),) for step in pointwise}
        new = choose_steps(program, tuning, timers, known, sequence_us)
        if is_timed:
            self._store_choices(new, concat_choice, tuning)
        chosen = {**known, **new}
        if is_timed:
            for split in (split_epilogues, split_prologues, join_norms):
                chosen |= split(program, chosen, lambda tried: with_choices(program, tried, figures), unchanged_us)
        precisions = precision_times(program, tuning, self._plans.known_us)
        program = with_choices(program, chosen, figures, as_source)
        variants = self._fastest_variants(program, figures, footprint_bytes)
        self.tuned = TunedChoices(partitioned, chosen, variants, concat_choice, precisions=precisions)
        return program

    def time_variants(self, program: Program, figures: GpuFigures) -> None:
        """Time the variants of the kernels that run steps, where neither a name nor the cache says which is fastest."""
        self._fastest_variants(program, figures, _footprint_bytes(program))

    def _fastest_variants(self, program: Program, figures: GpuFigures, footprint_bytes: int) -> dict[str, str]:
        """Return the key of the fastest variant, by the key of the kernel, where variants were timed."""
        found = {k.key: k for k in self.variants.kernels_of(program.steps, figures) if k.others}
        if self._level != "none":
            unknown = {key: k for key, k in found.items() if not self._launcher.is_measured(k)}
            self.variants.times_us(unknown, footprint_bytes)
        return {key: self._launcher.fastest(k).key for key, k in found.items() if self._launcher.is_measured(k)}

    def _with_concats(
        self, program: Program, concats: Mapping[str, Sequence[ConcatGroup]], tuning: StepTuning, times_us: TimeSteps
    ) -> Program:
        """Replace concats in place by copies where those are faster, by the cache or by time."""
        known = {key: self._cache.step_choice(_cache_name(key, tuning), tuning.launch_us) for key in concats}
        if all(choice is not None for choice in known.values()):
            return copy_concats(program, {key for key, choice in known.items() if choice and choice[0].runs == "copy"})
        return keep_faster_concats(program, times_us)

    def _store_choices(
        self, chosen: Mapping[str, StepChoice], concats: Mapping[str, ConcatChoice], tuning: StepTuning
    ) -> None:
        """Store choices, unless the search for a plan was incomplete; then it goes on the next time.

        If only some graphs compete, it never goes on. Nor does it for graphs that lose by far.
        """
        best = [ranked.plans[0][0] for ranked in self._plans.ranked.values() if ranked.plans and not ranked.is_beaten]
        if tuning.only is None and not all(choice.complete for choice in best):
            return
        for key, choice in chosen.items():
            self._cache.store_step_choice(_cache_name(key, tuning), tuning.launch_us, choice)
        for key, concat in concats.items():
            runs = "in place" if concat.in_place else "copy"
            self._cache.store_step_choice(_cache_name(key, tuning), tuning.launch_us, [Part(0, runs)])

    def _stored_choices(self, program: Program, tuning: StepTuning) -> dict[str, StepChoice]:
        """Return the choices that the cache has for a program; none if one of them does not fit."""
        known: dict[str, StepChoice] = {}
        for key in {step_key(program.graph, step) for step in program.steps if has_candidates(step)}:
            choice = self._cache.step_choice(_cache_name(key, tuning), tuning.launch_us)
            if choice is not None:
                known[key] = choice
        try:
            replace_steps(program, known, tuning.figures)
        except ValueError:
            return {}
        return known

    @spent_on("candidates are timed")
    def _sequence_us(
        self, asked: Sequence[Candidate], tuning: StepTuning, bind: Bind, footprint_bytes: int
    ) -> list[float]:
        """Time candidates of several steps as a sequence; infinite where a step fails."""
        graphs = graphs_of(asked, tuning.tensor_cores)
        self._plans.choose(graphs, footprint_bytes)
        times: list[float] = []
        with out_of_memory("timing candidates"), self._context.stream:
            for candidate in asked:
                run = bind_candidate(candidate, tuning.tensor_cores, bind, self._launcher, tuning.figures)
                try:
                    times.append(self._context.stopwatch.median_us(run, footprint_bytes))
                except ExecutionError:
                    times.append(float("inf"))
        return times

    @spent_on("candidates are timed")
    def _is_faster(
        self, pair: tuple[Candidate, Candidate], tuning: StepTuning, bind: Bind, footprint_bytes: int
    ) -> bool:
        """Tell if the first sequence of steps is faster than the second, by times of both in turn."""
        self._plans.choose(graphs_of(pair, tuning.tensor_cores), footprint_bytes)
        memory, timer = RandomMemory(), _SequenceTimer(self._context.stopwatch, footprint_bytes)
        try:
            with out_of_memory("comparing candidates"), self._context.stream:
                given = (tuning.tensor_cores, bind, self._launcher, tuning.figures, memory)
                other, best = (bind_candidate(each, *given) for each in pair)
                return is_faster(other, best, timer, GAIN)
        except ExecutionError:
            return False

    def prefer_variant(self, kernel: Kernel, variant: Kernel) -> bool:
        """Run another variant of a kernel from now on; False if its results differ."""
        if not self.variants.prefer(kernel, variant):
            return False
        if self.tuned is not None:
            self.tuned = replace(self.tuned, variants={**self.tuned.variants, kernel.key: variant.key})
        return True


@dataclass(frozen=True)
class _SequenceTimer:
    """A timer of steps that run as within a model which touches so much memory."""

    stopwatch: Stopwatch
    footprint_bytes: int

    def time_us(self, run: Callable[[], None]) -> float:
        return self.stopwatch.within_us(run, self.footprint_bytes)


def _footprint_bytes(program: Program) -> int:
    """Count the bytes that a program touches: its values, about as many as are alive together, and its constants."""
    constants = sum(v.type.nbytes for v in program.graph.values() if v.literal is not None)
    return live_bytes(program) + constants


def _competing(graphs: Mapping[str, CudnnGraph], tuning: StepTuning) -> dict[str, CudnnGraph]:
    return {key: graph for key, graph in graphs.items() if tuning.only is None or key in tuning.only}


def _cache_name(key: str, tuning: StepTuning) -> str:
    """Return the name of a choice in the cache; one among a file's plans has a name of its own."""
    return key + ("" if tuning.tensor_cores else "\nno tensor cores") + ("" if tuning.only is None else "\nof a file")
