"""Split a prologue or epilogue off a cuDNN step where a neighbouring kernel runs it faster.

Fused with a product, such ops may leave it only slower engines. As a step of their own, they read and write memory once
more. A kernel that already reads or writes the same values runs them at little cost. Measured times decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field

from fusec.gpu.autotune.step_choices import StepChoice, step_key
from fusec.gpu.autotune.steps.concat_choice import TimeSteps
from fusec.gpu.kernels.codegen.pointwise_code import can_generate
from fusec.ir import Node
from fusec.ops import PRODUCTS, BatchNormBackward, BatchNormBySums, BatchNormTrain, ChannelSums, LayerNormBackward
from fusec.plans.plan_record import Part
from fusec.schedule.program import Kind, Partition, Program
from fusec.system.dataclass import dataclass

NORMS = (BatchNormTrain, BatchNormBySums, BatchNormBackward, LayerNormBackward)
Apply = Callable[[Mapping[str, StepChoice]], Program]  # the program with these choices, kernels fused
_WHOLE: StepChoice = (Part(0),)


@dataclass(frozen=True)
class _Split:
    """A split to time.

    step: the step with its choice when split.
    moved: the nodes that the neighbouring kernel would run.
    others: the choices of the neighbouring steps, which become that kernel, by `step_key`.
    """

    step: Partition
    choice: StepChoice
    moved: tuple[Node, ...]
    others: Mapping[str, StepChoice] = field(default_factory=dict[str, StepChoice])


def split_epilogues(
    program: Program, chosen: Mapping[str, StepChoice], apply: Apply, times_us: TimeSteps
) -> dict[str, StepChoice]:
    """Choose the steps whose last op the kernel of a norm after them should run, by `step_key`.

    program: as it was partitioned
    chosen: the choices of its steps so far
    """
    splits: dict[str, _Split] = {}
    for step in program.steps:
        if step.kind is not Kind.CUDNN or len(step.nodes) < 2 or not _has_epilogue(step):
            continue
        key, node = step_key(program.graph, step), step.nodes[-1]
        choice = chosen.get(key, _WHOLE)
        norms = [user for value in step.outputs for user in value.users if isinstance(user.op, NORMS)]
        # Sums that were split off before are tried, too, because alone they cost more than within the norm's kernel.
        if norms and choice[0].runs == "cudnn" and (len(choice) == 1 or _ends_in_sums(step)):
            others = _as_kernels(program, norms)
            splits.setdefault(key, _Split(step, (Part(len(step.nodes) - 1), Part(1, "kernel")), (node,), others))
    rejoined = {key: _WHOLE for key in splits if len(chosen.get(key, ())) > 1}
    return _faster_splits(program, splits, {**chosen, **rejoined}, apply, times_us)


def split_prologues(
    program: Program, chosen: Mapping[str, StepChoice], apply: Apply, times_us: TimeSteps
) -> dict[str, StepChoice]:
    """Choose the steps whose first ops the kernel before them should run, by `step_key`.

    program: as it was partitioned
    chosen: the choices of its steps so far
    """
    splits: dict[str, _Split] = {}
    for step in program.steps:
        count = _prologue_length(step) if step.kind is Kind.CUDNN else 0
        key = step_key(program.graph, step) if count else ""
        choice = chosen.get(key, _WHOLE)
        if count and len(choice) == 1 and choice[0].runs == "cudnn":
            split = (Part(count, Kind.KERNEL.value), Part(len(step.nodes) - count))
            splits.setdefault(key, _Split(step, split, step.nodes[:count]))
    return _faster_splits(program, splits, chosen, apply, times_us)


def join_norms(
    program: Program, chosen: Mapping[str, StepChoice], apply: Apply, times_us: TimeSteps
) -> dict[str, StepChoice]:
    """Choose the norms that a kernel should run together with the steps around them, by `step_key`.

    Alone cuDNN is as fast or faster. But cuDNN takes no ops before a norm and few after it, and a kernel takes all.

    program: as it was partitioned
    chosen: the choices of its steps so far
    """
    joins: dict[str, _Split] = {}
    for step in program.steps:
        norms = [node for node in step.nodes if isinstance(node.op, NORMS)]
        for key, choice in _as_kernels(program, norms).items():
            if chosen.get(key, _WHOLE)[0].runs == "cudnn":
                joins.setdefault(key, _Split(step, choice, step.nodes))
    return _faster_splits(program, joins, chosen, apply, times_us)


def _as_kernels(program: Program, norms: Iterable[Node]) -> dict[str, StepChoice]:
    """Return the choices by which kernels run the steps of norms that cuDNN may run."""
    steps = [program.step_of[norm] for norm in norms]
    fit = [
        step
        for step in steps
        if step.kind is Kind.CUDNN and all(can_generate(node) or isinstance(node.op, NORMS) for node in step.nodes)
    ]
    return {step_key(program.graph, step): (Part(len(step.nodes), "kernel"),) for step in fit}


def _faster_splits(
    program: Program,
    splits: Mapping[str, _Split],
    joined: Mapping[str, StepChoice],
    apply: Apply,
    times_us: TimeSteps,
) -> dict[str, StepChoice]:
    """Time each step joined and split, with the kernels that the split changes.

    Returns the faster splits, and the joined choice of the others where there is one.
    """
    if not splits:
        return {}
    others = {key: choice for split in splits.values() for key, choice in split.others.items()}
    before = apply(joined)
    after = apply({**joined, **others, **{key: split.choice for key, split in splits.items()}})
    compared: dict[str, tuple[list[Partition], list[Partition]]] = {}
    for key, split in splits.items():
        split_steps = steps_of(after, split.step.nodes)
        nodes = [node for step in split_steps for node in step.nodes]
        joined_steps = steps_of(before, nodes)
        is_fused = len(after.step_of[split.moved[0]].nodes) > len(split.moved)
        if is_fused and {node for step in joined_steps for node in step.nodes} == set(nodes):
            compared[key] = joined_steps, split_steps
    times = iter(times_us(program.graph, [step for pair in compared.values() for steps in pair for step in steps]))
    faster: dict[str, StepChoice] = {}
    for key, pair in compared.items():
        joined_us, split_us = (sum(next(times) for _ in steps) for steps in pair)
        if split_us < joined_us:
            faster |= {key: splits[key].choice, **splits[key].others}
        elif key in joined:
            faster[key] = joined[key]
    return faster


def steps_of(program: Program, nodes: Iterable[Node]) -> list[Partition]:
    """List the steps that run these nodes."""
    return list(dict.fromkeys(program.step_of[node] for node in nodes))


def _has_epilogue(step: Partition) -> bool:
    """Tell if the last op follows a product and the kernel of a norm could run it."""
    if not any(isinstance(node.op, PRODUCTS) for node in step.nodes[:-1]):
        return False
    return _ends_in_sums(step) or (len(step.outputs) == 1 and can_generate(step.nodes[-1]))


def _ends_in_sums(step: Partition) -> bool:
    return isinstance(step.nodes[-1].op, ChannelSums)


def _prologue_length(step: Partition) -> int:
    """Count the pointwise ops before the only product; 0 if there are several products or other ops.

    Also 0 if none computes an operand of the product. Of a residual in 8 bits, the kernel before it would write more.
    """
    products = [i for i, node in enumerate(step.nodes) if isinstance(node.op, PRODUCTS)]
    before = step.nodes[: products[0]] if len(products) == 1 else ()
    made = {value for node in before for value in node.results}
    if not before or not all(map(can_generate, before)) or made.isdisjoint(step.nodes[len(before)].operands):
        return 0
    return len(before)
