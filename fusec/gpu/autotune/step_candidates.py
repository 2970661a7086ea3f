"""Enumerate candidates for a step, choose the fastest by time, and apply the choices to a program.

The partitioner's cost model proposes one way to run a step. On a GPU other ways compete with it: another spelling of
the cuDNN graph, a kernel, or two smaller steps. All of them compute the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusec.errors import LoweringError
from fusec.gpu import kernels
from fusec.gpu.autotune import fusion_proposals
from fusec.gpu.autotune.step_fusion import fuse_steps
from fusec.gpu.kernels import Kernel
from fusec.ir import Graph, Node
from fusec.lower_cudnn import lower
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.ops import Cast, ChannelSums, Conv, ConvTranspose, ConvWgrad, MatMul, Pointwise, Reduce
from fusec.passes.partition.cost_model import is_depthwise, is_fast
from fusec.passes.partition.equivalent_spellings import faster_spellings, spelled, spellings
from fusec.passes.partition.verdict_cache import canonical_key
from fusec.plans.plan_record import Part
from fusec.schedule.aliasing import is_view
from fusec.schedule.program import Kind, Partition, Program, alone, body_of, display_name, outputs_of

Candidate = tuple[Partition, ...]  # steps that replace one step, in order
StepChoice = tuple[Part, ...]  # the candidate taken, as data
Runnable = CudnnGraph | Kernel  # the code that runs a step
PRODUCTS = (Conv, ConvTranspose, ConvWgrad, MatMul)
# A candidate of several steps is timed again as a sequence if the sum of its times is at most this many times the best,
# because a step may find in the L2 cache what the step before it wrote.
NEAR_BEST = 1.5


@dataclass(frozen=True)
class ConcatChoice:
    """Choice for the concats of one group, with their shapes for reports."""

    shapes: str
    in_place: bool


@dataclass(frozen=True, eq=False)
class TunedChoices:
    """Choices that a GPU made for a program.

    partitioned: the program before the choices were applied
    steps: the choice of each step, by `step_key`
    variants: for the key of a kernel, the key of its fastest variant
    concats: the choices for concats that the partitioner put in place, by `concat_choice.concats_in_place`
    side_by_side: steps run on several streams
    """

    partitioned: Program
    steps: Mapping[str, StepChoice]
    variants: Mapping[str, str]
    concats: Mapping[str, ConcatChoice]
    side_by_side: bool = False


@dataclass(frozen=True)
class StepTuning:
    """Settings for choosing steps: the precision of products, the cost of a launch, and the tuning level."""

    tensor_cores: bool
    launch_us: float
    level: str


@dataclass(frozen=True)
class Timers:
    """Functions that time cuDNN graphs and kernels, by key, in microseconds.

    graphs_us leaves out a graph that cannot run. compile_soon is told the kernels before graphs are timed, so that
    other processes can compile them meanwhile.
    """

    graphs_us: Callable[[Mapping[str, CudnnGraph]], Mapping[str, float]]
    kernels_us: Callable[[Mapping[str, Kernel]], Mapping[str, float]] = lambda asked: {}
    compile_soon: Callable[[Mapping[str, Kernel]], None] | None = None


def has_candidates(step: Partition) -> bool:
    """Return True if a step may run otherwise: a cuDNN step, or a kernel that cuDNN could replace by several steps."""
    return step.kind is Kind.CUDNN or (step.kind is Kind.KERNEL and fusion_proposals.is_joint_work(step.nodes))


def can_run_as_kernel(step: Partition) -> bool:
    """Return True for a pointwise cuDNN step that a kernel can run.

    Such a kernel serves every input shape. cuDNN would compile the step for each shape again.
    """
    pointwise = step.kind is Kind.CUDNN and all(isinstance(node.op, (Pointwise, Cast)) for node in step.nodes)
    return pointwise and _kernel_of(step.nodes) is not None


def candidates(graph: Graph, step: Partition, level: str) -> list[Candidate]:
    """List the candidates of a step that are worth timing; the step as it is comes first.

    Level `none` adds nothing. Level `quick` adds spellings, a kernel, and, where fused engines are known to be slow,
    splits into two steps. Level `full` adds every split.
    """
    found: list[Candidate] = [(step,)]
    if level == "none" or not has_candidates(step):
        return found
    if step.kind is Kind.KERNEL:
        return [*found, *_unfused(graph, step.nodes, level)]
    found += [(other,) for other in _spelled(graph, step.nodes) if other.spelling != step.spelling]
    found += [(Partition(step.nodes, Kind.CUDNN, body, n),) for n, body in faster_spellings(body_of(graph, step.nodes))]
    found += [(whole,) for whole in _kernel(graph, step.nodes)]
    if level == "full" or _slow_when_fused(step):
        for first, second in _splits(_products_first(step.nodes)):
            starts, rest = list(_spelled(graph, first)), next(_spelled(graph, second))
            for start in starts if any(isinstance(node.op, MatMul) for node in first) else starts[:1]:
                found.append((start, rest))
                found += [(start, kernel) for kernel in _kernel(graph, second)]
            if _pointwise(first):
                found += [(kernel, rest) for kernel in _kernel(graph, first)]
        found += _two_products(graph, _products_first(step.nodes))
    if isinstance(step.nodes[-1].op, ChannelSums):
        starts = _spelled(graph, step.nodes[:-1])
        found += [(start, kernel) for start in starts for kernel in _kernel(graph, step.nodes[-1:])]
    return found


def runnables(candidate: Candidate, tensor_cores: bool) -> list[Runnable] | None:
    """Return the cuDNN graph or kernel of each step of a candidate; None if one step has neither."""
    found: list[Runnable] = []
    for step in candidate:
        try:
            code = _kernel_of(step.nodes) if step.kind is Kind.KERNEL else lower(step.body, tensor_cores).graph
        except LoweringError:
            return None
        if code is None:
            return None
        found.append(code)
    return found


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
    sample: dict[str, Partition] = {}
    for step in program.steps:
        if has_candidates(step):
            key = step_key(program.graph, step)
            if key not in (known or {}):
                sample.setdefault(key, step)
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
            chosen[key] = tuple(Part(len(each.nodes), each.kind.value, each.spelling) for each in candidate)
    return chosen


def apply_choices(program: Program, chosen: Mapping[str, StepChoice], as_source: bool = False) -> Program:
    """Return the program as it runs on a GPU: steps replaced by their choices, and kernels fused with their neighbours.

    as_source: fuse nothing, because fusing would round otherwise than the model does

    Raises ValueError when a choice does not fit its step.
    """
    if as_source:
        return replace_steps(program, chosen)
    return fuse_steps(replace_steps(fuse_steps(program, products=True), chosen))


def step_times_us(graph: Graph, steps: Sequence[Partition], tuning: StepTuning, timers: Timers) -> list[float]:
    """Time each step as its fastest candidate, kernels included; infinite for a step that nothing runs."""
    offers: dict[str, list[tuple[Candidate, list[Runnable]]]] = {}
    for number, step in enumerate(steps):
        if has_candidates(step):
            offers[str(number)] = _offers(graph, step, tuning)
        else:
            kernel = _kernel_of(step.nodes)
            offers[str(number)] = [] if kernel is None else [((step,), [kernel])]
    costs = _costs_us(offers, tuning, timers)
    return [min(costs[str(number)], default=float("inf")) for number in range(len(steps))]


def _offers(graph: Graph, step: Partition, tuning: StepTuning) -> list[tuple[Candidate, list[Runnable]]]:
    """List the candidates of a step that have code to run them."""
    found = ((each, runnables(each, tuning.tensor_cores)) for each in candidates(graph, step, tuning.level))
    return [(candidate, code) for candidate, code in found if code is not None]


def _costs_us(
    offers: Mapping[str, Sequence[tuple[Candidate, Sequence[Runnable]]]], tuning: StepTuning, timers: Timers
) -> dict[str, list[float]]:
    """Time each candidate, with its launches."""
    every = [each for offered in offers.values() for _, code in offered for each in code]
    graphs = {each.key: each for each in every if isinstance(each, CudnnGraph)}
    found = {each.key: each for each in every if isinstance(each, Kernel)}
    if timers.compile_soon is not None:
        timers.compile_soon(found)
    times_us = {**timers.graphs_us(graphs), **timers.kernels_us(found)}

    def cost_us(code: Sequence[Runnable]) -> float:
        return sum(times_us.get(each.key, float("inf")) + tuning.launch_us for each in code)

    return {name: [cost_us(code) for _, code in offered] for name, offered in offers.items()}


def replace_steps(program: Program, chosen: Mapping[str, StepChoice]) -> Program:
    """Replace steps by their choices, by `step_key`; other steps stay.

    Raises ValueError when a choice does not fit its step.
    """
    steps: list[Partition] = []
    for step in program.steps:
        choice = chosen.get(step_key(program.graph, step)) if has_candidates(step) else None
        steps += (step,) if choice is None else steps_of_choice(program.graph, step, choice)
    rewritten = Program(program.graph, tuple(steps), program.refusals)
    rewritten.verify()
    return rewritten


def step_key(graph: Graph, step: Partition) -> str:
    """Return a text that is equal for steps that compute the same, however they run."""
    return canonical_key(body_of(graph, step.nodes) if step.spelling else step.body)


def steps_of_choice(graph: Graph, step: Partition, choice: StepChoice) -> Iterator[Partition]:
    """Yield the steps that replace a step; ops that run one by one are a step each.

    Raises ValueError when the choice does not fit the step.
    """
    if len(choice) == 1 and (choice[0].runs, choice[0].spelling) == (step.kind.value, step.spelling):
        yield step
        return
    start, ordered = 0, _products_first(step.nodes)
    for place, part in enumerate(choice, 1):
        end = start + part.nodes if part.nodes else len(step.nodes)
        nodes = step.nodes if end - start == len(step.nodes) else ordered[start:end]
        if not nodes or end > len(step.nodes) or (place == len(choice) and end < len(step.nodes)):
            counts = " + ".join(str(p.nodes) for p in choice)
            raise ValueError(f"a choice of {counts} ops does not fit {step.signature}")
        start = end
        if part.runs in ("in place", "copy"):
            raise ValueError(f"{step.signature} is no concat")
        if part.runs == "ops":
            yield from (alone(graph, node) for node in nodes)
            continue
        body = body_of(graph, nodes)
        names = " ".join(display_name(node) for node in nodes)
        if part.runs == "kernel":
            if _kernel_of(nodes) is None:
                raise ValueError(f"no kernel runs {names}")
            yield Partition(nodes, Kind.KERNEL, body)
            continue
        for name in part.spelling:
            changed = spelled(body, name)
            if changed is None:
                raise ValueError(f"spelling {name} does not apply to {names}")
            body = changed
        yield Partition(nodes, Kind.CUDNN, body, part.spelling)


def _products_first(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Order nodes so that several products, each with the ops it needs, come before the ops that join them."""
    products = [node for node in nodes if isinstance(node.op, PRODUCTS)]
    if len(products) < 2:
        return tuple(nodes)
    wanted, inside = set(products), set(nodes)
    for node in reversed(nodes):
        if node in wanted:
            wanted.update(v.node for v in node.operands if v.node is not None and v.node in inside)
    return (*(node for node in nodes if node in wanted), *(node for node in nodes if node not in wanted))


def _two_products(graph: Graph, nodes: Sequence[Node]) -> Iterator[Candidate]:
    """Yield two products as steps of their own, in the same spelling, and a kernel for the rest."""
    rest = nodes[2:]
    if not rest or not all(isinstance(node.op, PRODUCTS) for node in nodes[:2]) or not _pointwise(rest):
        return
    for kernel in _kernel(graph, rest):
        for first, second in zip(_spelled(graph, nodes[:1]), _spelled(graph, nodes[1:2]), strict=False):
            yield (first, second, kernel)


def _unfused(graph: Graph, nodes: Sequence[Node], level: str) -> Iterator[Candidate]:
    """Yield sequences of smaller steps for a kernel that runs several steps.

    Such a kernel runs pointwise ops and a product, or a depthwise convolution with a mean and perhaps more products,
    or a sequence of small products.
    """
    products = [i for i, node in enumerate(nodes) if isinstance(node.op, PRODUCTS)]
    if len(products) == 1 and products[0]:
        at = products[0]
        for first in _as_one_step(graph, nodes[:at]):
            yield from ((first, *rest) for rest in candidates(graph, next(_spelled(graph, nodes[at:])), level))
        return
    at = next((i + 1 for i, node in enumerate(nodes) if isinstance(node.op, Reduce)), 0)
    begin, tail = nodes[:at], nodes[at:]
    if begin:
        # Neither cuDNN's fused depthwise engines nor its small products are timed, because the first are known to be
        # slow, and the second are mostly launch time.
        first = [(a, b) for a in _as_one_step(graph, begin[:1]) for b in _kernel(graph, begin[1:])]
        second = [(a, b) for a in _kernel(graph, begin[:-1]) for b in _kernel(graph, begin[-1:])]
        ends: list[Candidate] = [(kernel,) for kernel in _kernel(graph, tail)] if tail else [()]
        yield from ((*start, *end) for start in (*first, *(second if at > 2 else ())) for end in ends)
        return
    found: list[Candidate] = [()]
    for number, (start, end) in enumerate(zip(products, [*products[1:], len(tail)], strict=True)):
        low, high = start if number else 0, start + 1
        options: list[Candidate] = [(step,) for step in _as_one_step(graph, tail[low:end])]
        if high < end:
            options += [(a, b) for a in _as_one_step(graph, tail[low:high]) for b in _kernel(graph, tail[high:end])]
        found = [(*steps, *more) for steps in found for more in options]
    yield from found


def _as_one_step(graph: Graph, nodes: Sequence[Node]) -> Iterator[Partition]:
    """Yield the nodes as one cuDNN step, then as one kernel."""
    yield next(_spelled(graph, nodes))
    yield from _kernel(graph, nodes)


def _kernel(graph: Graph, nodes: Sequence[Node]) -> Iterator[Partition]:
    """Yield the nodes as one kernel, if one runs them."""
    if _kernel_of(nodes) is not None:
        yield Partition(tuple(nodes), Kind.KERNEL, body_of(graph, nodes))


def _kernel_of(nodes: Sequence[Node]) -> Kernel | None:
    return kernels.find(nodes, outputs_of(nodes))


def _spelled(graph: Graph, nodes: Sequence[Node]) -> Iterator[Partition]:
    """Yield the nodes as a cuDNN step in each of their spellings."""
    for names, body in spellings(body_of(graph, nodes)):
        yield Partition(tuple(nodes), Kind.CUDNN, body, names)


def _slow_when_fused(step: Partition) -> bool:
    depthwise = any(is_depthwise(node) for node in step.nodes)
    return depthwise or (step.verdict is not None and not is_fast(step.verdict))


def _splits(nodes: tuple[Node, ...]) -> Iterator[tuple[tuple[Node, ...], tuple[Node, ...]]]:
    """Yield the splits of a step in two that are worth timing.

    A step with two products is split between them. Otherwise pointwise ops are split off before the product, after it,
    or after the first add after it, because engines run a bias or residual best. Any beginning of a step is a step,
    since a step is convex and in graph order.
    """
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, PRODUCTS)), None)
    if at is None:
        return
    second = next((i for i, node in enumerate(nodes[at + 1 :], at + 1) if isinstance(node.op, PRODUCTS)), None)
    if second is not None:
        yield nodes[:second], nodes[second:]
        return
    if at and _pointwise(nodes[:at]):
        yield nodes[:at], nodes[at:]
    places = [at + 1]
    if at + 1 < len(nodes) and nodes[at + 1].op.name == "add":
        places.append(at + 2)
    for place in places:
        if nodes[place:] and _pointwise(nodes[place:]):
            yield nodes[:place], nodes[place:]


def _pointwise(nodes: Sequence[Node]) -> bool:
    return all(isinstance(node.op, Pointwise) and not is_view(node) for node in nodes)
