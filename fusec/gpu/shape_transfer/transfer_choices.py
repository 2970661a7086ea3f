"""What was tuned by measuring for one size, as decisions for another whose program is cut alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusec.gpu import kernels
from fusec.gpu.autotune.concat_choice import concat_choices, concats_in_place, copy_concats
from fusec.gpu.autotune.step_candidates import (
    TunedChoices,
    apply_choices,
    can_run_as_kernel,
    has_candidates,
    step_key,
    steps_of_choice,
)
from fusec.gpu.autotune.step_fusion import fuse_steps
from fusec.gpu.kernels import Kernel
from fusec.plans.plan_record import Part
from fusec.schedule.program import Kind, Partition, Program


@dataclass(frozen=True, eq=False)
class TransferredChoices:
    """A program as it runs, what was tuned of it, and for the keys of kernels those of the ones to take."""

    program: Program
    tuned: TunedChoices
    variants: Mapping[str, str]


def transfer(tuned: TunedChoices, ran: Program, program: Program, as_source: bool) -> TransferredChoices | None:
    """The program in the forms of another size, step by step; types of its graph change where concats are copies there.
    None if it is not cut into the same steps.

    tuned: of the other size, which ran as `ran`.
    """
    types = {value: value.type for value in program.graph.values()}
    transferred = _transferred(tuned, ran, program, as_source)
    if transferred is None:
        for value, type in types.items():
            program.graph.set_type(value, type)
    return transferred


def _transferred(tuned: TunedChoices, ran: Program, program: Program, as_source: bool) -> TransferredChoices | None:
    concats = concats_in_place(program)
    if len(concats) != len(tuned.concats):
        return None
    before = zip(concats, tuned.concats.values(), strict=True)
    partitioned = copy_concats(program, {work for work, each in before if not each.in_place})
    pairs = _pairs(_first(tuned.partitioned, as_source), _first(partitioned, as_source))
    if pairs is None:
        return None
    forms: dict[str, tuple[Part, ...]] = {}
    for old, new in pairs:
        if has_candidates(new):
            form = tuned.steps.get(step_key(tuned.partitioned.graph, old))
            if form is not None:
                forms[step_key(partitioned.graph, new)] = tuple(form)
    try:
        arranged = apply_choices(partitioned, forms, as_source)
    except ValueError:  # a kernel that there is not for this size
        return None
    same = _pairs(ran, arranged)
    if same is None:
        return None
    ways = dict(way for old, new in same if new.kind is Kind.KERNEL and (way := _way(tuned, old, new)) is not None)
    for _, new in pairs:
        work = step_key(partitioned.graph, new)
        if work in forms or can_run_as_kernel(new):
            forms[work] = _own_kernels(partitioned, new, forms.get(work, (Part(0, "cudnn", new.spelling),)))
    arranged = apply_choices(partitioned, forms, as_source)
    where = concat_choices(concats, partitioned)
    return TransferredChoices(arranged, TunedChoices(partitioned, forms, ways, where, tuned.side_by_side), ways)


def _own_kernels(program: Program, step: Partition, form: tuple[Part, ...]) -> tuple[Part, ...]:
    """A form whose pointwise parts are kernels of fusec's, which cuDNN would compile for each size."""
    if any(part.runs == "ops" for part in form):
        return form
    made = zip(form, steps_of_choice(program.graph, step, form), strict=True)
    return tuple(Part(part.nodes, "kernel") if can_run_as_kernel(each) else part for part, each in made)


def _first(program: Program, as_source: bool) -> Program:
    """The program whose steps are given forms: see `forms.apply_choices`."""
    return program if as_source else fuse_steps(program, products=True)


def _pairs(old: Program, new: Program) -> list[tuple[Partition, Partition]] | None:
    """The steps of both in order, if they are the same."""
    if len(old.steps) != len(new.steps):
        return None
    pairs = list(zip(old.steps, new.steps, strict=True))
    return pairs if all(_work(a) == _work(b) for a, b in pairs) else None


def _work(step: Partition) -> tuple[Kind, list[str]]:
    return step.kind, [node.op.name for node in step.nodes]


def _way(tuned: TunedChoices, old: Partition, new: Partition) -> tuple[str, str] | None:
    """The key of a step's kernel, and of that one of its kind which was the fastest in the other size."""
    first, second = (kernels.find(step.nodes, step.outputs) for step in (old, new))
    if first is None or second is None or first.key not in tuned.variants:
        return None
    keys, others = _keys(first), _keys(second)
    taken = tuned.variants[first.key]
    if taken not in keys or len(keys) != len(others):
        return None
    return second.key, others[keys.index(taken)]


def _keys(kernel: Kernel) -> list[str]:
    return [way.key for way in (kernel, *kernel.others)]
