"""Hold an explanation as plain data (steps, ops that cuDNN does not run, declined fusions), and print it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fusec.diagnostics.explain.table import GAP, bytes_text, listed, shortened, table, wrapped
from fusec.execution.compilation import label
from fusec.schedule.program import counts

WIDTH = 118
_NODES_WIDTH = 18  # at least


@dataclass(frozen=True)
class Edge:
    """A value of 16 bits that one op of a cuDNN step passes to another."""

    value: str
    made_by: str
    read_by: str
    dtype: str
    kept: str  # key of KEPT


# Descriptions of how a value reaches its reader: in fp32, in fp32 with the same result, or rounded.
KEPT = {
    "fp32": "kept in fp32, not rounded to {dtype}",
    "same": "kept in fp32, with the result that rounding to {dtype} would give",
    "rounded": "rounded to {dtype} in front of a product",
}


@dataclass(frozen=True)
class Step:
    """One step of the program. Bytes are of stored tensors, constants among those read."""

    index: int
    kind: str  # cudnn, kernel, view
    ops: str
    values: tuple[str, ...]  # results of its nodes, by their names in the optimised graph
    nodes: tuple[str, ...]  # source-model nodes
    # precompiled or runtime for cuDNN, cublaslt, or proposed if cuDNN was not asked; empty for other steps
    engine: str
    plans: int
    precompiled: int
    spelling: tuple[str, ...]  # what was reassociated, in words
    virtual_bytes: int  # of values that never reach memory
    read_bytes: int
    written_bytes: int
    edges: tuple[Edge, ...] = ()
    engine_class: str = ""  # of a cuDNN step, in NVIDIA's words (engine_classes.py)

    @property
    def runs_as(self) -> str:
        """`precompiled`, `runtime`, `cublaslt`, `proposed`, `kernel` or `view`."""
        return self.engine or self.kind


@dataclass(frozen=True)
class Accepted:
    """A change that makes a core accepted.

    whole: True if it makes the whole refused body accepted too; None if that was not asked.
    """

    change: str
    ops: str
    graph: str
    plans: int
    precompiled: int
    whole: bool | None


@dataclass(frozen=True)
class Cause:
    """A reduced refusal: the smallest body that is still refused, its message, and a change that cuDNN accepts."""

    ops: str
    graph: str  # in fusec's text form
    stage: str
    code: str
    message: str
    accepted: Accepted | None
    questions: int


@dataclass(frozen=True)
class Decline:
    """An op that cuDNN does not run, or a fusion that was declined. Equal ones are one entry with all their places.

    op: the op that cuDNN does not run; empty for a declined fusion.
    message: cuDNN's message, or fusec's at stages `lower` and `fusec`.
    ours: the meaning of the message.
    """

    op: str
    ops: str
    stage: str
    code: str
    message: str
    ours: str
    places: tuple[tuple[str, ...], ...]  # source-model nodes of each place
    cause: Cause | None = None


@dataclass(frozen=True)
class FloatEdge:
    """A product, or the result of an integer product, that stays in floats in a quantised model."""

    op: str
    value: str
    reason: str
    nodes: tuple[str, ...]  # source-model nodes


@dataclass(frozen=True)
class Explanation:
    """The steps of a program for one target, the ops that cuDNN does not run, and the declined fusions.

    asked: False if cuDNN was not asked, so that the steps are only proposed by fusec's rules.
    floats: what stays in floats in a quantised model.
    """

    target: str
    steps: tuple[Step, ...]
    left_out: tuple[Decline, ...]
    declined: tuple[Decline, ...]
    asked: bool = True
    floats: tuple[FloatEdge, ...] = ()

    @property
    def note(self) -> str:
        """Return the note that goes with the explanation; empty if cuDNN was asked."""
        return label(self.asked, self.target)

    @property
    def totals(self) -> dict[str, int]:
        """Return counts and sums over the steps."""
        return {
            "steps": len(self.steps),
            "launches": sum(s.kind != "view" for s in self.steps),
            "cudnn": sum(s.kind == "cudnn" and s.engine != "cublaslt" for s in self.steps),
            "precompiled": sum(s.engine == "precompiled" for s in self.steps),
            "runtime": sum(s.engine == "runtime" for s in self.steps),
            "cublaslt": sum(s.engine == "cublaslt" for s in self.steps),
            "kernels": sum(s.kind == "kernel" and s.engine != "cublaslt" for s in self.steps),
            "views": sum(s.kind == "view" for s in self.steps),
            "read_bytes": sum(s.read_bytes for s in self.steps),
            "written_bytes": sum(s.written_bytes for s in self.steps),
            "virtual_bytes": sum(s.virtual_bytes for s in self.steps),
        }

    @property
    def engine_classes(self) -> dict[str, int]:
        """Return the number of cuDNN steps of each engine class, the most frequent first."""
        return dict(Counter(s.engine_class for s in self.steps if s.engine_class).most_common())

    def to_json(self) -> dict[str, Any]:
        """Return plain data, ready for json.dumps."""
        data = asdict(self)
        first = {"target": data.pop("target"), "totals": self.totals, "engine_classes": self.engine_classes}
        return {**first, "cudnn_asked": data.pop("asked"), **data}

    @property
    def summary(self) -> str:
        """Return the totals in words."""
        t = self.totals
        cublaslt = f"{t['cublaslt']} steps of cuBLASLt, " if t["cublaslt"] else ""
        classes = ", ".join(f"{count} {name}" for name, count in self.engine_classes.items())
        steps = "steps proposed to cuDNN" if self.note else f"cuDNN steps{f' ({classes})' if classes else ''}"
        return (
            f"{self.target}: {counts(t['steps'], t['launches'])}: "
            f"{t['cudnn']} {steps}, {cublaslt}{t['kernels']} other kernels. {bytes_text(t['read_bytes'])} read, "
            f"{bytes_text(t['written_bytes'])} written, {bytes_text(t['virtual_bytes'])} kept virtual."
        )

    def reasons(self) -> str:
        """Return the ops that cuDNN does not run and the fusions declined, each with its reason."""
        parts: list[str] = []
        for title, declines in (("Not in a cuDNN step:", self.left_out), ("Fusions declined:", self.declined)):
            if declines:
                parts.append("\n".join([title, *(line for d in declines for line in _decline(d))]))
        if self.floats:
            parts.append("\n".join(["In floats, in a quantised model:", *_float_edges(self.floats)]))
        every = "in a step proposed to cuDNN" if self.note else "in a cuDNN step"
        found = "\n\n".join(parts) or f"Every op is {every} and no fusion was declined."
        return "\n".join([*wrapped(self.note, "", WIDTH), "", found]) if self.note else found

    def __str__(self) -> str:
        return "\n\n".join(["\n".join(_steps(self.steps)), "\n".join(wrapped(self.summary, "", WIDTH)), self.reasons()])


def _steps(steps: Sequence[Step]) -> list[str]:
    header = ("#", "runs as", "plans", "ops", "model nodes", "read", "written", "kept virtual")
    numbers = [
        (
            str(s.index),
            s.runs_as,
            f"{s.plans} ({s.precompiled} pre)" if s.plans else "",
            bytes_text(s.read_bytes),
            bytes_text(s.written_bytes),
            bytes_text(s.virtual_bytes) if s.virtual_bytes else "",
        )
        for s in steps
    ]
    taken = sum(len(max(column, key=len)) for column in zip((*header[:3], *header[5:]), *numbers, strict=True))
    room = WIDTH - taken - (len(header) - 1) * len(GAP)
    ops = [s.ops + (" *" if s.spelling else "") for s in steps]
    ops_width = min(max(map(len, ("ops", *ops))), room - _NODES_WIDTH)
    rows = [
        (*first[:3], shortened(text, ops_width), listed(s.nodes, room - ops_width), *first[3:])
        for first, text, s in zip(numbers, ops, steps, strict=True)
    ]
    lines = table(header, rows, right=(0, 5, 6, 7))
    spelled = {words: s.ops for s in reversed(steps) for words in s.spelling}
    for words, example in sorted(spelled.items()):
        lines += wrapped(f"* reassociated: {words} (as in {example})", "", WIDTH)
    return lines + _edges(steps)


def _edges(steps: Sequence[Step]) -> list[str]:
    """Describe the rounding of values inside the steps. Equal cases are counted."""
    counts: dict[str, Counter[str]] = {}
    for edge in (edge for step in steps for edge in step.edges):
        words = KEPT[edge.kept].format(dtype=edge.dtype)
        counts.setdefault(words, Counter())[f"{edge.made_by} → {edge.read_by}"] += 1
    lines: list[str] = []
    for words, found in sorted(counts.items()):
        named = ", ".join(f"{edge} ({n}×)" if n > 1 else edge for edge, n in found.items())
        lines += wrapped(f"inside steps, {words}: {named}", "", WIDTH)
    return lines


def _float_edges(floats: Sequence[FloatEdge]) -> list[str]:
    """Group what stays in floats by op and reason."""
    groups: dict[tuple[str, str], list[FloatEdge]] = {}
    for edge in floats:
        groups.setdefault((edge.op, edge.reason), []).append(edge)
    lines: list[str] = []
    for (op, reason), edges in groups.items():
        count = f" × {len(edges)}" if len(edges) > 1 else ""
        names = list(dict.fromkeys(e.nodes[0] if e.nodes else e.value for e in edges))
        lines += [f"  {op}{count}  [{listed(names, 60)}]", *wrapped(reason, "    ", WIDTH)]
    return lines


def _decline(decline: Decline) -> list[str]:
    places = [place for names in decline.places for place in names[:1]]
    count = f" × {len(decline.places)}" if len(decline.places) > 1 else ""
    at = f"  [{listed(list(dict.fromkeys(places)), 60)}]" if places else ""
    lines = [f"  {decline.op or decline.ops}{count}{at}"]
    if decline.op and decline.ops != decline.op:
        lines += wrapped(f"as {decline.ops}", "    ", WIDTH)
    lines += wrapped(decline.ours, "    ", WIDTH)
    if decline.message:
        lines += wrapped(f"{decline.stage}{_code(decline.code)}: {decline.message}", "    ", WIDTH)
    if decline.cause is not None:
        lines += _cause(decline, decline.cause)
    return lines


def _code(code: str) -> str:
    return f" {code}" if code.startswith(("CUDNN", "SIG")) else ""


def _cause(decline: Decline, cause: Cause) -> list[str]:
    lines = wrapped(f"smallest refused core ({cause.questions} questions): {cause.graph}", "    ", WIDTH)
    if cause.message != decline.message:
        lines += wrapped(f"of which: {cause.message}", "    ", WIDTH)
    if cause.accepted is None:
        return [*lines, "    no accepted variant found"]
    accepted = cause.accepted
    whole = {True: "; the whole too", False: "; not the whole", None: ""}[accepted.whole]
    plans = f"{accepted.plans} plans, {accepted.precompiled} precompiled"
    return [*lines, *wrapped(f"accepted {accepted.change} ({plans}){whole}", "    ", WIDTH)]
