"""Describe a model in segments: which host steps split it, why, and what the last call spent on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fusec.diagnostics.text_table import WIDTH, bytes_text, wrapped
from fusec.schedule.program import counts
from fusec.system.dataclass import dataclass
from fusec.system.printable import printable

if TYPE_CHECKING:
    from fusec.diagnostics.explain import Explanation


@dataclass(frozen=True)
class HostStepRecord:
    """A host step. Bytes and seconds are those of the last call, None before the first call.

    what: the values that it needs, in words.
    decides: the next segment is compiled for these very values, because they decide shapes or branches.
    values: number of tensors that it reads.
    trips: for a loop, how often its body ran.
    function: the Python function of `custom_ops` that it calls, if it is such an op.
    on_device: the function reads and gives arrays on the device, so that nothing is copied.
    most: rows that its result has at most, if the device computes it and the host reads the number of rows only.
    """

    node: str
    op: str
    what: str
    decides: bool
    values: int
    read_bytes: int | None = None
    written_bytes: int | None = None
    seconds: float | None = None
    trips: int | None = None
    function: str | None = None
    on_device: bool = False
    most: int | None = None

    @property
    def reason(self) -> str:
        """Return in words why the model is split there."""
        if self.function is not None:
            return f"it calls the Python function {self.function} on {'the device' if self.on_device else 'the host'}"
        if self.most is not None:
            return f"the device computes it, and the host reads {self.what}, which is at most {self.most}"
        return f"it needs {self.what} on the host"


@dataclass(frozen=True)
class SegmentRecord:
    """A segment and the host steps after it.

    runs_as: `program`, `numpy` (too small to be compiled for one shape), or `nothing`.
    ops: number of ops.
    seconds: time of the last call for the segment; on a GPU the host steps wait for it, so their time is in theirs.
    waiting: number of nodes of the model that wait for the host steps.
    """

    runs_as: str
    ops: int
    explanation: Explanation | None
    steps: tuple[HostStepRecord, ...]
    waiting: int
    seconds: float | None = None


@dataclass(frozen=True)
class SegmentedExplanation:
    """The segments of a model, as the last call had them. Before the first call only the first one is known."""

    segments: tuple[SegmentRecord, ...]

    @property
    def totals(self) -> dict[str, int]:
        """Return counts over all segments."""
        explained = [each.explanation for each in self.segments if each.explanation is not None]
        return {
            "segments": len(self.segments),
            "host_steps": sum(len(each.steps) for each in self.segments),
            "steps": sum(explanation.totals["steps"] for explanation in explained),
            "launches": sum(explanation.totals["launches"] for explanation in explained),
            "host_bytes": sum((step.read_bytes or 0) for each in self.segments for step in each.steps),
        }

    def to_json(self) -> dict[str, Any]:
        """Return plain data, ready for json.dumps."""
        rows = [
            {
                "runs_as": each.runs_as,
                "ops": each.ops,
                "seconds": each.seconds,
                "waiting": each.waiting,
                "explanation": None if each.explanation is None else each.explanation.to_json(),
                "host_steps": [vars(step) for step in each.steps],
            }
            for each in self.segments
        ]
        return {"totals": self.totals, "segments": rows}

    @property
    def summary(self) -> str:
        """Return the totals in words."""
        t = self.totals
        text = f"{t['segments']} segments, {t['host_steps']} host steps, {counts(t['steps'], t['launches'])}"
        last = self.segments[-1]
        return f"{text}; {last.waiting} nodes wait for the first call" if last.steps else text

    def text(self, width: int = WIDTH, fold: bool = True) -> str:
        """Return the segments and host steps in words. width: of a line. fold: show steps that repeat once."""
        blocks = [
            "\n\n".join([_segment(index, each, width, fold), *_steps(each.steps)])
            for index, each in enumerate(self.segments)
        ]
        return "\n\n".join([*blocks, "\n".join(wrapped(self.summary, "", width))])

    def overview(self, width: int = WIDTH) -> str:
        """Return the summary, and that of each segment."""
        parts = [wrapped(self.summary, "", width)]
        for index, each in enumerate(self.segments):
            words = "" if each.explanation is None else f"; {each.explanation.summary}"
            parts.append(wrapped(f"segment {index} runs as {each.runs_as}{words}", "", width))
        return "\n".join("\n".join(part) for part in parts)

    def __str__(self) -> str:
        return self.text()


def _segment(index: int, record: SegmentRecord, width: int, fold: bool) -> str:
    how = {
        "program": counts(
            *(record.explanation.totals[key] if record.explanation else 0 for key in ("steps", "launches"))
        ),
        "numpy": f"{record.ops} ops in NumPy on the host, because it is small and its shapes vary",
        "nothing": "nothing to compute",
    }[record.runs_as]
    title = f"Segment {index}: {how}{_time(record.seconds)}"
    explained = [] if record.explanation is None else ["", record.explanation.text(width, fold)]
    return "\n".join([*wrapped(title, "", width), *explained])


def _steps(steps: Sequence[HostStepRecord]) -> list[str]:
    lines: list[str] = []
    for step in steps:
        lines += wrapped(f"Host step {printable(step.node)!r} ({step.op}): {printable(step.reason)}.", "", WIDTH)
        if step.decides:
            lines += wrapped("They decide shapes, so the next segment is compiled for these values.", "  ", WIDTH)
        values = f"{step.values} value{'s' * (step.values != 1)}"
        if step.read_bytes is not None and step.written_bytes is not None:
            moved = f"{bytes_text(step.read_bytes)} to the host, {bytes_text(step.written_bytes)} back"
            trips = "" if step.trips is None else f"; its body, a program of its own, ran {step.trips} times"
            lines += wrapped(f"{values}, {moved}{_time(step.seconds)}{trips}", "  ", WIDTH)
        else:
            lines += wrapped(f"{values}; the cost is known after a call", "  ", WIDTH)
    return ["\n".join(lines)] if lines else []


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"; {1e3 * seconds:.3g} ms in the last call"
