"""Save programs for several sets of input shapes as one `.fusec` file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from fusec import lockfile
from fusec.artifacts import fusec_file
from fusec.artifacts.shape_table import Padded, ShapeTable
from fusec.dynamic_shapes.padding import Padding
from fusec.dynamic_shapes.sizing import Shapes, Sizing
from fusec.errors import FusecError
from fusec.execution.compilation import Compiled
from fusec.gpu.launch.cubins import CompiledKernels
from fusec.plans.plan_record import Entry

MAX_PROGRAMS = 64  # in a file; for more sizes than this, programs are better compiled where they run
MAX_PADDED = 4096  # sets of input shapes that are padded


def representatives(sizing: Sizing, padding: Padding) -> list[Shapes]:
    """Return the input shapes for which a file holds programs, the likely ones first.

    The sizes of a dim are its buckets, else the least, likely and largest size of its range. There are none if a dim
    has no range.
    Raises FusecError if there are too many.
    """
    if sizing.likely is None:
        return []
    sizes = list(itertools.islice(sizing.representatives(padding.buckets), MAX_PROGRAMS + 1))
    if len(sizes) > MAX_PROGRAMS:
        raise FusecError(f"a file holds at most {MAX_PROGRAMS} programs: give fewer buckets, or ranges of fewer dims")
    return [sizing.by_input(each) for each in sizes]


def save(
    path: str | os.PathLike[str],
    programs: Sequence[tuple[Compiled, lockfile.Plans]],
    sizing: Sizing,
    padding: Padding,
    *,
    kernels: CompiledKernels | None = None,
    sources: bool = False,
) -> None:
    """Write programs with their plans, for one target or several; the first program's shapes are the default.

    kernels: compiled kernels of all programs.
    sources: also store the weights that only the imported model has.
    Raises ModelError if input shapes that would be padded cannot be.
    """
    plans: dict[tuple[str, str], Sequence[Entry]] = {}
    for _, each in programs:
        plans |= each
    compiled = [program for program, _ in programs]
    table = _shape_table(compiled, sizing, padding)
    fusec_file.save(os.fspath(path), compiled, plans, table, kernels=kernels, sources=sources)


def _shape_table(programs: Sequence[Compiled], sizing: Sizing, padding: Padding) -> ShapeTable:
    """Return what a file says about shapes: dims, ranges, buckets, and which shapes are padded to which program."""
    large = {
        tuple(v.type.shape for v in program.source.inputs): program for program in programs
    }  # once for all targets
    smaller = (
        exact
        for program in large.values()
        for exact in padding.smaller({v.name: v.type.shape for v in program.source.inputs})
    )
    found = list(itertools.islice(smaller, MAX_PADDED + 1))
    if len(found) > MAX_PADDED:
        raise FusecError(f"more than {MAX_PADDED} sets of input shapes are padded: give more buckets, or smaller ones")
    padded: list[Padded] = []
    for exact in found:
        crops = tuple(crop.steps for crop in padding.crops(exact))
        padded.append((tuple(exact[spec.name] for spec in sizing.inputs), crops))
    ranges = {name: (each.least, each.likely, each.most) for name, each in sizing.ranges.items()}
    return ShapeTable(sizing.inputs, sizing.outputs, ranges, padding.buckets, tuple(padded))
