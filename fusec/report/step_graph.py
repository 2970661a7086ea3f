"""Draw the graph of steps: a row for each step, and a lane for each stored value from its maker to its readers.

The rows are in the order in which steps run, so an edge always leads down. As many lanes are next to each other as
values are alive.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.report.records import ReportedProgram, ReportedTensor
from fusec.system.dataclass import dataclass

ROW = 26  # pixels
LANE, MARGIN = 14, 12
WIDEST = 280  # pixels for all lanes; with more lanes they are closer together


@dataclass(frozen=True)
class GraphRow:
    """A row: an input, a step or an output. x, y: its dot. step: number of the step; None for inputs and outputs."""

    x: float
    y: float
    name: str
    kind: str
    step: int | None


@dataclass(frozen=True)
class GraphLine:
    """The lines from one value to all its readers. path: SVG path data."""

    path: str
    dtype: str
    title: str


@dataclass(frozen=True)
class StepGraph:
    """A drawing of `width` by `height` pixels; rows are ROW pixels high."""

    rows: tuple[GraphRow, ...]
    lines: tuple[GraphLine, ...]
    width: float
    height: float


@dataclass
class _Wire:
    """A value between rows: its maker, its last reader, and its lane between them."""

    tensor: ReportedTensor
    start: int
    readers: list[int]
    lane: int = 0


def draw(program: ReportedProgram) -> StepGraph:
    """Draw the steps of a program, its inputs above and its outputs below."""
    names = [(v.name, "input", None) for v in program.inputs]
    names += [(s.explained.ops, s.runner, s.index) for s in program.steps]
    names += [(name, "output", None) for name in program.output_names]
    wires = _wires(program)
    lanes = _assign_lanes(wires, len(names))
    pitch = min(LANE, WIDEST / max(max(lanes, default=0), max((w.lane for w in wires), default=0), 1))

    def x(lane: int) -> float:
        return round(MARGIN + lane * pitch, 1)

    def y(row: int) -> float:
        return row * ROW + ROW / 2

    rows = [GraphRow(x(lanes[row]), y(row), name, kind, step) for row, (name, kind, step) in enumerate(names)]
    lines = [
        GraphLine(
            " ".join(_path((x(lanes[w.start]), y(w.start)), x(w.lane), (x(lanes[r]), y(r))) for r in w.readers),
            w.tensor.dtype,
            f"{w.tensor.name}: {w.tensor.dtype} {w.tensor.shape}",
        )
        for w in wires
    ]
    widest = max((*(row.x for row in rows), *(x(w.lane) for w in wires)), default=0.0)
    return StepGraph(tuple(rows), tuple(lines), round(widest + MARGIN, 1), len(rows) * ROW)


def _wires(program: ReportedProgram) -> list[_Wire]:
    """List the values that lead from one row to another, in the order of their makers."""
    before = len(program.inputs)
    after = before + len(program.steps)
    wires = [_Wire(v, row, [before + r for r in v.readers]) for row, v in enumerate(program.inputs)]
    wires += [
        _Wire(v, before + step.index, [before + r for r in v.readers])
        for step in program.steps
        for v in step.tensors_written
    ]
    made = {(w.tensor.maker, w.tensor.name): w for w in wires[before:]}
    inputs = {w.tensor.name: w for w in wires[:before]}
    for row, output in enumerate(program.outputs, after):
        wire = inputs.get(output.name) if output.maker is None else made.get((output.maker, output.name))
        if wire is not None:  # a constant has none
            wire.readers.append(row)
    return [wire for wire in wires if wire.readers]


def _assign_lanes(wires: Sequence[_Wire], count: int) -> list[int]:
    """Give each value the leftmost lane that is free from its maker to its last reader; return the lane of each row."""
    starting: dict[int, list[_Wire]] = {}
    ending: dict[int, list[_Wire]] = {}
    for wire in wires:
        starting.setdefault(wire.start, []).append(wire)
        ending.setdefault(max(wire.readers), []).append(wire)
    taken: set[int] = set()
    lanes: list[int] = []
    for row in range(count):
        ended = sorted(wire.lane for wire in ending.get(row, ()))
        taken.difference_update(ended)
        own = ended[0] if ended else _free(taken)
        lanes.append(own)
        for place, wire in enumerate(starting.get(row, ())):
            wire.lane = own if place == 0 else _free(taken)
            taken.add(wire.lane)
    return lanes


def _free(taken: set[int]) -> int:
    lane = 0
    while lane in taken:
        lane += 1
    return lane


def _path(start: tuple[float, float], lane: float, end: tuple[float, float]) -> str:
    """Return the SVG path of an edge: into its lane, down, and out of it to the reader."""
    (x0, y0), (x1, y1) = start, end
    half = ROW / 2
    if y1 - y0 <= ROW:
        return f"M{x0} {y0}C{x0} {y0 + half} {x1} {y1 - half} {x1} {y1}"
    entered, left = y0 + ROW, y1 - ROW
    return (
        f"M{x0} {y0}C{x0} {y0 + half} {lane} {entered - half} {lane} {entered}"
        f"V{left}C{lane} {left + half} {x1} {y1 - half} {x1} {y1}"
    )
