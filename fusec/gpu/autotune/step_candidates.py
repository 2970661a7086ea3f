"""Other forms of a step that compute the same: spelled otherwise, cut in two, or a kernel. Measured times choose.

The partitioner's cost model proposes one form; on a device each competes with what it might have been.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusec.errors import LoweringError
from fusec.gpu import kernels
from fusec.gpu.autotune import fusion_proposals
from fusec.gpu.autotune.step_fusion import grouped
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

Form = tuple[Partition, ...]  # steps that take the place of one, in order
Parts = tuple[Part, ...]  # a form as data
Work = CudnnGraph | Kernel  # what runs a step
Soon = Callable[[Mapping[str, Kernel]], None]
PRODUCTS = (Conv, ConvTranspose, ConvWgrad, MatMul)
# How much longer than the best the steps of a form may take by themselves: what one of them finds in the cache, since
# the one before left it there, it reads faster.
HOPEFUL = 1.5


@dataclass(frozen=True)
class Placed:
    """Whether concats are in place, and of what shapes, for people."""

    shapes: str
    in_place: bool


@dataclass(frozen=True, eq=False)
class Decided:
    """What a device decided of a program as it was `partitioned`: `forms` of cuDNN's steps, by `canonical_of`; `ways`:
    for the key of a kernel, that of the fastest one that does the same; `concats` that were in place, by
    `concat_choice.families`; whether its steps run `side_by_side`."""

    partitioned: Program
    forms: Mapping[str, Parts]
    ways: Mapping[str, str]
    concats: Mapping[str, Placed]
    side_by_side: bool = False


def has_forms(step: Partition) -> bool:
    """Whether a step can take other forms: cuDNN's, and a kernel's that does what cuDNN would do in several steps."""
    return step.kind is Kind.CUDNN or (step.kind is Kind.KERNEL and fusion_proposals.is_union(step.nodes))


def runs_as_kernel(step: Partition) -> bool:
    """Whether a step of cuDNN's is pointwise, and a kernel does the same: that is made for all sizes, where what cuDNN
    compiles for such a step is made for one."""
    flat = step.kind is Kind.CUDNN and all(isinstance(node.op, (Pointwise, Cast)) for node in step.nodes)
    return flat and _kernel_of(step.nodes) is not None


def forms(graph: Graph, step: Partition, level: str) -> list[Form]:
    """Forms of a step worth timing, the one it has first. `none`: that alone; `quick`: as a kernel, or cut in two where
    the fused engines are known to be slow, one part perhaps a kernel; `full`: wherever it can be cut. A kernel that
    does the work of several steps: as these."""
    found: list[Form] = [(step,)]
    if level == "none" or not has_forms(step):
        return found
    if step.kind is Kind.KERNEL:
        return [*found, *_apart(graph, step.nodes, level)]
    found += [(other,) for other in _spelled(graph, step.nodes) if other.spelling != step.spelling]
    found += [(Partition(step.nodes, Kind.CUDNN, body, n),) for n, body in faster_spellings(body_of(graph, step.nodes))]
    found += [(whole,) for whole in _kernel(graph, step.nodes)]
    if level == "full" or _slow_when_fused(step):
        for first, second in _cuts(_products_first(step.nodes)):
            starts, rest = list(_spelled(graph, first)), next(_spelled(graph, second))
            for start in starts if any(isinstance(node.op, MatMul) for node in first) else starts[:1]:
                found.append((start, rest))
                found += [(start, kernel) for kernel in _kernel(graph, second)]
            if _pointwise(first):
                found += [(kernel, rest) for kernel in _kernel(graph, first)]
        found += _each_product(graph, _products_first(step.nodes))
    if isinstance(step.nodes[-1].op, ChannelSums):
        starts = _spelled(graph, step.nodes[:-1])
        found += [(start, kernel) for start in starts for kernel in _kernel(graph, step.nodes[-1:])]
    return found


def lowered(form: Form, tensor_cores: bool) -> list[Work] | None:
    """The cuDNN graphs and kernels of a form; None if one of them cannot be."""
    works: list[Work] = []
    for part in form:
        try:
            work = _kernel_of(part.nodes) if part.kind is Kind.KERNEL else lower(part.body, tensor_cores).graph
        except LoweringError:
            return None
        if work is None:
            return None
        works.append(work)
    return works


def decide(
    program: Program,
    tensor_cores: bool,
    launch_us: float,
    level: str,
    time_us: Callable[[Mapping[str, CudnnGraph]], Mapping[str, float]],
    kernels_us: Callable[[Mapping[str, Kernel]], Mapping[str, float]] = lambda asked: {},
    known: Mapping[str, Parts] | None = None,
    together_us: Callable[[Sequence[Form]], Sequence[float]] | None = None,
    soon: Soon | None = None,
) -> dict[str, Parts]:
    """The fastest form of each of cuDNN's steps, by `canonical_of`; steps that are `known` are left out.

    time_us: microseconds of graphs by key; one that cannot run is left out. kernels_us: those of kernels. together_us:
    those of the steps of forms one behind the other, asked for where they come close. soon: told which kernels will be
    asked for, before graphs are timed. launch_us: what each launch adds. Where no form can run, ops run by themselves,
    with a warning.
    """
    sample: dict[str, Partition] = {}
    for step in program.steps:
        if has_forms(step):
            work = canonical_of(program.graph, step)
            if work not in (known or {}):
                sample.setdefault(work, step)
    options = {work: _offers(program.graph, step, level, tensor_cores) for work, step in sample.items()}
    costs_us = _costs_us(options, launch_us, time_us, kernels_us, soon)
    if together_us is not None:
        close = [
            (work, place)
            for work, costs in costs_us.items()
            for place, cost in enumerate(costs)
            if len(options[work][place][0]) > 1 and cost <= HOPEFUL * min(costs) < float("inf")
        ]
        for (work, place), found in zip(close, together_us([options[w][p][0] for w, p in close]), strict=True):
            costs_us[work][place] = found + launch_us
    decided: dict[str, Parts] = {}
    for work, made in options.items():
        step, costs = sample[work], costs_us[work]
        least_us = min(costs, default=0.0)
        if least_us == float("inf"):
            warnings.warn(f"no plan of {step.signature} runs on this GPU: its ops run one by one", stacklevel=3)
            decided[work] = (Part(len(step.nodes), "ops"),)
        else:
            form = made[costs.index(least_us)][0] if made else (step,)
            decided[work] = tuple(Part(len(part.nodes), part.kind.value, part.spelling) for part in form)
    return decided


def arrange(program: Program, decided: Mapping[str, Parts], as_source: bool = False) -> Program:
    """The program as it runs on a device: its steps in these forms, and kernels joined with what is beside them, before
    and after; not `as_source`, since joining would round otherwise. ValueError if a form does not fit."""
    if as_source:
        return arranged(program, decided)
    return grouped(arranged(grouped(program, products=True), decided))


def prices_us(
    graph: Graph,
    steps: Sequence[Partition],
    tensor_cores: bool,
    launch_us: float,
    level: str,
    time_us: Callable[[Mapping[str, CudnnGraph]], Mapping[str, float]],
    kernels_us: Callable[[Mapping[str, Kernel]], Mapping[str, float]],
    soon: Soon | None = None,
) -> list[float]:
    """What each step takes in its fastest form, kernels of fusec's among them; infinite for what has none."""
    options: dict[str, list[tuple[Form, list[Work]]]] = {}
    for number, step in enumerate(steps):
        if has_forms(step):
            options[str(number)] = _offers(graph, step, level, tensor_cores)
        else:
            kernel = _kernel_of(step.nodes)
            options[str(number)] = [] if kernel is None else [((step,), [kernel])]
    costs = _costs_us(options, launch_us, time_us, kernels_us, soon)
    return [min(costs[str(number)], default=float("inf")) for number in range(len(steps))]


def _offers(graph: Graph, step: Partition, level: str, tensor_cores: bool) -> list[tuple[Form, list[Work]]]:
    """The forms of a step that can be had, and what runs them."""
    found = ((form, lowered(form, tensor_cores)) for form in forms(graph, step, level))
    return [(form, works) for form, works in found if works is not None]


def _costs_us(
    options: Mapping[str, Sequence[tuple[Form, Sequence[Work]]]],
    launch_us: float,
    time_us: Callable[[Mapping[str, CudnnGraph]], Mapping[str, float]],
    kernels_us: Callable[[Mapping[str, Kernel]], Mapping[str, float]],
    soon: Soon | None,
) -> dict[str, list[float]]:
    """What each form takes, its launches included."""
    works = [work for made in options.values() for _, each in made for work in each]
    graphs = {work.key: work for work in works if isinstance(work, CudnnGraph)}
    found = {work.key: work for work in works if isinstance(work, Kernel)}
    if soon is not None:
        soon(found)
    times = {**time_us(graphs), **kernels_us(found)}

    def cost_us(each: Sequence[Work]) -> float:
        return sum(times.get(work.key, float("inf")) + launch_us for work in each)

    return {name: [cost_us(each) for _, each in made] for name, made in options.items()}


def arranged(program: Program, decided: Mapping[str, Parts]) -> Program:
    """The program with steps in these forms, by `canonical_of`; the others stay. ValueError if a form does not fit."""
    steps: list[Partition] = []
    for step in program.steps:
        parts = decided.get(canonical_of(program.graph, step)) if has_forms(step) else None
        steps += (step,) if parts is None else parts_of(program.graph, step, parts)
    rewritten = Program(program.graph, tuple(steps), program.refusals)
    rewritten.verify()
    return rewritten


def canonical_of(graph: Graph, step: Partition) -> str:
    """What a step computes, in whatever form: equal for equal work."""
    return canonical_key(body_of(graph, step.nodes) if step.spelling else step.body)


def parts_of(graph: Graph, step: Partition, parts: Parts) -> Iterator[Partition]:
    """The steps that take the place of one of cuDNN's in a form; ops that run each by itself are a step each.
    ValueError if it does not fit."""
    if len(parts) == 1 and (parts[0].runs, parts[0].spelling) == (step.kind.value, step.spelling):
        yield step
        return
    start, ordered = 0, _products_first(step.nodes)
    for place, part in enumerate(parts, 1):
        end = start + part.nodes if part.nodes else len(step.nodes)
        nodes = step.nodes if end - start == len(step.nodes) else ordered[start:end]
        if not nodes or end > len(step.nodes) or (place == len(parts) and end < len(step.nodes)):
            raise ValueError(f"a form of {' + '.join(str(p.nodes) for p in parts)} ops does not fit {step.signature}")
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
    """Several products, each with what it needs of the step, before what is done with them all."""
    products = [node for node in nodes if isinstance(node.op, PRODUCTS)]
    if len(products) < 2:
        return tuple(nodes)
    wanted, inside = set(products), set(nodes)
    for node in reversed(nodes):
        if node in wanted:
            wanted.update(v.node for v in node.operands if v.node is not None and v.node in inside)
    return (*(node for node in nodes if node in wanted), *(node for node in nodes if node not in wanted))


def _each_product(graph: Graph, nodes: Sequence[Node]) -> Iterator[Form]:
    """Two products one behind the other, in the same spelling, and a kernel that does the rest."""
    rest = nodes[2:]
    if not rest or not all(isinstance(node.op, PRODUCTS) for node in nodes[:2]) or not _pointwise(rest):
        return
    for kernel in _kernel(graph, rest):
        for first, second in zip(_spelled(graph, nodes[:1]), _spelled(graph, nodes[1:2]), strict=False):
            yield (first, second, kernel)


def _apart(graph: Graph, nodes: Sequence[Node], level: str) -> Iterator[Form]:
    """What a kernel does that stands for several steps, in these: pointwise ops and the product behind; a depthwise
    convolution and the mean behind it, cut in two, and the chain behind that; each product of a chain."""
    products = [i for i, node in enumerate(nodes) if isinstance(node.op, PRODUCTS)]
    if len(products) == 1 and products[0]:
        cut = products[0]
        for first in _alone(graph, nodes[:cut]):
            yield from ((first, *rest) for rest in forms(graph, next(_spelled(graph, nodes[cut:])), level))
        return
    at = next((i + 1 for i, node in enumerate(nodes) if isinstance(node.op, Reduce)), 0)
    begin, chain = nodes[:at], nodes[at:]
    if begin:
        # cuDNN's depthwise engines are known to be slow with anything fused, and its small products mostly
        # launches: neither is timed
        first = [(a, b) for a in _alone(graph, begin[:1]) for b in _kernel(graph, begin[1:])]
        second = [(a, b) for a in _kernel(graph, begin[:-1]) for b in _kernel(graph, begin[-1:])]
        ends: list[Form] = [(kernel,) for kernel in _kernel(graph, chain)] if chain else [()]
        yield from ((*head, *end) for head in (*first, *(second if at > 2 else ())) for end in ends)
        return
    found: list[Form] = [()]
    for number, (start, end) in enumerate(zip(products, [*products[1:], len(chain)], strict=True)):
        low, cut = start if number else 0, start + 1
        parts: list[Form] = [(step,) for step in _alone(graph, chain[low:end])]
        if cut < end:
            parts += [(a, b) for a in _alone(graph, chain[low:cut]) for b in _kernel(graph, chain[cut:end])]
        found = [(*form, *part) for form in found for part in parts]
    yield from found


def _alone(graph: Graph, nodes: Sequence[Node]) -> Iterator[Partition]:
    """A product with what is behind it as one step: of cuDNN's, or a kernel."""
    yield next(_spelled(graph, nodes))
    yield from _kernel(graph, nodes)


def _kernel(graph: Graph, nodes: Sequence[Node]) -> Iterator[Partition]:
    """The nodes as one kernel, if there is one for them."""
    if _kernel_of(nodes) is not None:
        yield Partition(tuple(nodes), Kind.KERNEL, body_of(graph, nodes))


def _kernel_of(nodes: Sequence[Node]) -> Kernel | None:
    return kernels.find(nodes, outputs_of(nodes))


def _spelled(graph: Graph, nodes: Sequence[Node]) -> Iterator[Partition]:
    """The nodes as a step in each of their spellings."""
    for names, body in spellings(body_of(graph, nodes)):
        yield Partition(tuple(nodes), Kind.CUDNN, body, names)


def _slow_when_fused(step: Partition) -> bool:
    depthwise = any(is_depthwise(node) for node in step.nodes)
    return depthwise or (step.verdict is not None and not is_fast(step.verdict))


def _cuts(nodes: tuple[Node, ...]) -> Iterator[tuple[tuple[Node, ...], tuple[Node, ...]]]:
    """Between two products; or in front of the only one, behind it, and behind a first add (a bias or residual, which
    engines take best), if what is cut off is pointwise. A step is convex and in graph order, so any beginning of it is
    a step, too."""
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
