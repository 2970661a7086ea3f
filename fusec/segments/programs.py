"""Cache the segments of a model and their programs, by the answers of the host steps before them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from fusec.ir import Graph
from fusec.ops.op_sets import ATTENTION_OPS, PRODUCTS
from fusec.runtime import Executable
from fusec.system.dataclass import dataclass

if TYPE_CHECKING:
    from fusec.frontends.onnx.emission.host_values import Answer
    from fusec.frontends.onnx.segmented.segments import Segment

# Segments that are cached. Detectors find another number of boxes in each call, but most of those are small.
MAX_SEGMENTS = 64
# A segment of fewer elements runs in NumPy: that takes less time than compiling it for shapes that may not come again.
SMALL_ELEMENTS = 1 << 20

Path = tuple[Hashable, ...]  # what each host step gave on the way to a segment
Compile = Callable[[Graph, Hashable], Executable]  # a graph, and the place of its host step


@dataclass(frozen=True)
class PreparedSegment:
    """A segment that is ready to run. program: None if NumPy runs its graph, or there is nothing to run."""

    segment: Segment
    program: Executable | None


class SegmentPrograms:
    """The segments that calls needed, the ones used last, with their programs."""

    def __init__(self, first: Segment, compile: Compile):
        self._compile = compile
        self.first = PreparedSegment(first, None if first.graph is None else compile(first.graph, ()))
        self._prepared: OrderedDict[Path, PreparedSegment] = OrderedDict()

    @property
    def programs(self) -> list[tuple[int, Executable]]:
        """Return the programs that are compiled, each with the number of host steps before it."""
        known = [((), self.first), *self._prepared.items()]
        return [(len(path), each.program) for path, each in known if each.program is not None]

    def following(self, path: Path, before: PreparedSegment, answers: Sequence[Answer]) -> PreparedSegment:
        """Return the segment after a host step, and prepare it if these answers are new.

        Raises ModelError if the model cannot be imported or compiled with these answers.
        """
        if path not in self._prepared:
            segment = before.segment.following(answers)
            program = None
            if segment.graph is not None and not is_small(segment.graph):
                program = self._compile(segment.graph, before.segment.waiting)
            while len(self._prepared) >= MAX_SEGMENTS:
                self._prepared.popitem(last=False)
            self._prepared[path] = PreparedSegment(segment, program)
        self._prepared.move_to_end(path)
        return self._prepared[path]


def is_small(graph: Graph) -> bool:
    """Tell if NumPy computes a graph in less time than a compilation takes."""
    light = not any(isinstance(node.op, (*PRODUCTS, *ATTENTION_OPS)) for node in graph.nodes)
    return light and sum(v.type.size for v in graph.values()) <= SMALL_ELEMENTS
