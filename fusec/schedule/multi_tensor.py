"""Group the same few pointwise ops over many tensors: an optimiser's update of each parameter, casts of parameters.

Each group is one step, whose nodes form members, one per tensor, that share no value; one kernel runs them all.
Groups are found before partitioning, because cuDNN would be asked about hundreds of small graphs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusec.ir import DType, Graph, Node, Value
from fusec.ops import Cast, Pointwise
from fusec.schedule.aliasing import same_storage

MAX_ELEMENTS = 1 << 31  # of a tensor: kernels count in 32 bits
_HALVES = (DType.F16, DType.BF16)


@dataclass(frozen=True, eq=False)
class Member:
    """Nodes of one size in order of dependency; what they read of others, and what others read of them."""

    nodes: tuple[Node, ...]
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    key: Hashable  # equal for members that do the same, whatever their size

    @property
    def size(self) -> int:
        return self.nodes[0].results[0].type.size


def is_flat(node: Node) -> bool:
    """Tell if a node works element by element in memory order, with scalars as other operands."""
    if not isinstance(node.op, (Pointwise, Cast)) or node.op.name == "gen_index":
        return False
    kind = node.results[0].type
    if kind.size >= MAX_ELEMENTS or any(v.type.dtype.is_narrow for v in (*node.operands, *node.results)):
        return False
    return all(
        v.type.size == 1 or (v.type.shape == kind.shape and same_storage(kind.shape, v.type.order, kind.order))
        for v in node.operands
    )


def members(nodes: Iterable[Node]) -> list[Member] | None:
    """Split flat nodes (in graph order) into members, in the order in which they begin.

    None if members of different sizes read each other, or a node is not flat.
    """
    inside: dict[Node, list[Node]] = {}
    for node in nodes:
        if not is_flat(node):
            return None
        own = [node]
        for value in node.operands:
            before = inside.get(value.node) if value.node is not None else None
            if before is None or before is own:
                continue
            if before[0].results[0].type.size != node.results[0].type.size:
                return None
            before.extend(own)
            for each in own:
                inside[each] = before
            own = before
        inside[node] = own
    place = {node: i for i, node in enumerate(inside)}
    parts = {id(part): part for part in inside.values()}
    return [_member(_arranged(sorted(part, key=place.__getitem__))) for part in parts.values()]


def _arranged(nodes: Sequence[Node]) -> list[Node]:
    """Sort nodes by their depth after what is read, then by what they compute, because gradients come in any order."""
    said: dict[Value, tuple[int, bytes]] = {}
    rank: dict[Node, tuple[int, bytes]] = {}

    def of(value: Value) -> tuple[int, bytes]:
        if value not in said:
            said[value] = 0, repr((value.type.dtype.value, value.type.size == 1, repr(value.scalar()))).encode()
        return said[value]

    for node in nodes:
        depths, texts = zip(*map(of, node.operands), strict=True)
        what = repr((node.op.name, node.op.attributes, texts, node.results[0].type.dtype.value))
        rank[node] = said[node.results[0]] = 1 + max(depths), hashlib.sha256(what.encode()).digest()
    return sorted(nodes, key=rank.__getitem__)


def _member(nodes: Sequence[Node]) -> Member:
    number: dict[Value, int] = {}
    reads: list[Value] = []
    writes: list[Value] = []
    key: list[Hashable] = []
    own = set(nodes)
    for node in nodes:
        for value in node.operands:
            if value not in number:
                number[value] = len(number)
                reads.append(value)
                key.append((value.type.dtype, value.type.size == 1, repr(value.scalar())))
        result = node.results[0]
        number[result] = len(number)
        stored = any(user not in own for user in result.users)
        key.append((node.op.name, repr(node.op.attributes), tuple(number[v] for v in node.operands)))
        key.append((result.type.dtype, stored))
        if stored:
            writes.append(result)
    single = nodes[0].results[0].type.size == 1
    return Member(tuple(nodes), tuple(reads), tuple(writes), (single, *key))


def alike(nodes: Sequence[Node]) -> list[Member] | None:
    """Return the members of a step, if there are several and all do the same."""
    found = members(nodes)
    return found if found is not None and len(found) > 1 and len({m.key for m in found}) == 1 else None


def set_aside(graph: Graph, state: Mapping[str, str]) -> list[tuple[Node, ...]]:
    """Return the multi-tensor steps of a program with state (by name, with the output that replaces it).

    They are casts of state to 16 bits, and all ops that lead only to new state.
    """
    replaced = {output for output in state.values() if output}
    if not state:
        return []
    names, last = graph.output_names, graph.return_node
    tail: dict[Node, None] = {}
    for node in reversed(list(graph.nodes)):
        uses = [use for value in node.results for use in value.uses]
        if uses and is_flat(node) and all(user in tail or (user is last and names[i] in replaced) for user, i in uses):
            tail[node] = None
    held = {v for v in graph.inputs if v.name in state}
    head = [n for n in graph.nodes if n not in tail and is_flat(n) and _narrows(n, held)]
    return [*_steps([[n] for n in head]), *_steps(_levels(list(reversed(tail))))]


def _narrows(node: Node, held: set[Value]) -> bool:
    return isinstance(node.op, Cast) and node.op.to in _HALVES and node.operands[0] in held


def _levels(nodes: Sequence[Node]) -> list[list[Node]]:
    """Scalars by themselves, since tensors read them; then all others."""
    scalars = [n for n in nodes if n.results[0].type.size == 1]
    return [scalars, [n for n in nodes if n.results[0].type.size != 1]]


def _steps(parts: Iterable[Sequence[Node]]) -> list[tuple[Node, ...]]:
    """Members that do the same, as one step; a single node is no step of its own."""
    groups: dict[Hashable, list[Member]] = {}
    for part in parts:
        for member in members(part) or []:
            groups.setdefault(member.key, []).append(member)
    steps = [tuple(n for member in group for n in member.nodes) for group in groups.values()]
    return [step for step in steps if len(step) > 1]
