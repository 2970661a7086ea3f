"""Group the same pointwise ops over many tensors, such as an optimiser's update of each parameter, into one step.

A step has a member for each tensor. Members share no value, and one kernel runs them all.
Groups are formed before partitioning, because cuDNN would be asked about hundreds of small graphs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence

from fusec.ir import HALVES, Graph, Node, Value, is_scale
from fusec.ops import POINTWISE_OPS, Cast
from fusec.schedule.aliasing import same_storage
from fusec.system.dataclass import dataclass

MAX_ELEMENTS = 1 << 31  # of a tensor, because kernels count in 32 bits


@dataclass(frozen=True, eq=False)
class Member:
    """Nodes of one size, in order of dependency.

    reads: values that they read from outside; writes: results that are read outside.
    key: equal for members that compute the same, also on other sizes, and with other constants that kernels load.
    """

    nodes: tuple[Node, ...]
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    key: Hashable

    @property
    def size(self) -> int:
        return self.nodes[0].results[0].type.size


def is_flat(node: Node) -> bool:
    """Tell if a node works element by element on packed tensors of one order; other operands may be scalars."""
    if not isinstance(node.op, POINTWISE_OPS) or node.op.name == "gen_index":
        return False
    kind = node.results[0].type
    types = [v.type for v in (*node.operands, *node.results)]
    if kind.size >= MAX_ELEMENTS or any(t.dtype.is_narrow or t.within for t in types):
        return False
    return all(
        v.type.size == 1 or (v.type.shape == kind.shape and same_storage(kind.shape, v.type.order, kind.order))
        for v in node.operands
    )


def members(nodes: Iterable[Node]) -> list[Member] | None:
    """Split flat nodes (in graph order) into members.

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
    return [_member(_in_member_order(sorted(part, key=place.__getitem__))) for part in parts.values()]


def _in_member_order(nodes: Sequence[Node]) -> list[Node]:
    """Sort nodes by depth, then by what they compute, because gradients of equal parameters come in any order."""
    ranks: dict[Value, tuple[int, bytes]] = {}  # depth, and digest of what is computed

    def rank(value: Value) -> tuple[int, bytes]:
        if value not in ranks:
            ranks[value] = 0, repr((value.type.dtype.value, value.type.size == 1, scalar_in_source(value))).encode()
        return ranks[value]

    for node in nodes:
        depths, digests = zip(*map(rank, node.operands), strict=True)
        computed = repr((node.op.name, node.op.attributes, digests, node.results[0].type.dtype.value))
        ranks[node.results[0]] = 1 + max(depths), hashlib.sha256(computed.encode()).digest()
    return sorted(nodes, key=lambda node: ranks[node.results[0]])


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
                key.append((value.type.dtype, value.type.size == 1, scalar_in_source(value)))
        result = node.results[0]
        number[result] = len(number)
        stored = any(user not in own for user in result.users)
        key.append((node.op.name, repr(node.op.attributes), tuple(number[v] for v in node.operands)))
        key.append((result.type.dtype, stored))
        if stored:
            writes.append(result)
    single = nodes[0].results[0].type.size == 1
    return Member(tuple(nodes), tuple(reads), tuple(writes), (single, *key))


def scalar_in_source(value: Value) -> str:
    """Return the number that the source of a kernel contains for a constant; empty for what the kernel loads."""
    literal = value.literal
    if literal is None or literal.type.size != 1 or is_scale(literal.array.reshape(-1)[0]):
        return ""
    return repr(value.scalar())


def equal_members(nodes: Sequence[Node]) -> list[Member] | None:
    """Return the members of a step if there are several and all compute the same; else None."""
    found = members(nodes)
    return found if found is not None and len(found) > 1 and len({m.key for m in found}) == 1 else None


def multi_tensor_steps(graph: Graph, state: Mapping[str, str]) -> list[tuple[Node, ...]]:
    """Return the nodes of each multi-tensor step of a graph.

    state: inputs of the state by name, with the output that replaces each.
    Casts of state to 16 bits form such steps, and ops that only lead to new state.
    """
    replaced = {output for output in state.values() if output}
    if not state:
        return []
    names, last = graph.output_names, graph.return_node
    updates: dict[Node, None] = {}
    for node in reversed(list(graph.nodes)):
        uses = [use for value in node.results for use in value.uses]
        only_for_state = all(user in updates or (user is last and names[i] in replaced) for user, i in uses)
        if uses and only_for_state and is_flat(node):
            updates[node] = None
    held = {v for v in graph.inputs if v.name in state}
    casts = [n for n in graph.nodes if n not in updates and is_flat(n) and _narrows(n, held)]
    return [*_steps([[n] for n in casts]), *_steps(_levels(list(reversed(updates))))]


def _narrows(node: Node, held: set[Value]) -> bool:
    return isinstance(node.op, Cast) and node.op.to in HALVES and node.operands[0] in held


def _levels(nodes: Sequence[Node]) -> list[list[Node]]:
    """Separate the nodes that compute scalars, which come first because the others read them."""
    scalars = [n for n in nodes if n.results[0].type.size == 1]
    return [scalars, [n for n in nodes if n.results[0].type.size != 1]]


def _steps(parts: Iterable[Sequence[Node]]) -> list[tuple[Node, ...]]:
    """Join members with equal keys into steps; steps of a single node are left out."""
    groups: dict[Hashable, list[Member]] = {}
    for part in parts:
        for member in members(part) or []:
            groups.setdefault(member.key, []).append(member)
    steps = [tuple(n for member in group for n in member.nodes) for group in groups.values()]
    return [step for step in steps if len(step) > 1]
