"""Sort the nodes of a step by their role around a norm that has statistics.

The anchor has elements and statistics: one number for each channel (or column). Other nodes belong to the prologue, to
the epilogue, or compute on the statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fusec.gpu.kernels.norm.step_roles import ancestors
from fusec.ir import Node, Value


@dataclass(frozen=True)
class NormStep:
    """The nodes of a step around an anchor that has elements and statistics.

    anchor: its first result has the shape of x; its other results are statistics.
    elements: the first operands of the anchor, all with the shape of x.
    prologue, epilogue: the nodes before and after the anchor that compute elements.
    statistics_nodes: the nodes that compute on statistics.
    prologue_outputs, epilogue_outputs: the elements that the step stores.
    statistics: the statistics that the step stores.
    sum_nodes: the nodes that sum results of the epilogue to the shape of a statistic.
    recomputed: operands of the anchor that the kernel computes itself.
    """

    anchor: Node
    elements: tuple[Value, ...]
    prologue: tuple[Node, ...]
    epilogue: tuple[Node, ...]
    statistics_nodes: tuple[Node, ...]
    prologue_outputs: tuple[Value, ...]
    epilogue_outputs: tuple[Value, ...]
    statistics: tuple[Value, ...]
    sum_nodes: tuple[Node, ...] = ()
    recomputed: tuple[Value, ...] = ()

    @property
    def x(self) -> Value:
        return self.elements[-1]

    @property
    def y(self) -> Value:
        return self.anchor.results[0]

    @property
    def parameters(self) -> tuple[Value, ...]:
        """Operands with one number for each channel."""
        return tuple(v for v in self.anchor.operands[len(self.elements) :] if v not in self.recomputed)

    @cached_property
    def second_prologue(self) -> tuple[Node, ...]:
        """The prologue nodes that a second pass over the elements applies again.

        It reads what the first pass stored, and so needs no nodes before that.
        """
        return self.prologue_without(self.prologue_outputs)

    def prologue_without(self, known: Sequence[Value]) -> tuple[Node, ...]:
        """Return the prologue nodes that a later pass applies again, given known values."""
        late = (v for node in self.epilogue for v in node.operands)
        return ancestors(self.prologue, (*self.elements, *late), known)


def match_norm_step(
    nodes: Sequence[Node],
    outputs: Sequence[Value],
    anchor: Node,
    elements: int,
    is_sum: Callable[[Node], bool] = lambda node: False,
) -> NormStep | None:
    """Sort the nodes of a step by role; None if a node has none.

    elements: how many of the anchor's first operands have the shape of x; the others are parameters.
    is_sum: tells if a node sums elements to the shape of a statistic.
    """
    moved, parameters = anchor.operands[:elements], anchor.operands[elements:]
    x = moved[-1]
    made = {v for node in nodes for v in node.results}
    if x.type.size == 0 or any(v in made for v in parameters):
        return None
    prologue = ancestors(nodes, moved)
    if anchor in prologue:
        return None
    statistics = set(anchor.results[1:])
    small: list[Node] = []
    epilogue: list[Node] = []
    sums: list[Node] = []
    for node in nodes:
        if node is anchor or node in prologue:
            continue
        if len(node.results) != 1:
            return None
        (result,) = node.results
        if is_sum(node):
            if node.operands[0] is not anchor.results[0] and node.operands[0].node not in epilogue:
                return None
            sums.append(node)
            statistics.add(result)
        elif result.type.shape == anchor.results[1].type.shape:
            small.append(node)
            statistics.add(result)
        elif result.type.shape == x.type.shape and not statistics.intersection(node.operands):
            epilogue.append(node)
        else:
            return None
    large = {v for node in (*prologue, *epilogue) for v in node.results} | {anchor.results[0], *moved}
    if any(large.intersection(node.operands) for node in small):
        return None
    prologue_outputs = [v for v in outputs if v.node in prologue]
    epilogue_outputs = [v for v in outputs if v.node in epilogue or v is anchor.results[0]]
    if any(v.type.shape != x.type.shape for v in prologue_outputs):
        return None
    return NormStep(
        anchor,
        moved,
        prologue,
        tuple(epilogue),
        tuple(small),
        tuple(prologue_outputs),
        tuple(epilogue_outputs),
        tuple(v for v in outputs if v in statistics),
        tuple(sums),
    )
