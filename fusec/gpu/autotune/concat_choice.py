"""Choose by time which concats are in place.

A concat in place saves a copy. It makes other steps write rows with gaps between them, for which cuDNN may have slower
engines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from fusec.gpu.autotune.step_candidates import ConcatChoice, step_key
from fusec.ir import Graph
from fusec.passes.partition.concat_in_place import ConcatGroup, joined, restore_copies
from fusec.schedule.program import Kind, Partition, Program

TimeSteps = Callable[[Graph, Sequence[Partition]], Sequence[float]]  # microseconds of steps, each as it is fastest


def keep_faster_concats(program: Program, times_us: TimeSteps) -> Program:
    """Replace concats in place by copies where that is faster.

    Only the steps that write the operands are timed, because reading part of a row costs next to nothing.
    """
    families = joined(program)
    if not families:
        return program
    graph = program.graph
    types = {value: value.type for family in families for value in family.types}
    in_place = _sums_us(graph, [_writers(program, family) for family in families], times_us)
    copied = restore_copies(program, families)
    with_copies = [[*_writers(copied, family), *_copies(copied, family)] for family in families]
    copied_us = _sums_us(graph, with_copies, times_us)
    for value, type in types.items():
        graph.set_type(value, type)
    slower = [f for f, a, b in zip(families, in_place, copied_us, strict=True) if a > b]
    return restore_copies(program, slower) if slower else program


def concats_in_place(program: Program) -> dict[str, list[ConcatGroup]]:
    """Group the concats in place by what they and the steps that write their operands compute."""
    found: dict[str, list[ConcatGroup]] = {}
    for family in joined(program):
        operands = family.types.keys()
        steps = [s for s in program.steps if s.nodes[0] in family.concats or not operands.isdisjoint(s.outputs)]
        found.setdefault("\n\n".join(step_key(program.graph, step) for step in steps), []).append(family)
    return found


def concat_choices(before: Mapping[str, Sequence[ConcatGroup]], program: Program) -> dict[str, ConcatChoice]:
    """Tell which of the groups that were in place before are in place in a program."""
    in_place = {node for family in joined(program) for node in family.concats}
    found: dict[str, ConcatChoice] = {}
    for key, group in before.items():
        shapes = ", ".join(str(node.result.type) for node in group[0].concats)
        found[key] = ConcatChoice(shapes, all(family.concats <= in_place for family in group))
    return found


def copy_concats(program: Program, keys: Collection[str]) -> Program:
    """Replace the concats of these groups by copies; types in the program's graph change."""
    wanted = [family for key, group in concats_in_place(program).items() if key in keys for family in group]
    return restore_copies(program, wanted) if wanted else program


def _writers(program: Program, family: ConcatGroup) -> list[Partition]:
    operands = family.types.keys()
    return [step for step in program.steps if step.nodes[0] not in family.concats and operands & set(step.outputs)]


def _copies(program: Program, family: ConcatGroup) -> list[Partition]:
    return [step for step in program.steps if step.kind is Kind.KERNEL and step.nodes[0] in family.concats]


def _sums_us(graph: Graph, groups: Sequence[Sequence[Partition]], times_us: TimeSteps) -> list[float]:
    """Add up the times of the steps of each group; all steps are timed in one call."""
    found = iter(times_us(graph, [step for group in groups for step in group]))
    return [sum(next(found) for _ in group) for group in groups]
