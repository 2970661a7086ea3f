"""Print the reasons of an explanation: ops that cuDNN does not run, declined fusions, and what stays in floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusec.diagnostics.text_table import listed, shortened, wrapped

if TYPE_CHECKING:
    from fusec.diagnostics.explain.data import Cause, Decline, Explanation, FloatEdge

LEAST_US = 0.05  # costs that are printed


def reasons(explanation: Explanation, width: int) -> str:
    """Return the ops that cuDNN does not run and the fusions declined, each with its reason."""
    parts: list[str] = []
    titles = (("Not in a cuDNN step:", explanation.left_out), ("Fusions declined:", explanation.declined))
    for title, declines in titles:
        if declines:
            parts.append("\n".join([title, *(line for d in declines for line in _decline(d, width))]))
    if explanation.floats:
        parts.append("\n".join(["In floats, in a quantised model:", *_float_edges(explanation.floats, width)]))
    every = "in a step proposed to cuDNN" if explanation.note else "in a cuDNN step"
    found = "\n\n".join(parts) or f"Every op is {every} and no fusion was declined."
    return "\n".join([*wrapped(explanation.note, "", width), "", found]) if explanation.note else found


def _float_edges(floats: Sequence[FloatEdge], width: int) -> list[str]:
    """Group what stays in floats by op and reason."""
    groups: dict[tuple[str, str], list[FloatEdge]] = {}
    for edge in floats:
        groups.setdefault((edge.op, edge.reason), []).append(edge)
    lines: list[str] = []
    for (op, reason), edges in groups.items():
        count = f" × {len(edges)}" if len(edges) > 1 else ""
        names = list(dict.fromkeys(e.nodes[0] if e.nodes else e.value for e in edges))
        cost_us = sum(edge.cost_us for edge in edges)
        cost = f"; about {cost_us:.1f} µs more than in 8 bits, by the cost model" if cost_us >= LEAST_US else ""
        lines += [
            f"  {op}{count}  [{listed(names, min(60, width - len(op + count) - 6))}]",
            *wrapped(reason + cost, "    ", width),
        ]
    return lines


def _decline(decline: Decline, width: int) -> list[str]:
    places = [place for names in decline.places for place in names[:1]]
    count = f" × {len(decline.places)}" if len(decline.places) > 1 else ""
    title = f"  {shortened(decline.op or decline.ops, width - 30)}{count}"
    at = f"  [{listed(list(dict.fromkeys(places)), min(60, width - len(title) - 4))}]" if places else ""
    lines = [f"{title}{at}"]
    if decline.op and decline.ops != decline.op:
        lines += wrapped(f"its step: {decline.ops}", "    ", width)
    lines += wrapped(decline.ours, "    ", width)
    if decline.message:
        lines += wrapped(f"{decline.stage}{_code(decline.code)}: {decline.message}", "    ", width)
    if decline.cause is not None:
        lines += _cause(decline, decline.cause, width)
    return lines


def _code(code: str) -> str:
    return f" {code}" if code.startswith(("CUDNN", "SIG")) else ""


def _cause(decline: Decline, cause: Cause, width: int) -> list[str]:
    lines = wrapped(f"smallest refused core ({cause.questions} questions): {cause.graph}", "    ", width)
    if cause.message != decline.message:
        lines += wrapped(f"message for this core: {cause.message}", "    ", width)
    if cause.accepted is None:
        return [*lines, "    no accepted change found"]
    accepted = cause.accepted
    whole = {
        True: "; the whole group is accepted with it, too",
        False: "; the whole group is still refused with it",
        None: "",
    }[accepted.whole]
    plans = f"{accepted.plans} plan{'s' * (accepted.plans != 1)}, {accepted.precompiled} precompiled"
    return [*lines, *wrapped(f"accepted {accepted.change} ({plans}){whole}", "    ", width)]
