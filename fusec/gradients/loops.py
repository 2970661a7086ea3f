"""Differentiate loops: a loop from the last step to the first, or the ops of all steps if no kernel runs that loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from fusec.builder import Tensor
from fusec.errors import VerifyError
from fusec.gradients.core import BackwardStep, Gradients, Rule, by_formula, reverse, total, zeros
from fusec.ir import Op, Value
from fusec.lowering.scan_plan import scan_plan
from fusec.lowering.unroll_scan import add_step, unroll_scan
from fusec.ops import Scan, Slice

MAX_STEPS = 4096  # that are written out, because each adds the ops of the body, and those of their gradients


def _scan(step: BackwardStep) -> Gradients:
    found = _by_scan(step) if scan_plan(step.op) is not None else None
    return _by_steps(step) if found is None else found


def _by_scan(step: BackwardStep) -> list[Tensor | None] | None:
    """Return the gradients by a loop backward; None if no kernel runs it, as with the gradients of large weights.

    A loop forward gives the states before each step. The states of the loop backward are the gradients of the states,
    and sums of the gradients of what all steps read.
    """
    op, b, active = step.op, step.b, step.active
    count, first = op.states, op.states + op.sequences
    states, sequences, shared = step.x[:count], step.x[count:first], step.x[first:]
    floats = [k for k, state in enumerate(states) if state.dtype.is_float]
    rows = [k for k in range(count, first) if active[k]]
    summed = [k for k in range(first, len(step.x)) if active[k]]
    given = [k for k in range(count, len(step.y)) if step.dys[k] is not None]

    def forward(before: list[Tensor], read: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return _results(step, [*before, *read, *shared])[:count], before

    def backward(held: list[Tensor], read: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        operands = [b.pointwise("identity", x) for x in (*read[:first], *shared)]  # two operands may be one value
        mark = b.last
        outputs = _results(step, operands)
        seeds: dict[Value, list[Tensor]] = {}
        for k, dy in (*zip(floats, held, strict=False), *zip(given, read[first:], strict=True)):
            seeds.setdefault(outputs[k].value, []).append(dy)
        sums = {value: dy for value, parts in seeds.items() if (dy := total(parts)) is not None}
        found = reverse(b, b.since(mark), sums, [x.value for x in operands], step.rules, step.stops)
        new = {k: found.get(operands[k].value) for k in (*floats, *rows, *summed)}
        after = [zeros(states[k]) if (dx := new[k]) is None else dx for k in floats]
        added = [
            old if (dx := new[k]) is None else old + dx for k, old in zip(summed, held[len(floats) :], strict=True)
        ]
        return [*after, *added], [zeros(operands[k]) if (dx := new[k]) is None else dx for k in rows]

    last = [zeros(y) if dy is None else dy for y, dy in zip(step.y, step.dys, strict=True)]
    entered = b.scan(states, sequences, forward, op.steps)[1] if states else []
    backwards = [_reversed(x) for x in (*entered, *sequences, *(last[k] for k in given))]
    begin = [*(last[k] for k in floats), *(zeros(step.x[k]) for k in summed)]
    ended, made = b.scan(begin, backwards, backward, op.steps)
    loops = [t.value.node for t in (*entered[:1], *ended[:1], *made[:1])]
    if any(node is not None and isinstance(node.op, Scan) and scan_plan(node.op) is None for node in loops):
        return None
    gradients = dict(zip((*floats, *summed), ended, strict=True)) | dict(zip(rows, map(_reversed, made), strict=True))
    return [gradients.get(k) for k in range(len(step.x))]


def _results(step: BackwardStep, operands: Sequence[Tensor]) -> list[Tensor]:
    """Add the ops of one step, and return its results."""
    return [Tensor(step.b, v) for v in add_step(step.op, [t.value for t in operands], partial(_add, step))]


def _add(step: BackwardStep, op: Op, operands: Sequence[Value]) -> list[Value]:
    return [t.value for t in step.b.results(op, *(Tensor(step.b, v) for v in operands))]


def _reversed(x: Tensor) -> Tensor:
    """Return a tensor with its rows from the last to the first."""
    return x.builder.apply(Slice.of_rows_backward(x.shape), x)


def _written_out(step: BackwardStep, *operands: Tensor) -> list[Tensor]:
    op: Scan = step.op
    if op.steps > MAX_STEPS:
        raise VerifyError(f"{step.node!r}: a gradient over {op.steps} steps; up to {MAX_STEPS} are supported")
    return [Tensor(step.b, v) for v in unroll_scan(op, [t.value for t in operands], partial(_add, step))]


_by_steps = by_formula(_written_out)
RULES: Mapping[str, Rule] = {"scan": _scan}
