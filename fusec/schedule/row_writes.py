"""Group writes of rows with the same indices, and the rotary embeddings before them, into one step.

A decoder writes the keys and values of a token into its cache, and keys go through a rotary embedding. All of this is
little work, so a launch for each op would take longer than the work. Groups are formed before partitioning, because
cuDNN runs none of these ops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from fusec.ir import Graph, Node, TensorType, Value
from fusec.ops import Rotary, Scatter
from fusec.schedule.aliasing import is_view, same_storage, view_offset
from fusec.system.dataclass import dataclass

MAX_ROWS = 256  # of a write: a kernel compares every row that it keeps with all of them
MAX_ELEMENTS = 1 << 31  # of a tensor of new rows, because kernels count in 32 bits


@dataclass(frozen=True, eq=False)
class RowWrite:
    """A scatter without a reduction.

    rotary: the embedding whose result holds the new rows; None if another step computes them.
    start: the element of that result where the rows begin.
    views: nodes from that result to the rows.
    """

    scatter: Node
    rotary: Node | None = None
    start: int = 0
    views: tuple[Node, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (*(() if self.rotary is None else (self.rotary,)), *self.views, self.scatter)

    @property
    def reads(self) -> tuple[Value, ...]:
        """The values that the nodes read from outside."""
        x, indices, rows = self.scatter.operands
        return x, indices, *((rows,) if self.rotary is None else self.rotary.operands)


def match_row_writes(nodes: Sequence[Node]) -> list[RowWrite] | None:
    """Return the writes that a step consists of, all with the same indices; None if it has other nodes.

    Further rotary embeddings with the same angles, such as those of queries, may belong to the step.
    """
    writes = [_row_write(node, nodes) for node in nodes if isinstance(node.op, Scatter)]
    found = [write for write in writes if write is not None]
    if not found or len(found) < len(writes) or len({write.scatter.operands[1] for write in found}) > 1:
        return None
    made, own = {v for node in nodes for v in node.results}, {n for write in found for n in write.nodes}
    angles = [write.rotary.operands[1:] for write in found if write.rotary is not None]
    further = [node for node in nodes if node not in own]
    if any(not isinstance(n.op, Rotary) or n.operands[1:] not in angles or not _has_packed_rows(n) for n in further):
        return None
    reads = [v for write in found for v in write.reads] + [v for node in further for v in node.operands]
    return found if made.isdisjoint(reads) else None


def _row_write(scatter: Node, inside: Collection[Node] | None = None) -> RowWrite | None:
    """Return the write of a scatter; None if a kernel cannot do it.

    inside: the nodes that may belong to it; None: all.
    """
    assert isinstance(scatter.op, Scatter)
    x, indices, rows = (v.type for v in scatter.operands)
    packed = all(_is_packed(type) for type in (x, rows, scatter.result.type))
    if scatter.op.reduction != "none" or not packed or x.dtype.bits < 8 or not 0 < rows.size < MAX_ELEMENTS:
        return None
    if indices.size > MAX_ROWS or indices.dtype.bits < 32 or indices.within:
        return None
    value, views, start = scatter.operands[2], list[Node](), 0
    while (node := value.node) is not None and (inside is None or node in inside):
        if isinstance(node.op, Rotary):
            return RowWrite(scatter, node, start, tuple(reversed(views))) if _has_packed_rows(node) else None
        if len(value.uses) > 1 or len(node.results) > 1 or not is_view(node):
            break
        start += view_offset(node, value.index)
        views.append(node)
        value = node.operands[0]
    return RowWrite(scatter)


def _is_packed(type: TensorType) -> bool:
    return not type.within and same_storage(type.shape, type.order, ())


def _has_packed_rows(rotary: Node) -> bool:
    """Tell if the result of a rotary embedding is packed, with its last dim innermost, in a type that kernels have."""
    y = rotary.result.type
    wide = not any(v.type.dtype.is_narrow for v in rotary.operands)
    return wide and not y.within and y.strides[-1] == 1 and y.size < MAX_ELEMENTS


def row_write_steps(graph: Graph) -> list[tuple[Node, ...]]:
    """Return the nodes of each step that writes rows and does more than one scatter."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    latest: dict[Value, tuple[Node, ...]] = {}  # the last group of each value of indices
    group_of: dict[Node, tuple[Node, ...]] = {}
    for node in graph.nodes:
        write = _row_write(node) if isinstance(node.op, Scatter) else None
        if write is None:
            continue
        indices = node.operands[1]
        for before in (latest.get(indices, ()), ()):
            nodes = tuple(sorted({*before, *write.nodes}, key=place.__getitem__))
            if any(group_of.get(n, before) != before for n in write.nodes) or match_row_writes(nodes) is None:
                continue
            if not _has_path_around(nodes, place, group_of):
                latest[indices] = nodes
                group_of.update((n, nodes) for n in nodes)
                break
    _add_embeddings(graph, place, group_of)
    return [nodes for nodes in dict.fromkeys(group_of.values()) if len(nodes) > 1]


def _add_embeddings(graph: Graph, place: dict[Node, int], group_of: dict[Node, tuple[Node, ...]]) -> None:
    """Add to each group the embeddings just before and after its own that have the same angles, such as of queries."""
    by_angles: dict[tuple[Value, ...], list[Node]] = {}
    for node in graph.nodes:
        if isinstance(node.op, Rotary):
            by_angles.setdefault(node.operands[1:], []).append(node)
    for nodes in by_angles.values():
        for pair in pairwise(nodes):
            for own, other in (pair, reversed(pair)):
                if own not in group_of or other in group_of:
                    continue
                joined = tuple(sorted({*group_of[own], other}, key=place.__getitem__))
                if match_row_writes(joined) is not None and not _has_path_around(joined, place, group_of):
                    group_of.update((n, joined) for n in joined)


def _has_path_around(nodes: Sequence[Node], place: dict[Node, int], group_of: dict[Node, tuple[Node, ...]]) -> bool:
    """Tell if a path leaves some nodes and returns to them, where each other group counts as one vertex."""
    first, inside = place[nodes[0]], set(nodes)
    seen: set[Node] = set()

    def outside(some: Iterable[Node]) -> list[Node]:
        before = dict.fromkeys(v.node for node in some for v in node.operands if v.node is not None)
        return [node for node in before if place[node] >= first and node not in seen]

    stack = [node for node in outside(nodes) if node not in inside]
    while stack:
        node = stack.pop()
        if node in inside:
            return True
        group = group_of.get(node, (node,))
        seen.update(group)
        stack += outside(group)
    return False
