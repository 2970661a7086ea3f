"""Transfer the choices made for one input shape to another, whose program has the same steps."""

from __future__ import annotations

from collections.abc import Mapping

from fusec.gpu import kernels
from fusec.gpu.autotune.step_choices import (
    TunedChoices,
    apply_choices,
    before_choices,
    can_run_as_kernel,
    has_candidates,
    step_key,
    steps_of_choice,
)
from fusec.gpu.autotune.steps.concat_choice import concat_choices, concats_in_place, copy_concats
from fusec.gpu.kernels import GpuFigures, Kernel
from fusec.plans.plan_record import Part
from fusec.schedule.program import Kind, Partition, Program
from fusec.system.dataclass import dataclass


@dataclass(frozen=True, eq=False)
class TransferredChoices:
    """Program with transferred choices applied, the choices, and the variant of each kernel, by key."""

    program: Program
    tuned: TunedChoices
    variants: Mapping[str, str]


def transfer(
    tuned: TunedChoices, ran: Program, program: Program, figures: GpuFigures, as_source: bool
) -> TransferredChoices | None:
    """Apply the choices of another input shape to a program; None if it does not have the same steps.

    Types in the program's graph change where a choice makes a concat a copy.

    tuned: the choices of the other input shape, whose program ran as `ran`
    figures: figures of the GPU that both programs are for
    """
    types = {value: value.type for value in program.graph.values()}
    transferred = _transferred(tuned, ran, program, figures, as_source)
    if transferred is None:
        for value, type in types.items():
            program.graph.set_type(value, type)
    return transferred


def _transferred(
    tuned: TunedChoices, ran: Program, program: Program, figures: GpuFigures, as_source: bool
) -> TransferredChoices | None:
    """Apply the choices of a tuned program to a program with the same steps in other sizes; None if they differ.

    ran: the tuned program with its choices applied. program: the new one, as it was partitioned.
    """
    concats = concats_in_place(program)
    if len(concats) != len(tuned.concats):
        return None
    before = zip(concats, tuned.concats.values(), strict=True)
    partitioned = copy_concats(program, {key for key, each in before if not each.in_place})
    pairs = _pairs(*(before_choices(each, figures, as_source) for each in (tuned.partitioned, partitioned)))
    if pairs is None:
        return None
    choices: dict[str, tuple[Part, ...]] = {}
    for old, new in pairs:
        if has_candidates(new):
            choice = tuned.steps.get(step_key(tuned.partitioned.graph, old))
            if choice is not None:
                choices[step_key(partitioned.graph, new)] = tuple(choice)
    try:
        arranged = apply_choices(partitioned, choices, figures, as_source)
    except ValueError:  # no kernel runs this input shape
        return None
    same = _pairs(ran, arranged)
    if same is None:
        return None
    variants = dict(
        pair
        for old, new in same
        if new.kind is Kind.KERNEL and (pair := _variant(tuned, old, new, figures)) is not None
    )
    for _, new in pairs:
        key = step_key(partitioned.graph, new)
        if key in choices or can_run_as_kernel(new, figures):
            choice = choices.get(key, (Part(0, "cudnn", new.spelling),))
            choices[key] = _own_kernels(partitioned, new, choice, figures)
    arranged = apply_choices(partitioned, choices, figures, as_source)
    where = concat_choices(concats, partitioned)
    return TransferredChoices(
        arranged, TunedChoices(partitioned, choices, variants, where, tuned.side_by_side), variants
    )


def _own_kernels(program: Program, step: Partition, choice: tuple[Part, ...], figures: GpuFigures) -> tuple[Part, ...]:
    """Run the pointwise steps of a choice as kernels, because cuDNN would compile them for each input shape."""
    if any(part.runs == "ops" for part in choice):
        return choice
    made = zip(choice, steps_of_choice(program.graph, step, choice, figures), strict=True)
    return tuple(Part(part.nodes, "kernel") if can_run_as_kernel(each, figures) else part for part, each in made)


def _pairs(old: Program, new: Program) -> list[tuple[Partition, Partition]] | None:
    """Pair the steps of two programs; None if they differ."""
    if len(old.steps) != len(new.steps):
        return None
    pairs = list(zip(old.steps, new.steps, strict=True))
    return pairs if all(_work(a) == _work(b) for a, b in pairs) else None


def _work(step: Partition) -> tuple[Kind, list[str]]:
    return step.kind, [node.op.name for node in step.nodes]


def _variant(tuned: TunedChoices, old: Partition, new: Partition, figures: GpuFigures) -> tuple[str, str] | None:
    """Return the key of a step's kernel, and of its variant that was fastest for the other input shape."""
    first, second = (kernels.find(step.nodes, step.outputs, figures) for step in (old, new))
    if first is None or second is None or first.key not in tuned.variants:
        return None
    keys, others = _keys(first), _keys(second)
    taken = tuned.variants[first.key]
    if taken not in keys or len(keys) != len(others):
        return None
    return second.key, others[keys.index(taken)]


def _keys(kernel: Kernel) -> list[str]:
    return [variant.key for variant in (kernel, *kernel.others)]
