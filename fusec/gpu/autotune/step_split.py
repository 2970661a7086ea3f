"""Split a prologue or epilogue off a cuDNN step where a neighbouring kernel runs it faster.

Fused with the product, such ops may leave it slower engines. As a step of their own, they are a pass over memory. A
kernel that already reads or writes the same values runs them at little cost, and measured times decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusec.gpu.autotune.concat_choice import TimeSteps
from fusec.gpu.autotune.step_candidates import PRODUCTS, StepChoice, step_key
from fusec.gpu.kernels.codegen.pointwise_code import can_generate
from fusec.ir import Node
from fusec.ops import BatchNormBackward, BatchNormBySums, BatchNormTrain, ChannelSums, LayerNormBackward
from fusec.plans.plan_record import Part
from fusec.schedule.program import Kind, Partition, Program

NORMS = (BatchNormTrain, BatchNormBySums, BatchNormBackward, LayerNormBackward)
Apply = Callable[[Mapping[str, StepChoice]], Program]  # the program with these choices, kernels fused
_WHOLE: StepChoice = (Part(0),)


@dataclass(frozen=True)
class _Split:
    """A split to time: the step, its choice when split, and the nodes that the neighbouring kernel would run."""

    step: Partition
    choice: StepChoice
    moved: tuple[Node, ...]


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
        normed = any(isinstance(user.op, NORMS) for value in step.outputs for user in value.users)
        # Sums that were split off are looked at again, because alone they cost more than within the norm's kernel.
        if normed and choice[0].runs == "cudnn" and (len(choice) == 1 or _ends_in_sums(step)):
            splits.setdefault(key, _Split(step, (Part(len(step.nodes) - 1), Part(1, "kernel")), (node,)))
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
    before, after = apply(joined), apply({**joined, **{key: split.choice for key, split in splits.items()}})
    compared: dict[str, tuple[list[Partition], list[Partition]]] = {}
    for key, split in splits.items():
        apart = steps_of(after, split.step.nodes)
        nodes = [node for each in apart for node in each.nodes]
        whole = steps_of(before, nodes)
        is_fused = len(after.step_of[split.moved[0]].nodes) > len(split.moved)
        if is_fused and {n for each in whole for n in each.nodes} == set(nodes):
            compared[key] = whole, apart
    times = iter(times_us(program.graph, [step for pair in compared.values() for steps in pair for step in steps]))
    faster: dict[str, StepChoice] = {}
    for key, (whole, apart) in compared.items():
        whole_us, apart_us = (sum(next(times) for _ in steps) for steps in (whole, apart))
        if apart_us < whole_us:
            faster[key] = splits[key].choice
        elif key in joined:
            faster[key] = joined[key]
    return faster


def steps_of(program: Program, nodes: Iterable[Node]) -> list[Partition]:
    """List the steps that run these nodes."""
    return list(dict.fromkeys(program.step_of[node] for node in nodes))


def _has_epilogue(step: Partition) -> bool:
    """Return True if the last op follows a product and the kernel of a norm could run it."""
    if not any(isinstance(node.op, PRODUCTS) for node in step.nodes[:-1]):
        return False
    return _ends_in_sums(step) or (len(step.outputs) == 1 and can_generate(step.nodes[-1]))


def _ends_in_sums(step: Partition) -> bool:
    return isinstance(step.nodes[-1].op, ChannelSums)


def _prologue_length(step: Partition) -> int:
    """Count the pointwise ops before the only product; 0 if there are several products or other ops."""
    products: Sequence[int] = [i for i, node in enumerate(step.nodes) if isinstance(node.op, PRODUCTS)]
    if len(products) != 1 or not all(can_generate(node) for node in step.nodes[: products[0]]):
        return 0
    return products[0]
