"""What was decided by measuring for one size, as decisions for another whose program is cut alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusec.gpu import kernels
from fusec.gpu.autotune.concat_choice import copied, families, placed
from fusec.gpu.autotune.step_candidates import Decided, arrange, canonical_of, has_forms, parts_of, runs_as_kernel
from fusec.gpu.autotune.step_fusion import grouped
from fusec.gpu.kernels import Kernel
from fusec.plans.plan_record import Part
from fusec.schedule.program import Kind, Partition, Program


@dataclass(frozen=True, eq=False)
class Followed:
    """A program as it runs, what was decided of it, and for the keys of kernels those of the ones to take."""

    program: Program
    decided: Decided
    ways: Mapping[str, str]


def follow(decided: Decided, ran: Program, program: Program, as_source: bool) -> Followed | None:
    """The program in the forms of another size, step by step; types of its graph change where concats are copies there.
    None if it is not cut into the same steps.

    decided: of the other size, which ran as `ran`.
    """
    types = {value: value.type for value in program.graph.values()}
    followed = _followed(decided, ran, program, as_source)
    if followed is None:
        for value, type in types.items():
            program.graph.set_type(value, type)
    return followed


def _followed(decided: Decided, ran: Program, program: Program, as_source: bool) -> Followed | None:
    concats = families(program)
    if len(concats) != len(decided.concats):
        return None
    before = zip(concats, decided.concats.values(), strict=True)
    partitioned = copied(program, {work for work, each in before if not each.in_place})
    pairs = _pairs(_first(decided.partitioned, as_source), _first(partitioned, as_source))
    if pairs is None:
        return None
    forms: dict[str, tuple[Part, ...]] = {}
    for old, new in pairs:
        if has_forms(new):
            form = decided.forms.get(canonical_of(decided.partitioned.graph, old))
            if form is not None:
                forms[canonical_of(partitioned.graph, new)] = tuple(form)
    try:
        arranged = arrange(partitioned, forms, as_source)
    except ValueError:  # a kernel that there is not for this size
        return None
    same = _pairs(ran, arranged)
    if same is None:
        return None
    ways = dict(way for old, new in same if new.kind is Kind.KERNEL and (way := _way(decided, old, new)) is not None)
    for _, new in pairs:
        work = canonical_of(partitioned.graph, new)
        if work in forms or runs_as_kernel(new):
            forms[work] = _own_kernels(partitioned, new, forms.get(work, (Part(0, "cudnn", new.spelling),)))
    arranged = arrange(partitioned, forms, as_source)
    where = placed(concats, partitioned)
    return Followed(arranged, Decided(partitioned, forms, ways, where, decided.side_by_side), ways)


def _own_kernels(program: Program, step: Partition, form: tuple[Part, ...]) -> tuple[Part, ...]:
    """A form whose pointwise parts are kernels of fusec's, which cuDNN would compile for each size."""
    if any(part.runs == "ops" for part in form):
        return form
    made = zip(form, parts_of(program.graph, step, form), strict=True)
    return tuple(Part(part.nodes, "kernel") if runs_as_kernel(each) else part for part, each in made)


def _first(program: Program, as_source: bool) -> Program:
    """The program whose steps are given forms: see `forms.arrange`."""
    return program if as_source else grouped(program, products=True)


def _pairs(old: Program, new: Program) -> list[tuple[Partition, Partition]] | None:
    """The steps of both in order, if they are the same."""
    if len(old.steps) != len(new.steps):
        return None
    pairs = list(zip(old.steps, new.steps, strict=True))
    return pairs if all(_work(a) == _work(b) for a, b in pairs) else None


def _work(step: Partition) -> tuple[Kind, list[str]]:
    return step.kind, [node.op.name for node in step.nodes]


def _way(decided: Decided, old: Partition, new: Partition) -> tuple[str, str] | None:
    """The key of a step's kernel, and of that one of its kind which was the fastest in the other size."""
    first, second = (kernels.find(step.nodes, step.outputs) for step in (old, new))
    if first is None or second is None or first.key not in decided.ways:
        return None
    keys, others = _keys(first), _keys(second)
    taken = decided.ways[first.key]
    if taken not in keys or len(keys) != len(others):
        return None
    return second.key, others[keys.index(taken)]


def _keys(kernel: Kernel) -> list[str]:
    return [way.key for way in (kernel, *kernel.others)]
