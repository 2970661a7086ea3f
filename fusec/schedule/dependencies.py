"""Find which steps must wait for which, if steps run side by side on several streams.

Memory decides it: a step also waits for those that use the same bytes for another value.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fusec.ir import Value
from fusec.ops import Concat
from fusec.schedule.memory_plan import MemoryPlan, located
from fusec.schedule.program import Kind, Partition, Program

Waits = tuple[tuple[int, ...] | None, ...]  # for each step the earlier ones it waits for; None: it does no work
MAX_STEPS = 4000  # whose pairs are looked at
MOST_LANES = 4

Inside = Mapping[Value, tuple[Value, int]]
Wholes = dict[tuple[Value, int], int]  # numbers of what has parts, by the axis along which it has them


def waits(program: Program, plan: MemoryPlan) -> Waits | None:
    """Return, for each step, the earlier ones that write what it touches, or read what it writes.

    None if some memory is not in the plan, or there are too many steps.
    """
    stored = {v for step in program.steps for v in (*step.inputs, *step.outputs) if v.uses and v.type.size}
    inside = located(program)
    constant = {v for v in stored if v not in plan.offsets and v in inside and inside[v][0].literal is not None}
    if len(program.steps) > MAX_STEPS or any(v not in plan.offsets for v in stored - constant):
        return None
    wholes: Wholes = {}
    touched = [_touched(index, step, plan, inside, wholes) for index, step in enumerate(program.steps)]
    rows = np.array([row for step in touched for row in step], np.int64).reshape(-1, 7)
    result: list[tuple[int, ...] | None] = []
    end = 0
    for step in touched:
        before, own = rows[:end], rows[end : end + len(step)]
        end += len(step)
        found: set[int] = set()
        for _, first, end_byte, written, whole, low, high in own.tolist():
            clash = (before[:, 1] < end_byte) & (before[:, 2] > first) & ((before[:, 3] | written) == 1)
            apart = (before[:, 4] == whole) & ((before[:, 5] >= high) | (before[:, 6] <= low))
            found.update(before[clash & ~apart, 0].tolist())
        result.append(tuple(sorted(found)) if step else None)
    return tuple(result)


def _touched(index: int, step: Partition, plan: MemoryPlan, inside: Inside, wholes: Wholes) -> list[tuple[int, ...]]:
    """Return the memory that a step touches, a row for each value.

    A row holds: step, first byte, end, if it is written, and for a part of a larger value its whole and bytes (`_row`).
    """
    node = step.nodes[0]
    if step.kind is Kind.VIEW and (isinstance(node.op, Concat) or all(v in inside for v in step.outputs)):
        return []
    rows: list[tuple[int, ...]] = []
    for written, values in enumerate((step.inputs, step.outputs)):
        for value in values:
            if value.type.size and value in plan.offsets:
                start = plan.offsets[value]
                end = start + value.type.span * value.type.dtype.itemsize
                rows.append((index, start, end, written, *_row(value, start, plan, inside, wholes)))
    return rows


def _row(value: Value, start: int, plan: MemoryPlan, inside: Inside, wholes: Wholes) -> tuple[int, int, int]:
    """Return, for a part of a larger value, the number of that value and the bytes the part has of each of its rows.

    Others have -1 and all bytes. Values that use the same memory later may have other rows, so they have other numbers.
    """
    type = value.type
    axis = next((d for d, (size, whole) in enumerate(zip(type.shape, type.within, strict=False)) if size != whole), -1)
    if axis < 0:
        return -1, 0, 1
    row_bytes = type.strides[axis] * type.dtype.itemsize
    root = inside[value][0]
    low = (start - plan.offsets[root]) % (type.within[axis] * row_bytes)
    return wholes.setdefault((root, axis), len(wholes)), low, low + type.shape[axis] * row_bytes


def lanes(waiting: Waits, most: int = MOST_LANES) -> tuple[int, ...]:
    """Assign a stream to each step; steps of one stream run in order.

    A step takes a stream whose last step it waits for, else a new one, else the one that is done first.
    Steps that do no work have none: -1.
    """
    tails: list[int] = []
    ahead_of: list[int] = []  # bits of all that a step waits for, at first or second hand
    result: list[int] = []
    for index, before in enumerate(waiting):
        all_before = 0
        for step in before or ():
            all_before |= ahead_of[step] | 1 << step
        ahead_of.append(all_before)
        if before is None:
            result.append(-1)
            continue
        free = [lane for lane, tail in enumerate(tails) if all_before >> tail & 1]
        if free:
            lane = max(free, key=lambda lane: tails[lane])
        elif len(tails) < most:
            lane = len(tails)
            tails.append(index)
        else:
            lane = min(range(most), key=lambda lane: tails[lane])
        tails[lane] = index
        result.append(lane)
    return tuple(result)
