"""Tell that a program has many launches, and define what a hint is; `fusec.diagnostics.hints` gives all hints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fusec.diagnostics.text_table import listed
from fusec.execution.compilation import Compiled
from fusec.schedule.program import Kind, Partition, Program
from fusec.system.dataclass import dataclass
from fusec.system.printable import printable

MANY_LAUNCHES = 200
GROWTH = 3  # launches or ops for each node of the model, from which it counts as grown
FEW = 20  # launches or ops that are too few to matter, however much they grew
WIDTH = 80  # room for the names in a hint
_NAMED = 3  # things that a hint names


@dataclass(frozen=True)
class Hint:
    """One thing that a user may want to know.

    kind: `precision`, `unrolled`, `launches`, `quantised`, `rounding` or `budget`.
    grew: there are GROWTH times as many launches or ops as the model has nodes.
    """

    kind: str
    text: str
    grew: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def may_have_grown(program: Program) -> bool:
    """Tell if a program may have GROWTH launches for each node of its model, which need not be read for the answer."""
    nodes = {node.origin[0] for node in program.graph.nodes if node.origin}  # the model has these and perhaps more
    return program.launches >= GROWTH * len(nodes)


def launches(compiled: Compiled) -> Hint | None:
    """Tell that a program has many launches, and which nodes of the model they come from."""
    program = compiled.program
    nodes = {node.origin[0] for node in compiled.source.nodes if node.origin}
    grew = bool(nodes) and program.launches >= max(GROWTH * len(nodes), FEW)
    if program.launches < MANY_LAUNCHES and not grew:
        return None
    of_model = f", from {nodes_text(len(nodes))} of the model" if nodes else ""
    return Hint(
        "launches",
        f"{program.launches} launches{of_model}, and each takes its time, also if it computes little; "
        f"most come from {most_text(_sources(program, grew), 'launches', compiled.source.remarks if grew else {})}",
        grew,
    )


def _sources(program: Program, grew: bool) -> Counter[str]:
    """Count launches by the node of the model they come from; if none became several, by their ops."""
    steps = [step for step in program.steps if step.kind is not Kind.VIEW]

    def origin(step: Partition) -> str:
        """Return the node that a step's products come from; of a rewritten op the op itself."""
        return next((node.origin[0] for node in reversed(step.nodes) if node.origin), step.signature)

    return Counter(map(origin, steps) if grew else (step.signature for step in steps))


def nodes_text(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"


def most_text(counts: Counter[str], what: str, remarks: Mapping[str, str]) -> str:
    """Name the largest of some counts, without those that matter little next to the first.

    remarks: what else there is to say, by name.
    """
    named = counts.most_common(_NAMED)
    large = [(name, count) for name, count in named if 10 * count >= named[0][1]]
    more = {name: f": {printable(remarks[name])}" for name, _ in large if name in remarks}
    return ", ".join(f"{listed((name,), WIDTH)} ({count} {what}{more.get(name, '')})" for name, count in large)
