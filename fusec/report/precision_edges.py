"""Count the edges of a program by element type: stored between steps, inside a step, and weights."""

from __future__ import annotations

from collections import Counter, defaultdict

from fusec.diagnostics.explain.data import Explanation
from fusec.lowering import virtual_rounding
from fusec.report.records import EdgesOfType
from fusec.schedule.program import Kind, Program, inputs_of


def edges_by_type(program: Program, explanation: Explanation) -> tuple[EdgesOfType, ...]:
    """Return a row for each element type, that with most bytes between steps first.

    explanation: says which uses inside a step stay in fp32.
    """
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    stored = set(program.graph.inputs)
    weights: set[int] = set()
    for step in program.steps:
        if step.kind is Kind.VIEW:
            continue
        stored.update(step.outputs)
        for value in step.outputs:
            counts[value.type.dtype.value]["moved"] += value.type.device_bytes
        for value in step.virtual:
            counts[value.type.dtype.value]["inside"] += 1
        for value in inputs_of(step.nodes):
            row = counts[value.type.dtype.value]
            if value.literal is None:
                row["moved"] += value.type.device_bytes
            elif id(value.literal) not in weights:
                weights.add(id(value.literal))
                row["weights"] += 1
                row["weight bytes"] += value.type.device_bytes
    for value in stored:
        counts[value.type.dtype.value]["stored"] += 1
    for edge in (edge for step in explanation.steps for edge in step.edges):
        counts[edge.dtype]["wide"] += edge.kept == virtual_rounding.WIDE
    rows = [
        EdgesOfType(dtype, row["stored"], row["moved"], row["inside"], row["wide"], row["weights"], row["weight bytes"])
        for dtype, row in counts.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.moved_bytes, -row.weight_bytes, row.dtype)))
