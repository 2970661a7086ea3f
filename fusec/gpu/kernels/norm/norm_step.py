"""Sort the nodes of a step by their role around a norm that has statistics.

The anchor has elements and statistics: one number for each channel (or column). Other nodes belong to the prologue, to
the epilogue, or compute on the statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from fusec.gpu.kernels.norm.step_roles import ancestors
from fusec.ir import Node, Value
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class NormStep:
    """The nodes of a step around an anchor that has elements and statistics.

    anchor: its first result has the shape of x; its other results are statistics.
    elements: the first operands of the anchor, all with the shape of x, and then the x of the second anchor.
    prologue, epilogue: the nodes before and after the anchor that compute elements.
    statistics_nodes: the nodes that compute on statistics.
    prologue_outputs, epilogue_outputs: the elements that the step stores.
    statistics: the statistics that the step stores.
    sum_nodes: the nodes that sum results of the epilogue to the shape of a statistic.
    recomputed: operands of the anchor that the kernel computes itself.
    second: another anchor of the same op and types, which has all elements but x in common with the first; or None.
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
    second: Node | None = None

    @property
    def anchors(self) -> tuple[Node, ...]:
        return (self.anchor,) if self.second is None else (self.anchor, self.second)

    @property
    def x(self) -> Value:
        return self.elements[-1] if self.second is None else self.elements[-2]

    @property
    def y(self) -> Value:
        return self.anchor.results[0]

    @property
    def numbers(self) -> tuple[Value, ...]:
        """Operands of the anchors with one number for each channel."""
        first = len(self.elements) - (self.second is not None)
        return tuple(v for anchor in self.anchors for v in anchor.operands[first:])

    @property
    def parameters(self) -> tuple[Value, ...]:
        """Those that the kernel does not compute itself."""
        return tuple(v for v in self.numbers if v not in self.recomputed)

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
    second: Node | None = None,
) -> NormStep | None:
    """Sort the nodes of a step by role; None if a node has none.

    elements: how many of the anchor's first operands have the shape of x; the others are parameters.
    is_sum: tells if a node sums elements to the shape of a statistic.
    second: another anchor, as `NormStep` describes it.
    """
    anchors = (anchor,) if second is None else (anchor, second)
    x = anchor.operands[elements - 1]
    moved = (*anchor.operands[:elements], *(other.operands[elements - 1] for other in anchors[1:]))
    parameters = [v for each in anchors for v in each.operands[elements:]]
    made = {v for node in nodes for v in node.results}
    if x.type.size == 0 or any(v in made for v in parameters):
        return None
    prologue = ancestors(nodes, moved)
    if not set(anchors).isdisjoint(prologue):
        return None
    statistics = {v for each in anchors for v in each.results[1:]}
    small: list[Node] = []
    epilogue: list[Node] = []
    sums: list[Node] = []
    for node in nodes:
        if node in anchors or node in prologue:
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
    images = [each.results[0] for each in anchors]
    large = {v for node in (*prologue, *epilogue) for v in node.results} | {*images, *moved}
    if any(large.intersection(node.operands) for node in small):
        return None
    prologue_outputs = [v for v in outputs if v.node in prologue]
    epilogue_outputs = [v for v in outputs if v.node in epilogue or v in images]
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
        second=second,
    )
