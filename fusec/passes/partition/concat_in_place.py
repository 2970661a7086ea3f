"""Concats without copies: what is joined is computed into its part of the result, where cuDNN's strides allow it.

A step then writes (and others read) a tensor within a larger one: rows with gaps between them, or a block of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from fusec.ir import Graph, Node, TensorType, Value
from fusec.ops import Concat
from fusec.passes.base import CONCAT_IN_PLACE, Options
from fusec.passes.partition.cost_model import is_fast
from fusec.passes.partition.equivalent_spellings import respell, spellings
from fusec.passes.partition.oracle import Oracle
from fusec.plans.verdict import Legal
from fusec.schedule.program import Kind, Partition, Program, body_of

ALIGNMENT_BYTES = 16  # what cuDNN assumes of every tensor, and the widest load of a kernel
# Shorter rows would share sectors of the L2 cache. Convolutions that write rows with gaps are a little slower, too: on
# a GPU both ways are timed (benchmarks/choices.py).
MIN_ROW_BYTES = 64
MAX_ELEMENTS = 1 << 31  # kernels compute with 32 bits


@dataclass
class Family:
    """What lies in one piece of memory: types of its parts, and the concats that are then no work."""

    types: dict[Value, TensorType]
    concats: set[Node]


def concat_in_place(program: Program, oracle: Oracle, options: Options, min_row_bytes: int = MIN_ROW_BYTES) -> Program:
    """The program with concats that are no work wherever all that they join can be written in place.

    min_row_bytes: of what is written between gaps, for the sake of speed.
    Types of the program's graph change, nothing else does. Where cuDNN refuses one of the steps that write or read
    such parts, or has slower engines for it, concats stay as they are.
    """
    families = [] if CONCAT_IN_PLACE in options.disable else _families(program, min_row_bytes)
    graph = program.graph
    while families:
        moved = {value: type for family in families for value, type in family.types.items()}
        joined = {node for family in families for node in family.concats}
        before = {value: value.type for value in moved}
        for value, type in moved.items():
            graph.set_type(value, type)
        touched = [s for s in program.steps if not moved.keys().isdisjoint((*s.inputs, *s.outputs))]
        restated = _restated(graph, touched, joined, oracle)
        wrong = {v for step in touched if step not in restated for v in (*step.inputs, *step.outputs)}
        if not wrong:
            refusals = tuple(r for r in program.refusals if joined.isdisjoint(r.nodes))
            placed = Program(graph, tuple(restated.get(s, s) for s in program.steps), refusals)
            placed.verify()
            return placed
        for value, type in before.items():
            graph.set_type(value, type)
        families = [family for family in families if wrong.isdisjoint(family.types)]
    return program


def _families(program: Program, min_row_bytes: int) -> list[Family]:
    """What could lie in one piece of memory each: the operands of a concat, and what joins the first of them, too."""

    def fits(value: Value, whole: TensorType, axis: int, start: int) -> bool:
        return _fits(program, value, whole, axis, start, min_row_bytes)

    found: dict[Value, Family] = {}
    place: dict[Value, tuple[Value, int, int]] = {}  # in which whole, along which axis, and where it begins
    for step in reversed(program.steps):  # the longest first, of which others are parts
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
                found[joined] = Family({v: replace(v.type, within=joined.type.shape) for v in parts}, {node})
        elif all(v in place for v in parts):
            whole, along, base = place[parts[0]]
            follow = all(place[v] == (whole, axis, base + at) for v, at in zip(parts, starts, strict=True))
            if follow and along == axis and fits(joined, whole.type, axis, base):
                place[joined] = (whole, axis, base)
                found[whole].types[joined] = replace(joined.type, within=whole.type.shape)
                found[whole].concats.add(node)
    return list(found.values())


def _fits(program: Program, value: Value, whole: TensorType, axis: int, start: int, min_row_bytes: int) -> bool:
    """Whether a value can lie in a part of something larger, from `start` along an axis."""
    type, itemsize = value.type, value.type.dtype.itemsize
    if value.node is None or value.literal is not None or value in program.graph.outputs or not type.size:
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
    graph: Graph, steps: Sequence[Partition], joined: Collection[Node], oracle: Oracle
) -> dict[Partition, Partition]:
    """Steps with the types that their values have now. Left out are those that cuDNN declines so, or runs slower:
    without the precompiled engines they had."""
    found: dict[Partition, Partition] = {}
    asked: list[tuple[Partition, Partition]] = []
    for step in steps:
        body = body_of(graph, step.nodes)
        if step.kind is not Kind.CUDNN:
            kind = Kind.VIEW if step.nodes[0] in joined else Kind.KERNEL
            found[step] = Partition(step.nodes, kind, body)
        elif not step.spelling or step.spelling in [names for names, _ in spellings(body)]:
            asked.append((step, replace(step, body=respell(body, step.spelling))))
    for (step, other), verdict in zip(asked, oracle.judge([other.body for _, other in asked]), strict=True):
        was_fast = step.verdict is not None and is_fast(step.verdict)
        if isinstance(verdict, Legal) and is_fast(verdict) >= was_fast:
            found[step] = replace(other, verdict=verdict)
    return found


def joined(program: Program) -> list[Family]:
    """What lies in one piece of memory each, in a program with concats in place."""
    found: dict[Value, Family] = {}
    whole: dict[Value, Value] = {}
    for step in reversed(program.steps):
        node = step.nodes[0]
        if step.kind is not Kind.VIEW or not isinstance(node.op, Concat):
            continue
        root = whole.get(node.operands[0], node.result)
        family = found.setdefault(root, Family({}, set()))
        family.concats.add(node)
        whole |= dict.fromkeys(node.operands, root)
        family.types |= {v: v.type for v in (*node.operands, *((node.result,) if node.result.type.within else ()))}
    return list(found.values())


def apart(program: Program, families: Sequence[Family]) -> Program:
    """The program with these concats as copies again, of tensors that are packed; and others that a step of theirs
    reads or writes, too, since those steps were never asked for so."""
    left, gone = joined(program), {v for family in families for v in family.types}
    while True:
        touched = [s for s in program.steps if s.kind is not Kind.VIEW and not gone.isdisjoint((*s.inputs, *s.outputs))]
        beside = {v for step in touched for v in (*step.inputs, *step.outputs)} - gone
        more = {v for family in left if not beside.isdisjoint(family.types) for v in family.types} - gone
        if not more:
            break
        gone |= more
    copies = {node for family in left if not gone.isdisjoint(family.types) for node in family.concats}
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
