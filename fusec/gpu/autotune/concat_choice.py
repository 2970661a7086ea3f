"""Which concats are better in place, by measured times: what is saved is a copy, what it costs is steps that write
rows with gaps between them, for which cuDNN may have slower engines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from fusec.gpu.autotune.step_candidates import Placed, canonical_of
from fusec.ir import Graph
from fusec.passes.partition.concat_in_place import ConcatGroup, joined, restore_copies
from fusec.schedule.program import Kind, Partition, Program

Prices = Callable[[Graph, Sequence[Partition]], Sequence[float]]  # microseconds of steps, each in its fastest form


def worthwhile(program: Program, prices_us: Prices) -> Program:
    """The program with those concats as copies that are faster so. Only what writes the parts is timed both ways: to
    read a beginning of such rows costs next to nothing."""
    families = joined(program)
    if not families:
        return program
    graph = program.graph
    types = {value: value.type for family in families for value in family.types}
    here = [_makers(program, family) for family in families]
    in_place = _sums(graph, here, prices_us)
    copied = restore_copies(program, families)
    there = [[*_makers(copied, family), *_copies(copied, family)] for family in families]
    apart_us = _sums(graph, there, prices_us)
    for value, type in types.items():
        graph.set_type(value, type)
    slower = [f for f, a, b in zip(families, in_place, apart_us, strict=True) if a > b]
    return restore_copies(program, slower) if slower else program


def families(program: Program) -> dict[str, list[ConcatGroup]]:
    """The concats that are in place, by what they and the steps that write their parts compute."""
    found: dict[str, list[ConcatGroup]] = {}
    for family in joined(program):
        parts = family.types.keys()
        steps = [s for s in program.steps if s.nodes[0] in family.concats or not parts.isdisjoint(s.outputs)]
        found.setdefault("\n\n".join(canonical_of(program.graph, step) for step in steps), []).append(family)
    return found


def placed(before: Mapping[str, Sequence[ConcatGroup]], program: Program) -> dict[str, Placed]:
    """What became of the concats that were in place before."""
    left = {node for family in joined(program) for node in family.concats}
    found: dict[str, Placed] = {}
    for work, alike in before.items():
        shapes = ", ".join(str(node.result.type) for node in alike[0].concats)
        found[work] = Placed(shapes, all(family.concats <= left for family in alike))
    return found


def copied(program: Program, works: Collection[str]) -> Program:
    """The program with the concats of that work as copies; types of its graph change."""
    wanted = [family for work, alike in families(program).items() if work in works for family in alike]
    return restore_copies(program, wanted) if wanted else program


def _makers(program: Program, family: ConcatGroup) -> list[Partition]:
    parts = family.types.keys()
    return [step for step in program.steps if step.nodes[0] not in family.concats and parts & set(step.outputs)]


def _copies(program: Program, family: ConcatGroup) -> list[Partition]:
    return [step for step in program.steps if step.kind is Kind.KERNEL and step.nodes[0] in family.concats]


def _sums(graph: Graph, groups: Sequence[Sequence[Partition]], prices_us: Prices) -> list[float]:
    """What the steps of each group take together."""
    found = iter(prices_us(graph, [step for group in groups for step in group]))
    return [sum(next(found) for _ in group) for group in groups]
