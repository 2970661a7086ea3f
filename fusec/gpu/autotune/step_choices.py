"""Record which candidate runs each step of a program, and apply these choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from weakref import WeakKeyDictionary

from fusec.gpu import kernels
from fusec.gpu.autotune.fusion import fusion_proposals
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.gpu.kernels import GpuFigures, Kernel
from fusec.gpu.kernels.attention.cached.match_cached import is_cached_attention, parts_of_cached
from fusec.ir import Graph, Node
from fusec.ops import POINTWISE_OPS, PRODUCTS, PackedMatMul
from fusec.passes.partition.equivalent_spellings import spelled
from fusec.passes.partition.verdict_cache import canonical_key
from fusec.plans.plan_record import Part
from fusec.schedule.program import Kind, Partition, Program, body_of, display_name, outputs_of, single_step
from fusec.system.dataclass import dataclass

StepChoice = tuple[Part, ...]  # the candidate taken for a step, as data
_step_keys: WeakKeyDictionary[Partition, str] = WeakKeyDictionary()  # a step whose values change is made anew


@dataclass(frozen=True)
class PrecisionTimes:
    """Times of a product of 8-bit integers as such and in fp16, in microseconds."""

    bytes_us: float
    halves_us: float


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
    precisions: the times of products of 8-bit integers, by `step_key`
    """

    partitioned: Program
    steps: Mapping[str, StepChoice]
    variants: Mapping[str, str]
    concats: Mapping[str, ConcatChoice]
    side_by_side: bool = False
    precisions: Mapping[str, PrecisionTimes] = field(default_factory=dict[str, PrecisionTimes])


def has_candidates(step: Partition) -> bool:
    """Tell if a step may run otherwise: a cuDNN step, or a kernel that cuDNN could replace."""
    if step.kind is Kind.KERNEL:
        return fusion_proposals.is_joint_work(step.nodes) or isinstance(step.nodes[0].op, PackedMatMul)
    return step.kind is Kind.CUDNN


def can_run_as_kernel(step: Partition, figures: GpuFigures) -> bool:
    """Return True for a pointwise cuDNN step that a kernel can run.

    Such a kernel serves every input shape. cuDNN would compile the step for each shape again.
    """
    pointwise = step.kind is Kind.CUDNN and all(isinstance(node.op, POINTWISE_OPS) for node in step.nodes)
    return pointwise and kernel_of(step.nodes, figures) is not None


def apply_choices(
    program: Program, chosen: Mapping[str, StepChoice], figures: GpuFigures, as_source: bool = False
) -> Program:
    """Return the program as it runs on a GPU: steps replaced by their choices, and kernels fused with their neighbours.

    figures: figures of the GPU
    as_source: fuse nothing, because fusing would round otherwise than the model does

    Raises ValueError if a choice does not fit its step.
    """
    return with_choices(before_choices(program, figures, as_source), chosen, figures, as_source)


def with_choices(
    program: Program, chosen: Mapping[str, StepChoice], figures: GpuFigures, as_source: bool = False
) -> Program:
    """Return what `apply_choices` does, of a program that `before_choices` returned."""
    replaced = replace_steps(program, chosen, figures)
    return replaced if as_source else fuse_steps(replaced, figures)


def before_choices(program: Program, figures: GpuFigures, as_source: bool) -> Program:
    """Return the program whose steps `apply_choices` replaces by their choices."""
    return program if as_source else fuse_steps(program, figures, products=True)


def replace_steps(program: Program, chosen: Mapping[str, StepChoice], figures: GpuFigures) -> Program:
    """Replace steps by their choices, by `step_key`; other steps stay.

    Raises ValueError if a choice does not fit its step.
    """
    steps: list[Partition] = []
    for step in program.steps:
        choice = chosen.get(step_key(program.graph, step)) if has_candidates(step) else None
        steps += (step,) if choice is None else steps_of_choice(program.graph, step, choice, figures)
    rewritten = Program(program.graph, tuple(steps), program.refusals)
    rewritten.verify()
    return rewritten


def step_key(graph: Graph, step: Partition) -> str:
    """Return a text that is equal for steps that compute the same, however they run. It is written once for a step."""
    key = _step_keys.get(step)
    if key is None:
        key = _step_keys[step] = canonical_key(body_of(graph, step.nodes) if step.spelling else step.body)
    return key


def steps_of_choice(graph: Graph, step: Partition, choice: StepChoice, figures: GpuFigures) -> Iterator[Partition]:
    """Yield the steps that replace a step; ops that run one by one are a step each.

    figures: figures of the GPU, which shape kernels.
    Raises ValueError if the choice does not fit the step.
    """
    if len(choice) == 1 and (choice[0].runs, choice[0].spelling) == (step.kind.value, step.spelling):
        yield step
        return
    start, ordered = 0, in_parts(step.nodes)
    for place, part in enumerate(choice, 1):
        end = start + part.nodes if part.nodes else len(step.nodes)
        nodes = step.nodes if end - start == len(step.nodes) else ordered[start:end]
        if not nodes or end > len(step.nodes) or (place == len(choice) and end < len(step.nodes)):
            counts = " + ".join(str(p.nodes) for p in choice)
            raise ValueError(f"a choice of {counts} ops does not fit {step.signature}")
        if part.runs in ("in place", "copy"):
            raise ValueError(f"{step.signature} is no concat")
        yield from _steps_of_part(graph, nodes, part, figures)
        start = end


def _steps_of_part(graph: Graph, nodes: tuple[Node, ...], part: Part, figures: GpuFigures) -> Iterator[Partition]:
    if part.runs == "ops":
        yield from (single_step(graph, node) for node in nodes)
        return
    body = body_of(graph, nodes)
    names = " ".join(display_name(node) for node in nodes)
    if part.runs == "kernel":
        if kernel_of(nodes, figures) is None:
            raise ValueError(f"no kernel runs {names}")
        yield Partition(nodes, Kind.KERNEL, body)
        return
    for name in part.spelling:
        changed = spelled(body, name)
        if changed is None:
            raise ValueError(f"spelling {name} does not apply to {names}")
        body = changed
    yield Partition(nodes, Kind.CUDNN, body, part.spelling)


def part_of_step(step: Partition) -> Part:
    """Return a step of a candidate as data. A view is an op that runs by itself."""
    runs = "ops" if step.kind is Kind.VIEW else step.kind.value
    return Part(len(step.nodes), runs, step.spelling)


def in_parts(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Order the nodes of a step so that those of each part of its candidates are neighbours."""
    if is_cached_attention(nodes):
        return tuple(node for part in parts_of_cached(nodes) for node in part)
    return products_first(nodes)


def products_first(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Order nodes so that several products, each with the ops it needs, come before the ops that join them."""
    products = [node for node in nodes if isinstance(node.op, PRODUCTS)]
    if len(products) < 2:
        return tuple(nodes)
    wanted, inside = set(products), set(nodes)
    for node in reversed(nodes):
        if node in wanted:
            wanted.update(v.node for v in node.operands if v.node is not None and v.node in inside)
    return (*(node for node in nodes if node in wanted), *(node for node in nodes if node not in wanted))


def kernel_of(nodes: Sequence[Node], figures: GpuFigures) -> Kernel | None:
    """Return the kernel that runs nodes as one step; None if there is none."""
    return kernels.find(nodes, outputs_of(nodes), figures)
