"""Place each stored value in one arena. Memory is used again after the last step that reads its value.

Placement is greedy: a value gets the smallest gap that is large enough, the largest values first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fusec.errors import VerifyError
from fusec.ir import Value, quote
from fusec.ops import Concat
from fusec.schedule.aliasing import joins_in_place, view_offset
from fusec.schedule.program import Kind, Program
from fusec.system.dataclass import dataclass

ALIGNMENT_BYTES = 256  # as cudaMalloc guarantees it; no vectorised kernel needs more
VIEW_ALIGNMENT_BYTES = 16  # cuDNN assumes it of every tensor
Offsets = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Life:
    """The lifetime of a value with memory of its own.

    first: the step that computes it; -1 for an input. last: the last step that reads it.
    """

    value: Value
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class MemoryPlan:
    """Offsets in bytes into an arena of `nbytes`, by value. Views and parts of a concat are inside other values.

    Constants, values stored elsewhere, and views of them, have no offset.
    live_bytes: the most memory that is alive during one step; no plan can need less.
    lives: the lifetimes of values with memory of their own.
    """

    offsets: Mapping[Value, int]
    nbytes: int
    live_bytes: int
    lives: tuple[Life, ...]


def plan_memory(
    program: Program,
    elsewhere: Collection[Value] = (),
    side_by_side: bool = False,
    held: Collection[Value] = (),
    whole_bytes: bool = False,
) -> MemoryPlan:
    """Place all values that a program's steps store, inputs and outputs included.

    elsewhere: values that have other memory.
    side_by_side: steps that do not need each other's results can run at the same time.
    held: values whose memory is never used for another one.
    whole_bytes: elements below 8 bits have a byte each, as in NumPy; on a GPU they share bytes.
    """
    inside = located(program)
    lives = [life for life in _lives(program, inside) if life.value not in elsewhere]
    if whole_bytes:
        lives = [replace(life, nbytes=life.value.type.nbytes) for life in lives]
    if side_by_side:
        lives = _prolonged(program, lives, inside)
    end = len(program.steps)
    lives = [replace(life, last=end) if life.value in held else life for life in lives]
    bound = _live_bytes(lives, end)
    best, height = _lowest(lives, bound)
    at = {life.value: int(offset) for life, offset in zip(lives, best, strict=True)}
    for value, (source, start) in inside.items():
        if source in at:
            at[value] = at[source] + start
    return MemoryPlan(at, height, bound, tuple(lives))


def live_bytes(program: Program) -> int:
    """Return the most memory that is alive during one step, without a search for places."""
    return _live_bytes(_lives(program, located(program)), len(program.steps))


_ORDERS: tuple[Callable[[Life], tuple[int, ...]], ...] = (
    lambda life: (-life.nbytes, life.first),
    lambda life: (-life.nbytes * (life.last - life.first + 1), life.first),
    lambda life: (life.first, -life.nbytes),
)


def _lowest(lives: Sequence[Life], bound: int) -> tuple[Offsets, int]:
    """Return the lowest of several placements. Each order starts with the values that ended highest in the one before.

    bound: the search ends at a placement of this height, because none is lower.
    """
    tries = max(1, min(40, 40_000_000 // max(len(lives), 1) ** 2))  # a placement takes the square of the values
    best, height = np.zeros(len(lives), np.int64), -1
    for by in _ORDERS:
        order = sorted(range(len(lives)), key=lambda i: by(lives[i]))
        for _ in range(tries):
            offsets, top = _place(lives, order)
            if height < 0 or top < height:
                best, height = offsets, top
            if height <= bound:
                return best, max(height, 0)
            on_top = [i for i in order if offsets[i] + _aligned(lives[i].nbytes) == top]
            raised = set(on_top)
            order = [*on_top, *(i for i in order if i not in raised)]
    return best, max(height, 0)


def alias(value: Value, place: int) -> int | None:
    """Return the offset, in bytes, of a result of a view in the memory of its operand.

    None if it is not aligned as cuDNN needs it; the result is then copied.
    """
    assert value.node is not None
    start = view_offset(value.node, place) * value.type.dtype.itemsize
    return start if start % VIEW_ALIGNMENT_BYTES == 0 else None


def located(program: Program) -> dict[Value, tuple[Value, int]]:
    """Return, for each value inside the memory of another one, the owner of the memory, and the offset in bytes.

    Raises VerifyError if concats in place need a value in two places, or no concat says where a part is.
    """
    inside: dict[Value, tuple[Value, int]] = {}
    views = [step.nodes[0] for step in program.steps if step.kind is Kind.VIEW]
    for node in reversed(views):  # backwards, because a concat of concats comes after them
        if not isinstance(node.op, Concat):
            continue
        if not joins_in_place(node):
            raise VerifyError(f"{node!r}: is no view")
        joined, start = node.result, 0
        if joined.type.within and joined not in inside:  # it begins where its first operand is in a larger concat
            if node.operands[0] not in inside:
                raise VerifyError(f"{node!r}: nothing says where it is within {list(joined.type.within)}")
            inside[joined] = inside[node.operands[0]]
        whole, base = inside.get(joined, (joined, 0))
        axis = node.op.axis % joined.type.rank
        for value in node.operands:
            place = (whole, base + start * joined.type.strides[axis] * joined.type.dtype.itemsize)
            if inside.setdefault(value, place) != place or value.node is None:
                raise VerifyError(f"{node!r}: {quote(value.name)} cannot be in its part of the result")
            start += value.type.shape[axis]
    for node in views:  # in order of steps, because an operand may be a view, too
        for index, value in enumerate(() if isinstance(node.op, Concat) else node.results):
            start = alias(value, index)
            if start is not None:
                whole, base = inside.get(node.operands[0], (node.operands[0], 0))
                inside[value] = (whole, base + start)
    for step in program.steps:
        for value in step.outputs:
            if value.type.within and value not in inside:
                raise VerifyError(f"{quote(value.name)}: nothing says where it is within {list(value.type.within)}")
    return inside


def _lives(program: Program, inside: Mapping[Value, tuple[Value, int]]) -> list[Life]:
    def root(value: Value) -> Value:
        return inside[value][0] if value in inside else value

    first: dict[Value, int] = dict.fromkeys(program.graph.inputs, -1)
    last: dict[Value, int] = dict.fromkeys(program.graph.inputs, -1)
    for index, step in enumerate(program.steps):
        for value in step.inputs:
            last[root(value)] = index
        for value in step.outputs:  # a larger value lives from its first part on
            home = root(value)
            if home is value or not _is_view(program, value):
                first.setdefault(home, index)
                last[home] = index
    for value in program.graph.outputs:
        last[root(value)] = len(program.steps)
    return [Life(value, value.type.device_bytes, start, last[value]) for value, start in first.items()]


def _prolonged(program: Program, lives: Sequence[Life], inside: Mapping[Value, tuple[Value, int]]) -> list[Life]:
    """Prolong lifetimes for steps that run side by side.

    A value then lives until each later step waits for all steps that read or write the value.
    """
    made: dict[Value, int] = {}
    ahead_of: list[int] = []  # bits of the steps that must have run before each
    touched: dict[Value, int] = {}  # bits of the steps that read or write each value
    for index, step in enumerate(program.steps):
        before = 0
        for value in step.inputs:
            if value in made:
                before |= ahead_of[made[value]] | 1 << made[value]
        ahead_of.append(before)
        made |= dict.fromkeys(step.outputs, index)
        for value in (*step.inputs, *step.outputs):
            root = inside[value][0] if value in inside else value
            touched[root] = touched.get(root, 0) | 1 << index
    result: list[Life] = []
    for life in lives:
        wanted, last = touched.get(life.value, 0), len(program.steps) - 1
        while last > life.last and ahead_of[last] & wanted == wanted:
            last -= 1
        result.append(replace(life, last=max(last, life.last)))
    return result


def _is_view(program: Program, value: Value) -> bool:
    return value.node is not None and program.step_of[value.node].kind is Kind.VIEW


def _live_bytes(lives: Sequence[Life], steps: int) -> int:
    change = np.zeros(steps + 3, np.int64)
    for life in lives:
        change[life.first + 1] += _aligned(life.nbytes)
        change[life.last + 2] -= _aligned(life.nbytes)
    return int(np.cumsum(change).max(initial=0))


def _place(lives: Sequence[Life], order: Sequence[int]) -> tuple[Offsets, int]:
    """Place values in the given order; return the offset of each value, and the height.

    A value gets the smallest gap that is large enough, between those that are alive at the same time.
    """
    count = len(lives)
    first, last, begin, end = (np.zeros(count, np.int64) for _ in range(4))
    offsets, top = np.zeros(count, np.int64), 0
    for placed, i in enumerate(order):
        life, size = lives[i], _aligned(lives[i].nbytes)
        overlapping = np.flatnonzero((first[:placed] <= life.last) & (last[:placed] >= life.first))
        spot = _smallest_gap(begin[overlapping], end[overlapping], size)
        offsets[i], first[placed], last[placed] = spot, life.first, life.last
        begin[placed], end[placed] = spot, spot + size
        top = max(top, spot + size)
    return offsets, top


def _smallest_gap(begin: Offsets, end: Offsets, size: int) -> int:
    """Return the start of the smallest gap between these ranges that has room; without one, the end of the last."""
    order = np.argsort(begin, kind="stable")
    reached = np.concatenate([[0], np.maximum.accumulate(end[order])])  # up to where all before a range is taken
    gaps = begin[order] - reached[:-1]
    fitting = np.flatnonzero(gaps >= size)
    return int(reached[fitting[np.argmin(gaps[fitting])]] if fitting.size else reached[-1])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
