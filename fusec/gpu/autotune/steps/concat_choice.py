"""Choose by time which concats are in place.

A concat in place saves a copy. But other steps then write rows with gaps between them, for which cuDNN may have slower
engines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from fusec.gpu.autotune.step_choices import ConcatChoice, step_key
from fusec.ir import Graph
from fusec.passes.partition.concat_in_place import ConcatGroup, joined, restore_copies
from fusec.schedule.program import Kind, Partition, Program

TimeSteps = Callable[[Graph, Sequence[Partition]], Sequence[float]]  # of each step's fastest candidate, in microseconds


def keep_faster_concats(program: Program, times_us: TimeSteps) -> Program:
    """Replace concats in place by copies where that is faster.

    Only the steps that write the operands are timed, because reading part of a row costs almost nothing.
    """
    groups = joined(program)
    if not groups:
        return program
    graph = program.graph
    types = {value: value.type for group in groups for value in group.types}
    in_place_us = _sums_us(graph, [_writers(program, group) for group in groups], times_us)
    copied = restore_copies(program, groups)
    with_copies = [[*_writers(copied, group), *_copies(copied, group)] for group in groups]
    copied_us = _sums_us(graph, with_copies, times_us)
    for value, type in types.items():
        graph.set_type(value, type)
    slower = [group for group, a, b in zip(groups, in_place_us, copied_us, strict=True) if a > b]
    return restore_copies(program, slower) if slower else program


def concats_in_place(program: Program) -> dict[str, list[ConcatGroup]]:
    """Group the concats in place by what they and the steps that write their operands compute."""
    found: dict[str, list[ConcatGroup]] = {}
    for group in joined(program):
        operands = group.types.keys()
        steps = [s for s in program.steps if s.nodes[0] in group.concats or not operands.isdisjoint(s.outputs)]
        found.setdefault("\n\n".join(step_key(program.graph, step) for step in steps), []).append(group)
    return found


def concat_choices(before: Mapping[str, Sequence[ConcatGroup]], program: Program) -> dict[str, ConcatChoice]:
    """Return which of the groups that were in place before are in place in a program."""
    in_place = {node for group in joined(program) for node in group.concats}
    found: dict[str, ConcatChoice] = {}
    for key, groups in before.items():
        shapes = ", ".join(str(node.result.type) for node in groups[0].concats)
        found[key] = ConcatChoice(shapes, all(group.concats <= in_place for group in groups))
    return found


def copy_concats(program: Program, keys: Collection[str]) -> Program:
    """Replace the concats of these groups by copies; types in the program's graph change."""
    wanted = [group for key, groups in concats_in_place(program).items() if key in keys for group in groups]
    return restore_copies(program, wanted) if wanted else program


def _writers(program: Program, group: ConcatGroup) -> list[Partition]:
    operands = group.types.keys()
    return [step for step in program.steps if step.nodes[0] not in group.concats and operands & set(step.outputs)]


def _copies(program: Program, group: ConcatGroup) -> list[Partition]:
    return [step for step in program.steps if step.kind is Kind.KERNEL and step.nodes[0] in group.concats]


def _sums_us(graph: Graph, groups: Sequence[Sequence[Partition]], times_us: TimeSteps) -> list[float]:
    """Add up the times of the steps of each group; all steps are timed in one call."""
    found = iter(times_us(graph, [step for group in groups for step in group]))
    return [sum(next(found) for _ in group) for group in groups]
