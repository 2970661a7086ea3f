"""Hold an explanation as plain data (steps, ops that cuDNN does not run, declined fusions), and print it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from fusec.diagnostics.explain.reasons import reasons
from fusec.diagnostics.explain.step_table import overview, step_lines
from fusec.diagnostics.text_table import WIDTH, bytes_text, wrapped
from fusec.execution.compilation import label
from fusec.schedule.program import counts
from fusec.system.dataclass import dataclass

# NVIDIA's classes of engines (engine_classes.py), and what tables call them.
SINGLE = "pre-compiled single operation"
SPECIALISED = "specialised pre-compiled"
GENERIC = "generic runtime fusion"
SPECIALISED_RUNTIME = "specialised runtime fusion"
UNKNOWN = "unknown"  # cuDNN was not asked, or the plan that runs is not among those it offered
SHORT = {
    SINGLE: "precompiled single",
    SPECIALISED: "precompiled fused",
    GENERIC: "runtime generic",
    SPECIALISED_RUNTIME: "runtime special",
}


@dataclass(frozen=True)
class Edge:
    """A value of 16 bits that one op of a cuDNN step passes to another."""

    value: str
    made_by: str
    read_by: str
    dtype: str
    kept: str  # key of step_table.KEPT


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
        """Return what runs it: an engine class in short, or `cublaslt`, `proposed`, `kernel` or `view`."""
        return SHORT.get(self.engine_class) or self.engine or self.kind


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
    steps: numbers of the steps that run its ops.
    """

    op: str
    ops: str
    stage: str
    code: str
    message: str
    ours: str
    places: tuple[tuple[str, ...], ...]  # source-model nodes of each place
    cause: Cause | None = None
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class FloatEdge:
    """A product, or an operand or result of an integer product, that stays in floats in a quantised model.

    cost_us: how much less time it would take in 8 bits, by the cost model.
    """

    op: str
    value: str
    reason: str
    nodes: tuple[str, ...]  # source-model nodes
    cost_us: float = 0.0


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
            f"{bytes_text(t['written_bytes'])} written, {bytes_text(t['virtual_bytes'])} never stored."
        )

    def reasons(self, width: int = WIDTH) -> str:
        """Return the ops that cuDNN does not run and the fusions declined, each with its reason."""
        return reasons(self, width)

    def text(self, width: int = WIDTH, fold: bool = True) -> str:
        """Return the steps, the summary and the reasons. width: of a line. fold: show steps that repeat once."""
        summary = "\n".join(wrapped(self.summary, "", width))
        return "\n\n".join(["\n".join(step_lines(self.steps, width, fold)), summary, self.reasons(width)])

    def overview(self, width: int = WIDTH) -> str:
        """Return the summary, and the number of steps of each kind."""
        return overview(self, width)

    def __str__(self) -> str:
        return self.text()
