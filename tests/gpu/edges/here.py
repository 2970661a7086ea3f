"""Rows on the CPU: lowered graphs by the simulator, kernels by the emulator that compiles their very source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from gpu.edges import forms
from gpu.edges.judged import Disagreement, disagreements
from gpu.edges.row import Row
from gpu.kernels.emulator import Emulator

from fusec.lowering.simulator import simulate

Found = tuple[str, str, list[Disagreement]]  # row, form, what differs


def simulated(rows: Iterable[Row]) -> Iterator[Found]:
    """Each spelling of each row that is lowered."""
    for row in rows:
        for spelling, made in forms.lowered(row):
            found: list[Disagreement] = []
            for feeds in row.feeds:
                with np.errstate(all="ignore"):
                    got = forms.by_graph(row, made, feeds, simulate)
                found += disagreements(row, feeds, got)
            yield row.name, f"simulated {spelling}".strip(), found


def emulated(rows: Iterable[Row]) -> Iterator[Found]:
    """Each kernel of each row, and those that do the same."""
    jobs = [(row, way, kernel) for row in rows for way, kernel in forms.kernels(row)]
    emulator = Emulator([kernel for _, _, kernel in jobs])
    for row, way, kernel in jobs:
        found: list[Disagreement] = []
        for feeds in row.feeds:
            got = emulator.run(kernel, forms.operands(row, feeds), row.outputs)
            found += disagreements(row, feeds, forms.ordered(row, got))
        yield row.name, f"emulated {way}".strip(), found


def compiled(rows: Iterable[Row]) -> Iterator[Found]:
    """Rows that are compiled whole."""
    for row in rows:
        if row.whole:
            run = forms.compiled(row)
            yield row.name, "compiled", [d for feeds in row.feeds for d in disagreements(row, feeds, run(feeds))]
