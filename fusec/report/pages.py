"""Write a report about a compiled model as one HTML file: steps, plans, refusals, limits and times, memory, precision.

    from fusec import report
    report.write("report.html", report.of_executable(executable, "my model"))

It needs Jinja2 (extra `report`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fusec.report.charts import Area, Bar, Roof, memory_area, roofline, shares
from fusec.report.records import ReportedProgram
from fusec.report.render import RUNNERS, page
from fusec.report.side_by_side import SideBySide
from fusec.report.step_graph import StepGraph, draw
from fusec.system import atomic_write
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class _Graph:
    """The drawing of a program, with the kinds of steps and types of values that its legend names."""

    drawing: StepGraph
    kinds: frozenset[str]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class _Longest:
    """The sum and the largest of the times of the steps, measured or at their limits, in microseconds."""

    total: float
    step: float


@dataclass(frozen=True)
class _View:
    """A program with the coordinates of its charts."""

    program: ReportedProgram
    graph: _Graph
    roof: Roof
    longest: _Longest
    area: Area
    bars: Mapping[str, tuple[Bar, ...]]


def report_page(title: str, programs: Sequence[ReportedProgram], side: SideBySide | None = None) -> str:
    """Return the page of a model.

    programs: one, or those between the host steps of a model, each with an anchor of its own.
    side: the same model on several GPUs.
    Raises FusecError if Jinja2 is not installed.
    """
    return page("report.html.jinja", title=title, views=list(map(_view, programs)), fleet=side)


def difference_page(side: SideBySide) -> str:
    """Return the page that compares two programs. Raises FusecError if Jinja2 is not installed."""
    return page("diff.html.jinja", side=side)


def write(path: str | Path, *programs: ReportedProgram) -> None:
    """Write the page of a model as a whole file. Raises FusecError if Jinja2 is not installed."""
    text = report_page(programs[0].title, programs)
    with atomic_write.written(Path(path).resolve(), durable=True) as file:
        file.write(text.encode())


def _view(program: ReportedProgram) -> _View:
    """Prepare what the template draws of a program: its graph, roofline, memory and shares."""
    working = program.working
    times = [step.limit_us if program.is_simulated else step.time_us or 0.0 for step in working]
    launches: dict[str, float] = dict.fromkeys(RUNNERS, 0)
    for step in working:
        launches[step.runner] += 1
    memory = program.memory
    uses = {"weights": memory.weight_bytes, "arena": memory.arena_bytes, "workspace": memory.workspace_bytes}
    labels = {"weights": "weights", "arena": "values in the arena", "workspace": "largest workspace"}
    drawing = draw(program)
    return _View(
        program,
        _Graph(
            drawing,
            frozenset(step.runner for step in program.steps),
            tuple(dict.fromkeys(line.dtype for line in drawing.lines)),
        ),
        roofline(program),
        _Longest(sum(times), max(times, default=0.0)),
        memory_area(memory),
        {
            "launches": shares(launches, RUNNERS),
            "memory": shares(uses, labels),
            "precision": shares({row.dtype: row.moved_bytes for row in program.edges}),
        },
    )
