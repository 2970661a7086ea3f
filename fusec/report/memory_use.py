"""Tell where the memory of a program goes: values step by step, weights by type, workspace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fusec.execution.compilation import Compiled
from fusec.execution.shared_weights import layout
from fusec.report.records import AliveValue, MemoryUse, PlanChoice
from fusec.schedule.memory_plan import MemoryPlan
from fusec.schedule.program import Kind, inputs_of

LISTED = 12  # values at the peak that a page shows


def memory_use(compiled: Compiled, plan: MemoryPlan, choices: Sequence[PlanChoice | None]) -> MemoryUse:
    """Count the bytes of a program on the device.

    plan: places of the stored values. choices: the plans of the steps.
    """
    count = len(compiled.program.steps)
    change = np.zeros(count + 1, np.int64)
    for life in plan.lives:
        change[max(life.first, 0)] += life.nbytes
        change[min(life.last + 1, count)] -= life.nbytes
    by_step = np.cumsum(change)[:count]
    peak = int(by_step.argmax()) if count else 0
    alive = sorted((life for life in plan.lives if life.first <= peak <= life.last), key=lambda life: -life.nbytes)
    return MemoryUse(
        tuple(map(int, by_step)),
        peak,
        plan.nbytes,
        _weights(compiled),
        max((each.chosen.workspace_bytes for each in choices if each and each.chosen), default=0),
        tuple(AliveValue(x.value.name, str(x.value.type), x.nbytes, x.first, x.last) for x in alive[:LISTED]),
    )


def _weights(compiled: Compiled) -> dict[str, int]:
    """Count the bytes of constants by type, one array for each layout in which steps read them."""
    stored: dict[object, tuple[str, int]] = {}
    for step, lowered in zip(compiled.program.steps, compiled.lowered, strict=True):
        if lowered is not None:
            read = [(binding.literal, binding.type) for binding in lowered.constants]
        elif step.kind is Kind.KERNEL:
            read = [(v.literal, v.type) for v in inputs_of(step.nodes) if v.literal is not None]
        else:
            continue
        for literal, type in read:
            stored[id(literal), layout(type)] = type.dtype.value, type.span * type.dtype.itemsize
    counts: Counter[str] = Counter()
    for dtype, nbytes in stored.values():
        counts[dtype] += nbytes
    return dict(counts.most_common())
