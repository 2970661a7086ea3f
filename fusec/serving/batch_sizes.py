"""Find the batch sizes that a loaded model runs, and split or pad rows to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from fusec.dynamic_shapes.batch_proof import require_batches
from fusec.dynamic_shapes.executable import DynamicExecutable
from fusec.errors import ModelError
from fusec.ir import Graph
from fusec.runtime import Executable
from fusec.system.dataclass import dataclass

RestShapes = tuple[tuple[int, ...], ...]  # the shape of each input without dim 0


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes that programs exist for.

    by_rest: sizes in ascending order, by the shapes of the inputs without dim 0.
    refused: the reason why rows of several calls may not run together; empty if they may.
    """

    by_rest: Mapping[RestShapes, tuple[int, ...]]
    refused: str = ""

    def of(self, rest: RestShapes) -> tuple[int, ...]:
        """Return the ascending sizes for inputs with these other dims; () if rows cannot be split or joined."""
        return () if self.refused else self.by_rest.get(rest, ())

    @property
    def largest(self) -> int:
        """Return the largest batch of a program; 0 if rows cannot be joined."""
        return 0 if self.refused else max((sizes[-1] for sizes in self.by_rest.values()), default=0)


def find_batch_sizes(executable: Executable | DynamicExecutable) -> BatchSizes:
    """Read the batch sizes of a file's programs, and prove that rows may be split, padded and joined.

    Every program is prepared, because the proof is about the graphs that they were compiled from.
    """
    sources: dict[RestShapes, dict[int, Graph]] = defaultdict(dict)
    for graph in _sources(executable):
        shapes = [value.type.shape for value in graph.inputs]
        first = shapes[0][0] if shapes and shapes[0] else 0
        sources[tuple(shape[1:] for shape in shapes)][first] = graph
    found = {rest: tuple(sorted(graphs)) for rest, graphs in sources.items()}
    try:
        for graphs in sources.values():
            require_batches([graphs[size] for size in sorted(graphs)])
    except ModelError as error:
        return BatchSizes(found, str(error))
    return BatchSizes(found)


def _sources(executable: Executable | DynamicExecutable) -> list[Graph]:
    if isinstance(executable, Executable):
        return [executable.compiled.source]
    names = [spec.name for spec in executable.inputs]
    programs = [executable.at(dict(zip(names, key, strict=True))) for key in executable.available or ()]
    return [program.compiled.source for program in programs if isinstance(program, Executable)]


def split_rows(rows: int, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Split rows into runs, each as (first row, number of rows, batch size of the program).

    Full runs of the largest size come first. The rest takes the smallest size that holds it, so one run is padded.
    """
    largest = sizes[-1]
    runs = [(start, largest, largest) for start in range(0, rows - largest + 1, largest)]
    start = len(runs) * largest
    if start < rows:
        runs.append((start, rows - start, next(size for size in sizes if size >= rows - start)))
    return runs
