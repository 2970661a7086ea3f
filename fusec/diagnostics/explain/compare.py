"""Compare explanations for several targets: totals, then the groups of ops that run differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fusec.diagnostics.explain.data import Explanation, Step
from fusec.diagnostics.text_table import bytes_text, listed, table

T = TypeVar("T")
_NODES_WIDTH = 40
_TOTALS = (
    ("steps", "steps"),
    ("launches", "launches"),
    ("cudnn", "cuDNN steps"),
    ("precompiled", "  precompiled"),
    ("runtime", "  compiled at run time"),
    ("kernels", "other kernels"),
    ("virtual_bytes", "never stored"),
)


def compare(explanations: Sequence[tuple[str, Explanation]]) -> str:
    """Return a table with a column per target, for explanations of one model with the same options."""
    names = [name for name, _ in explanations]
    asked = all(not e.note for _, e in explanations)
    rows: list[tuple[str, ...]] = [
        (
            label if asked or key != "cudnn" else "steps proposed to cuDNN",
            *(_number(key, e.totals[key]) for _, e in explanations),
        )
        for key, label in _TOTALS
    ]
    parts = ["\n".join(table(("", *names), rows, right=range(1, len(names) + 1)))]
    programs = [e.steps for _, e in explanations]
    groups = step_groups(programs, lambda step: step.values, lambda step: step.kind != "view")
    differing: dict[tuple[str, ...], list[str]] = {}
    same = 0
    for group in groups:
        cells = tuple(map(_cell, group))
        if len(set(cells)) == 1:
            same += 1
            continue
        nodes = dict.fromkeys(n for step in group[0] for n in step.nodes)
        differing.setdefault(cells, []).append(", ".join(nodes))
    if differing:
        rows = [(listed(places, _NODES_WIDTH), *cells) for cells, places in differing.items()]
        parts.append("\n".join(table(("differs at", *names), rows)))
    parts.append(f"{same} of {len(groups)} groups of ops run the same way on all")
    return "\n\n".join(parts)


def _number(key: str, value: int) -> str:
    return bytes_text(value) if key.endswith("bytes") else str(value)


def _cell(steps: Sequence[Step]) -> str:
    return " | ".join(f"{s.ops} ({s.runs_as})" for s in steps)


def step_groups(
    programs: Sequence[Sequence[T]], values: Callable[[T], Sequence[str]], works: Callable[[T], bool]
) -> list[list[list[T]]]:
    """Group steps that share values in any program, so that no group splits a step.

    values: names what a step computes
    works: tells if a step does work; a view only joins others

    Returns the steps of each group, by program.
    """
    from networkx.utils import UnionFind  # here, because networkx takes long to import and few commands compare

    joined = UnionFind()
    for steps in programs:
        for step in steps:
            joined.union(*values(step))
    groups: dict[str, list[list[T]]] = {}
    for index, steps in enumerate(programs):
        for step in filter(works, steps):
            groups.setdefault(joined[values(step)[0]], [[] for _ in programs])[index].append(step)
    return list(groups.values())
