"""Compute the operands of a concat directly into their parts of its result, where cuDNN's strides allow it.

A step then writes, and others read, a tensor within a larger one: rows with gaps between them, or a block of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate

from fusec.ir import Graph, Node, TensorType, Value
from fusec.ops import Concat
from fusec.passes.base import CONCAT_IN_PLACE, Options
from fusec.passes.partition.cost_model import is_fast
from fusec.passes.partition.equivalent_spellings import respell, spellings
from fusec.passes.partition.judge import Judge
from fusec.plans.verdict import Legal
from fusec.schedule.program import Kind, Partition, Program, body_of
from fusec.system.dataclass import dataclass

ALIGNMENT_BYTES = 16  # what cuDNN assumes of every tensor, and the widest load of a kernel
# Shorter rows would share sectors of the L2 cache. Convolutions that write rows with gaps are a little slower, too: on
# a GPU both variants are timed (benchmarks/models/ablation.py).
MIN_ROW_BYTES = 64
MAX_ELEMENTS = 1 << 31  # kernels compute with 32 bits


@dataclass
class ConcatGroup:
    """Values that share the memory of one tensor: the types of the parts, and the concats that become views."""

    types: dict[Value, TensorType]
    concats: set[Node]


def concat_in_place(program: Program, judge: Judge, options: Options, min_row_bytes: int = MIN_ROW_BYTES) -> Program:
    """Turn concats into views wherever all of their operands can be written in place.

    Only types of the program's graph change. A concat stays a copy if cuDNN refuses a step that writes or reads such a
    part, or has only slower engines for it.

    min_row_bytes: shortest row to write between gaps; shorter rows are slow
    """
    groups = [] if CONCAT_IN_PLACE in options.disable else _groups(program, min_row_bytes)
    graph = program.graph
    while groups:
        moved = {value: type for group in groups for value, type in group.types.items()}
        joined = {node for group in groups for node in group.concats}
        before = {value: value.type for value in moved}
        for value, type in moved.items():
            graph.set_type(value, type)
        touched = [s for s in program.steps if not moved.keys().isdisjoint((*s.inputs, *s.outputs))]
        restated = _restated(graph, touched, joined, judge)
        wrong = {v for step in touched if step not in restated for v in (*step.inputs, *step.outputs)}
        if not wrong:
            refusals = tuple(r for r in program.refusals if joined.isdisjoint(r.nodes))
            placed = Program(graph, tuple(restated.get(s, s) for s in program.steps), refusals)
            placed.verify()
            return placed
        for value, type in before.items():
            graph.set_type(value, type)
        groups = [group for group in groups if wrong.isdisjoint(group.types)]
    return program


def _groups(program: Program, min_row_bytes: int) -> list[ConcatGroup]:
    """Find groups of values that could share memory: the operands of a concat, and operands of those in turn."""

    def fits(value: Value, whole: TensorType, axis: int, start: int) -> bool:
        return _fits(program, value, whole, axis, start, min_row_bytes)

    found: dict[Value, ConcatGroup] = {}
    place: dict[Value, tuple[Value, int, int]] = {}  # the larger tensor, the axis, and the first index there
    for step in reversed(program.steps):  # the longest concat first, because others are parts of it
        node = step.nodes[0]
        if step.kind is not Kind.KERNEL or len(step.nodes) > 1 or not isinstance(node.op, Concat):
            continue
        parts, joined = node.operands, node.result
        axis = node.op.axis % joined.type.rank
        starts = [0, *accumulate(v.type.shape[axis] for v in parts)][: len(parts)]
        if len(set(parts)) < len(parts) or joined in place:
            continue
        if not any(v in place for v in parts):
            if all(fits(v, joined.type, axis, at) for v, at in zip(parts, starts, strict=True)):
                place |= {v: (joined, axis, at) for v, at in zip(parts, starts, strict=True)}
                found[joined] = ConcatGroup({v: replace(v.type, within=joined.type.shape) for v in parts}, {node})
        elif all(v in place for v in parts):
            whole, along, base = place[parts[0]]
            follow = all(place[v] == (whole, axis, base + at) for v, at in zip(parts, starts, strict=True))
            if follow and along == axis and fits(joined, whole.type, axis, base):
                place[joined] = (whole, axis, base)
                found[whole].types[joined] = replace(joined.type, within=whole.type.shape)
                found[whole].concats.add(node)
    return list(found.values())


def _fits(program: Program, value: Value, whole: TensorType, axis: int, start: int, min_row_bytes: int) -> bool:
    """Tell if a value can be part of a larger tensor, from `start` along an axis."""
    type, itemsize = value.type, value.type.dtype.itemsize
    if value.node is None or value.literal is not None or value in program.graph.outputs or not type.size:
        return False
    if type.dtype.bits < 8:  # a part may begin within a byte
        return False
    if whole.size >= MAX_ELEMENTS or type.order != whole.order:
        return False
    if program.step_of[value.node].kind is Kind.VIEW or any(program.step_of[n].kind is Kind.VIEW for n in value.users):
        return False
    step_bytes = whole.strides[axis] * itemsize
    outer = [s for s, d in zip(whole.strides, whole.shape, strict=True) if d != 1 and s > whole.strides[axis]]
    aligned = start * step_bytes % ALIGNMENT_BYTES == 0 and all(s * itemsize % ALIGNMENT_BYTES == 0 for s in outer)
    return aligned and (not outer or type.shape[axis] * step_bytes >= min_row_bytes)


def _restated(
    graph: Graph, steps: Sequence[Partition], joined: Collection[Node], judge: Judge
) -> dict[Partition, Partition]:
    """Give steps the types that their values have now.

    Steps that cuDNN refuses are left out, and so are steps that lose their precompiled engines.
    """
    found: dict[Partition, Partition] = {}
    asked: list[tuple[Partition, Partition]] = []
    for step in steps:
        body = body_of(graph, step.nodes)
        if step.kind is not Kind.CUDNN:
            kind = Kind.VIEW if step.nodes[0] in joined else Kind.KERNEL
            found[step] = Partition(step.nodes, kind, body)
        elif not step.spelling or step.spelling in [names for names, _ in spellings(body)]:
            asked.append((step, replace(step, body=respell(body, step.spelling))))
    for (step, other), verdict in zip(asked, judge.judge([other.body for _, other in asked]), strict=True):
        was_fast = step.verdict is not None and is_fast(step.verdict)
        if isinstance(verdict, Legal) and is_fast(verdict) >= was_fast:
            found[step] = replace(other, verdict=verdict)
    return found


def joined(program: Program) -> list[ConcatGroup]:
    """Find the groups of values that share memory in a program with concats in place."""
    found: dict[Value, ConcatGroup] = {}
    whole: dict[Value, Value] = {}
    for step in reversed(program.steps):
        node = step.nodes[0]
        if step.kind is not Kind.VIEW or not isinstance(node.op, Concat):
            continue
        root = whole.get(node.operands[0], node.result)
        group = found.setdefault(root, ConcatGroup({}, set()))
        group.concats.add(node)
        whole |= dict.fromkeys(node.operands, root)
        group.types |= {v: v.type for v in (*node.operands, *((node.result,) if node.result.type.within else ()))}
    return list(found.values())


def restore_copies(program: Program, groups: Sequence[ConcatGroup]) -> Program:
    """Turn the concats of these groups back into copies, of packed tensors.

    Other groups that the changed steps read or write are restored too, because cuDNN never judged those steps
    that way.
    """
    left, gone = joined(program), {v for group in groups for v in group.types}
    while True:
        touched = [s for s in program.steps if s.kind is not Kind.VIEW and not gone.isdisjoint((*s.inputs, *s.outputs))]
        neighbours = {v for step in touched for v in (*step.inputs, *step.outputs)} - gone
        more = {v for group in left if not neighbours.isdisjoint(group.types) for v in group.types} - gone
        if not more:
            break
        gone |= more
    copies = {node for group in left if not gone.isdisjoint(group.types) for node in group.concats}
    graph = program.graph
    for value in gone:
        graph.set_type(value, replace(value.type, within=()))
    steps: list[Partition] = []
    for step in program.steps:
        if gone.isdisjoint((*step.inputs, *step.outputs)):
            steps.append(step)
            continue
        kind = Kind.KERNEL if step.nodes[0] in copies else step.kind
        body = respell(body_of(graph, step.nodes), step.spelling)
        steps.append(replace(step, kind=kind, body=body))
    placed = Program(graph, tuple(steps), program.refusals)
    placed.verify()
    return placed
