"""What a compilation yields, as data: the graphs, the program, and each step lowered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusec.gpu.forms import Decided
from fusec.ir import Graph
from fusec.locked import Lock
from fusec.lower_cudnn import Lowered, lower
from fusec.passes.base import Options
from fusec.passes.partition.oracle import Oracle
from fusec.program import Kind, Program
from fusec.target import Target


@dataclass(frozen=True, eq=False)
class Compiled:
    """`source` is the model as imported, `program.graph` the same after the passes. `judge` is whom the
    partitioner asked; it can be asked again (for reports). `decided`: how the program came to its forms, if not by the
    partitioner alone."""

    source: Graph
    program: Program
    target: Target
    options: Options
    judge: Oracle
    decided: Decided | Lock | None = None

    @property
    def graph(self) -> Graph:
        """The optimised graph that the program's steps cover."""
        return self.program.graph

    @cached_property
    def lowered(self) -> tuple[Lowered | None, ...]:
        """For each step its cuDNN graph; None for kernels and views. Equal work has equal graphs."""
        return tuple(
            lower(step.body, self.options.tensor_cores) if step.kind is Kind.CUDNN else None
            for step in self.program.steps
        )
