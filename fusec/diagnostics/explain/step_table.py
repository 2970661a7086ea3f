"""Print the steps of an explanation as a table that fits its width, with equal layers folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusec.diagnostics.explain.folding import Fold, folds, name_range
from fusec.diagnostics.text_table import GAP, bytes_text, listed, shortened, table, wrapped

if TYPE_CHECKING:
    from fusec.diagnostics.explain.data import Explanation, Step

_TEXT_WIDTH = 34  # of the columns `ops` and `model nodes` together, at least
_NODES_WIDTH = 18  # at least
_KINDS = 12  # rows of an overview
_LEAVES_OUT = ("plans", "never stored", "written", "read")  # columns to leave out on a narrow terminal, in this order

# Descriptions of how a value reaches its reader: in fp32, in fp32 with the same result, or rounded.
KEPT = {
    "fp32": "kept in fp32, not rounded to {dtype}",
    "same": "kept in fp32, with the result that rounding to {dtype} would give",
    "rounded": "rounded to {dtype} before a product",
}


def step_lines(steps: Sequence[Step], width: int, fold: bool) -> list[str]:
    """Return the table of the steps, and the notes below it.

    fold: show equal layers once, and leave views out, so that an op that moves elements is one row.
    """
    everything, launching = steps, [step for step in steps if step.kind != "view"]
    steps = launching if fold and launching else everything
    found = folds([_key(step) for step in steps]) if fold else [Fold(place, 1, 1) for place in range(len(steps))]
    columns: dict[str, list[str]] = {name: [] for name in ("times", "#", "runs as", "plans", "ops")}
    columns |= {name: [] for name in ("model nodes", "read", "written", "never stored")}
    nodes: list[Sequence[str]] = []
    for each in found:
        for offset in range(each.length):
            same = steps[each.start + offset : each.start + each.length * each.times : each.length]
            for name, cell in _cells(same[0], each, offset).items():
                columns[name].append(cell)
            nodes.append(_nodes(same))
    if not any(columns["times"]):
        del columns["times"]
    lines = _fitted(columns, nodes, width)
    if "times" in columns:
        what = "as often as the first column says; the rows show the first of them. --all shows every step"
        lines += wrapped(f"×: equal steps, {what}", "", width)
    if views := len(everything) - len(steps):
        what = "view, which launches nothing, is" if views == 1 else "views, which launch nothing, are"
        lines += wrapped(f"{views} {what} left out. --all shows every step", "", width)
    spelled = {words: s.ops for s in reversed(steps) for words in s.spelling}
    for words, example in sorted(spelled.items()):
        lines += wrapped(f"* reassociated: {words} (as in {example})", "", width)
    return lines + _edges(steps, width)


def _key(step: Step) -> tuple[object, ...]:
    """Return what equal steps have in common; names of values and nodes differ."""
    sizes = step.read_bytes, step.written_bytes, step.virtual_bytes
    return step.runs_as, step.ops, step.plans, step.precompiled, step.spelling, *sizes


def _cells(step: Step, fold: Fold, offset: int) -> dict[str, str]:
    """Return the cells of a row, but the model nodes. offset: place of the step in its layer."""
    mark = "" if fold.length == 1 else "┌" if offset == 0 else "└" if offset == fold.length - 1 else "│"
    times = f"{fold.times}×" if fold.times > 1 and offset == 0 else ""
    return {
        "times": f"{times} {mark or ' '}" if times or mark else "",
        "#": str(step.index),
        "runs as": step.runs_as,
        "plans": f"{step.plans} ({step.precompiled} pre)" if step.plans else "",
        "ops": step.ops + (" *" if step.spelling else ""),
        "model nodes": "",
        "read": bytes_text(step.read_bytes),
        "written": bytes_text(step.written_bytes),
        "never stored": bytes_text(step.virtual_bytes) if step.virtual_bytes else "",
    }


def _nodes(same: Sequence[Step]) -> Sequence[str]:
    """Return the model nodes of equal steps, with what differs as a range."""
    if len({len(step.nodes) for step in same}) > 1:
        return (*same[0].nodes, "…")
    return [name_range(names) for names in zip(*(step.nodes for step in same), strict=True)]


def _fitted(columns: dict[str, list[str]], nodes: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return a table that fits the width: columns are left out, and ops and nodes are shortened."""
    room = 0
    for name in ("", *_LEAVES_OUT):
        columns.pop(name, None)
        fixed = [max(map(len, (key, *cells))) for key, cells in columns.items() if key not in ("ops", "model nodes")]
        room = width - sum(fixed) - (len(columns) - 1) * len(GAP)
        if room >= _TEXT_WIDTH:
            break
    ops_width = max(min(max(map(len, ("ops", *columns["ops"]))), room - _NODES_WIDTH), 3)
    columns["ops"] = [shortened(text, ops_width) for text in columns["ops"]]
    columns["model nodes"] = [listed(names, max(room - ops_width, len("model nodes"))) for names in nodes]
    header = ["" if name == "times" else name for name in columns]
    right = [place for place, name in enumerate(columns) if name in ("times", "#", "read", "written", "never stored")]
    return table(header, list(zip(*columns.values(), strict=True)), right)


def _edges(steps: Sequence[Step], width: int) -> list[str]:
    """Describe the rounding of values inside the steps. Equal cases are counted."""
    counts: dict[str, Counter[str]] = {}
    for edge in (edge for step in steps for edge in step.edges):
        words = KEPT[edge.kept].format(dtype=edge.dtype)
        counts.setdefault(words, Counter())[f"{edge.made_by} → {edge.read_by}"] += 1
    lines: list[str] = []
    for words, found in sorted(counts.items()):
        named = ", ".join(f"{edge} ({n}×)" if n > 1 else edge for edge, n in found.items())
        lines += wrapped(f"inside steps, {words}: {named}", "", width)
    return lines


def overview(explanation: Explanation, width: int) -> str:
    """Return the summary, the number of steps of each kind, and how many reasons there are."""
    kinds = Counter((step.runs_as, step.ops) for step in explanation.steps)
    rows: list[tuple[str, ...]] = []
    for (runs_as, ops), count in kinds.most_common(_KINDS):
        same = [step for step in explanation.steps if (step.runs_as, step.ops) == (runs_as, ops)]
        sizes = sum(s.read_bytes for s in same), sum(s.written_bytes for s in same)
        rows.append((str(count), runs_as, *map(bytes_text, sizes), shortened(ops, max(width - 48, 20))))
    lines = table(("steps", "runs as", "read", "written", "ops"), rows, right=(0, 2, 3))
    if len(kinds) > _KINDS:
        lines.append(f"and {sum(kinds.values()) - sum(n for _, n in kinds.most_common(_KINDS))} steps of other kinds")
    left, declined = (len(each) for each in (explanation.left_out, explanation.declined))
    more = f"{left} kinds of ops in no cuDNN step, {declined} fusions declined; without --summary each has its reason."
    parts = ["\n".join(wrapped(explanation.summary, "", width)), "\n".join(lines), "\n".join(wrapped(more, "", width))]
    if explanation.note:
        parts.insert(1, "\n".join(wrapped(explanation.note, "", width)))
    return "\n\n".join(parts)
