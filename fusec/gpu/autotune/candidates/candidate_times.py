"""Choose between cuDNN, cuBLASLt and kernels: time the candidates of each step, and take the fastest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

from fusec.errors import LoweringError
from fusec.gpu import kernels
from fusec.gpu.autotune.candidates.neighbour_times import Faster, Timed, decide
from fusec.gpu.autotune.candidates.step_candidates import Candidate, candidates
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.gpu.autotune.plans.plan_search import RivalTimes
from fusec.gpu.autotune.step_choices import (
    PrecisionTimes,
    StepChoice,
    has_candidates,
    kernel_of,
    part_of_step,
    replace_steps,
    step_key,
)
from fusec.gpu.kernels import GpuFigures, Kernel
from fusec.gpu.known_faster_kernels import is_known_faster
from fusec.ir import DType, Graph
from fusec.lower_cudnn import lower
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.passes.partition.equivalent_spellings import IN_HALVES
from fusec.plans.plan_record import Part
from fusec.schedule.program import Kind, Partition, Program
from fusec.system.dataclass import dataclass

Runnable = CudnnGraph | Kernel  # the code that runs a step
Offers = Mapping[str, Sequence[tuple[Candidate, Sequence[Runnable]]]]  # candidates of steps, with their code
# A candidate of several steps is timed again as a sequence if the sum of its times is at most this many times the best,
# because a step may find in the L2 cache what the step before it wrote.
NEAR_BEST = 1.5


@dataclass(frozen=True)
class StepTuning:
    """Settings for choosing steps: precision of products, cost of a launch, tuning level, and figures of the GPU.

    only: the keys of the cuDNN graphs that compete; None: all
    """

    tensor_cores: bool
    launch_us: float
    level: str
    figures: GpuFigures
    only: frozenset[str] | None = None


@dataclass(frozen=True)
class Timers:
    """Functions that time cuDNN graphs and kernels, by key, in microseconds.

    graphs_us: leaves out a graph that cannot run; the function it takes returns the times of rivals (`rank_plans`)
    compile_soon: receives the kernels before graphs are timed, so that they are compiled meanwhile
    is_faster: compares two sequences of steps; asked for candidates between the steps around them
    """

    graphs_us: Callable[[Mapping[str, CudnnGraph], RivalTimes], Mapping[str, float]]
    kernels_us: Callable[[Mapping[str, Kernel]], Mapping[str, float]] = lambda asked: {}
    compile_soon: Callable[[Mapping[str, Kernel]], None] | None = None
    is_faster: Faster | None = None


def choose_steps(
    program: Program,
    tuning: StepTuning,
    timers: Timers,
    known: Mapping[str, StepChoice] | None = None,
    sequence_us: Callable[[Sequence[Candidate]], Sequence[float]] | None = None,
) -> dict[str, StepChoice]:
    """Choose the fastest candidate of each step, by `step_key`.

    known: choices already made; their steps are left out
    sequence_us: times the steps of a candidate one after the other; asked for candidates near the best

    Warns about a step without any candidate that runs. Its ops then run one by one.
    """
    sample = {key: step for key, step in _distinct_steps(program).items() if key not in (known or {})}
    offers = {key: _offers(program.graph, step, tuning) for key, step in sample.items()}
    costs_us = _costs_us(offers, tuning, timers)
    if sequence_us is not None:
        near = [
            (key, place)
            for key, costs in costs_us.items()
            for place, cost in enumerate(costs)
            if len(offers[key][place][0]) > 1 and cost <= NEAR_BEST * min(costs) < float("inf")
        ]
        for (key, place), found_us in zip(near, sequence_us([offers[k][p][0] for k, p in near]), strict=True):
            costs_us[key][place] = found_us + tuning.launch_us
    chosen: dict[str, StepChoice] = {}
    for key, offered in offers.items():
        step, costs = sample[key], costs_us[key]
        least_us = min(costs, default=0.0)
        if least_us == float("inf"):
            warnings.warn(f"no plan of {step.signature} runs on this GPU: its ops run one by one", stacklevel=3)
            chosen[key] = (Part(len(step.nodes), "ops"),)
        else:
            candidate = offered[costs.index(least_us)][0] if offered else (step,)
            chosen[key] = tuple(map(part_of_step, candidate))
    if timers.is_faster is None:
        return chosen
    keys = [step_key(program.graph, step) if has_candidates(step) else None for step in program.steps]
    timed = {
        key: Timed([tuple(map(part_of_step, c)) for c, _ in offers[key]], costs, keys.count(key))
        for key, costs in costs_us.items()
        if min(costs, default=float("inf")) < float("inf")
    }
    return chosen | decide(program, keys, timed, {**(known or {}), **chosen}, tuning.figures, timers.is_faster)


def candidate_graphs(program: Program, tuning: StepTuning) -> dict[str, CudnnGraph]:
    """List the cuDNN graphs that the candidates of steps run, by key."""
    code = [_offers(program.graph, step, tuning) for step in _distinct_steps(program).values()]
    every = (each for offered in code for _, parts in offered for each in parts)
    return {each.key: each for each in every if isinstance(each, CudnnGraph)}


def candidate_kernels(program: Program, tuning: StepTuning) -> dict[str, Kernel]:
    """List the kernels that a GPU may time to choose what runs each step, by key, and those of other steps.

    program: as `step_choices.before_choices` returns it
    """
    offered = {key: _offers(program.graph, step, tuning) for key, step in _distinct_steps(program).items()}
    every = [each for offers in offered.values() for _, code in offers for each in code if isinstance(each, Kernel)]
    for runs in ("cudnn", "kernel"):  # kernels of other steps are fused with their neighbours, if a kernel runs these
        chosen = {
            key: tuple(map(part_of_step, candidate))
            for key, offers in offered.items()
            for candidate, _ in offers
            if all(step.kind.value == runs for step in candidate)
        }
        every += kernels_of(fuse_steps(replace_steps(program, chosen, tuning.figures), tuning.figures), tuning.figures)
    return {each.key: each for each in every}


def kernels_of(program: Program, figures: GpuFigures) -> list[Kernel]:
    """List the kernels that run steps of a program."""
    return [
        found
        for step in program.steps
        if step.kind is Kind.KERNEL and (found := kernels.find(step.nodes, step.outputs, figures)) is not None
    ]


def _distinct_steps(program: Program) -> dict[str, Partition]:
    """Return one of the steps that have candidates and compute the same, by `step_key`."""
    found: dict[str, Partition] = {}
    for step in program.steps:
        if has_candidates(step):
            found.setdefault(step_key(program.graph, step), step)
    return found


def precision_times(
    program: Program, tuning: StepTuning, known_us: Callable[[CudnnGraph], float | None]
) -> dict[str, PrecisionTimes]:
    """List the times of products of 8-bit integers as such and in fp16, by `step_key`, where both are known.

    known_us: returns the time of a graph; None if it was not timed
    """
    found: dict[str, PrecisionTimes] = {}
    for step in program.steps:
        if step.kind is not Kind.CUDNN or not any(v.type.dtype is DType.I8 for n in step.nodes for v in n.operands):
            continue
        times: dict[bool, float] = {}
        for candidate, code in _offers(program.graph, step, tuning):
            time_us = known_us(code[0]) if len(code) == 1 and isinstance(code[0], CudnnGraph) else None
            if time_us is not None:
                halves = IN_HALVES in candidate[0].spelling
                times[halves] = min(time_us, times.get(halves, time_us))
        if len(times) == 2:
            found[step_key(program.graph, step)] = PrecisionTimes(times[False], times[True])
    return found


def step_times_us(graph: Graph, steps: Sequence[Partition], tuning: StepTuning, timers: Timers) -> list[float]:
    """Time each step as its fastest candidate, kernels included; infinite for a step that nothing runs.

    graph: graph of the steps.
    tuning: the level, and what candidates depend on.
    timers: time plans and kernels.
    """
    offers: dict[str, list[tuple[Candidate, list[Runnable]]]] = {}
    for number, step in enumerate(steps):
        if has_candidates(step):
            offers[str(number)] = _offers(graph, step, tuning)
        else:
            kernel = kernel_of(step.nodes, tuning.figures)
            offers[str(number)] = [] if kernel is None else [((step,), [kernel])]
    costs = _costs_us(offers, tuning, timers)
    return [min(costs[str(number)], default=float("inf")) for number in range(len(steps))]


def _offers(graph: Graph, step: Partition, tuning: StepTuning) -> list[tuple[Candidate, list[Runnable]]]:
    """List the candidates of a step that have code to run them."""
    offered = candidates(graph, step, tuning.level, tuning.figures)
    found = ((each, runnables(each, tuning.tensor_cores, tuning.figures)) for each in offered)
    return [(candidate, code) for candidate, code in found if code is not None]


def _costs_us(offers: Offers, tuning: StepTuning, timers: Timers) -> dict[str, list[float]]:
    """Time each candidate, with its launches.

    Kernels are timed when each graph has a first plan, so that no time goes to the other plans of graphs that lose.
    """
    code = {name: [each for _, each in offered] for name, offered in offers.items()}
    every = [each for sequences in code.values() for sequence in sequences for each in sequence]
    graphs = {each.key: each for each in every if isinstance(each, CudnnGraph)}
    found = {each.key: each for each in every if isinstance(each, Kernel)}
    if timers.compile_soon is not None:
        timers.compile_soon(found)
    times_us: dict[str, float] = {}

    def time_kernels() -> None:
        unknown = {key: kernel for key, kernel in found.items() if key not in times_us}
        times_us.update(timers.kernels_us(unknown) if unknown else {})

    def rivals_us(first_us: Mapping[str, float]) -> Mapping[str, float]:
        time_kernels()
        return _rivals_us(code.values(), {**first_us, **times_us}, tuning.launch_us)

    losing = _losing(offers, tuning)
    times_us.update(timers.graphs_us({key: graph for key, graph in graphs.items() if key not in losing}, rivals_us))
    time_kernels()
    losing = {key for key in losing if _rivals_us(code.values(), times_us, 0.0)[key] == float("inf")}
    if losing:  # a kernel does not run after all
        times_us.update(timers.graphs_us({key: graphs[key] for key in losing}, rivals_us))
    return {name: [_cost_us(each, times_us, tuning.launch_us) for each in some] for name, some in code.items()}


def _losing(offers: Offers, tuning: StepTuning) -> set[str]:
    """Return the keys of graphs of which no plan is built, because kernels are known to run all their steps faster."""
    if tuning.level != "quick":
        return set()
    losing, others = set[str](), set[str]()
    for offered in offers.values():
        is_beaten = any(_is_known_faster(candidate, tuning.figures) for candidate, _ in offered)
        found = {each.key for _, code in offered for each in code if isinstance(each, CudnnGraph)}
        (losing if is_beaten else others).update(found)
    return losing - others


def _is_known_faster(candidate: Candidate, figures: GpuFigures) -> bool:
    """Tell if a candidate is one kernel that is known to be faster than cuDNN."""
    return len(candidate) == 1 and candidate[0].kind is Kind.KERNEL and is_known_faster(candidate[0].nodes, figures)


def _cost_us(code: Sequence[Runnable], times_us: Mapping[str, float], launch_us: float) -> float:
    return sum(times_us.get(each.key, float("inf")) + launch_us for each in code)


def _rivals_us(
    steps: Iterable[Sequence[Sequence[Runnable]]], times_us: Mapping[str, float], launch_us: float
) -> dict[str, float]:
    """Return for each graph the time of the fastest candidate without it, in the step where that is slowest.

    steps: the code of each candidate, for each step
    """
    rivals: dict[str, float] = {}
    for every in steps:
        costs_us = [_cost_us(code, times_us, launch_us) for code in every]
        for key in {each.key for code in every for each in code if isinstance(each, CudnnGraph)}:
            pairs = zip(costs_us, every, strict=True)
            least_us = min((us for us, code in pairs if all(each.key != key for each in code)), default=float("inf"))
            rivals[key] = max(rivals.get(key, 0.0), least_us - launch_us)
    return rivals


def runnables(candidate: Candidate, tensor_cores: bool, figures: GpuFigures) -> list[Runnable] | None:
    """Return the cuDNN graph or kernel of each step of a candidate; None if one step has neither."""
    found: list[Runnable] = []
    for step in candidate:
        if step.kind is Kind.VIEW:
            continue
        try:
            is_kernel = step.kind is Kind.KERNEL
            code = kernel_of(step.nodes, figures) if is_kernel else lower(step.body, tensor_cores).graph
        except LoweringError:
            return None
        if code is None:
            return None
        found.append(code)
    return found
