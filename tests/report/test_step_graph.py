"""Test the drawing of the steps: each value has a lane of its own while it is alive, and each edge arrives."""

from __future__ import annotations

import re

import pytest
from diagnostics.explain.test_explain import CONV
from report.programs import BLOCK, lenient, program

from fusec.report.step_graph import ROW, WIDEST, StepGraph, draw

WIDE = (
    'graph "wide" (%x: f32[1,8,6,6]) {\n  %w = constant weight("w") : f32[8,8,3,3]\n'
    + "".join(f"  %c{i} = conv(%x, %w) {CONV} : f32[1,8,6,6]\n  %s{i} = sign(%c{i})\n" for i in range(40))
    + f"  %j = concat({', '.join(f'%s{i}' for i in range(40))}) {{axis=1}}\n  return %j\n}}"
)


def ends(path: str) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The start and end of each part of a path."""
    found = []
    for part in path.split("M")[1:]:
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", part)]
        found.append(((numbers[0], numbers[1]), (numbers[-2], numbers[-1])))
    return found


def edges(drawing: StepGraph) -> set[tuple[int, int]]:
    dots = {(row.x, row.y): place for place, row in enumerate(drawing.rows)}
    return {(dots[start], dots[end]) for line in drawing.lines for start, end in ends(line.path)}


@pytest.mark.parametrize("text", [BLOCK, WIDE])
def test_every_edge_of_the_program_is_drawn(text: str) -> None:
    found = program(text, judge=lenient())
    drawing = draw(found)
    before, after = len(found.inputs), len(found.inputs) + len(found.steps)
    assert [row.step for row in drawing.rows] == [
        *(None for _ in found.inputs),
        *range(len(found.steps)),
        *(None for _ in found.outputs),
    ]
    want = {(place, before + r) for place, v in enumerate(found.inputs) for r in v.readers}
    for step in found.steps:
        want |= {(before + step.index, before + r) for v in step.tensors_written for r in v.readers}
    want |= {(before + v.maker, after + place) for place, v in enumerate(found.outputs) if v.maker is not None}
    assert edges(drawing) == want
    assert all(start < end for start, end in want)


@pytest.mark.parametrize("text", [BLOCK, WIDE])
def test_long_lines_of_different_values_never_lie_on_each_other(text: str) -> None:
    """A vertical part of a line occupies its lane; two values may meet at a dot alone."""
    drawing = draw(program(text, judge=lenient()))
    taken: dict[tuple[float, int], str] = {}
    for number, line in enumerate(drawing.lines):
        for x, y, end in re.findall(r"([\d.]+) ([\d.]+)V([\d.]+)", line.path):
            for row in range(int(float(y) // ROW), int(float(end) // ROW) + 1):
                assert taken.setdefault((float(x), row), str(number)) == str(number)
    assert drawing.height == len(drawing.rows) * ROW


def test_many_lanes_move_together() -> None:
    drawing = draw(program(WIDE, judge=lenient()))
    assert len({row.x for row in drawing.rows} | {0.0}) > 2
    assert drawing.width < WIDEST + 30
