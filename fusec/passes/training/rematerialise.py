"""Recompute cheap values instead of storing them for the backward half of a training step.

Such a value is read long after it was computed, and pointwise ops can recompute it from values that are stored anyway.
The pass runs only where there is state, as in training, because other graphs have no such gap. Decode steps have state,
too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fusec.ir import Constant, Graph, Node, Value, positions
from fusec.ops import Attention, Cast
from fusec.passes.base import Options
from fusec.passes.rewriting.value_facts import is_pointwise
from fusec.system.dataclass import dataclass

# Most ops cost no more than the memory traffic they save. Others (exp, tanh, erf…) use a slower unit of the GPU. Many
# of them one after the other take longer than memory, so the number of recomputed nodes is limited.
MAX_OPS = 4
MIN_BYTES = 1 << 12  # below this nothing is gained


@dataclass(frozen=True)
class Rematerialise:
    """`gap`: shortest distance between a value's computation and its use, as a share of the graph."""

    gap: float = 0.25
    name: ClassVar[str] = "rematerialise"

    def run(self, graph: Graph, options: Options) -> None:
        if not options.state:
            return
        place = positions(graph)
        far = max(8, int(self.gap * len(place)))
        late = _read_late(graph, place, far)
        stored = {v for v in late if not is_pointwise(v)} | set(graph.inputs)
        groups: dict[frozenset[Value], dict[Value, list[Node]]] = {}
        for value in late:
            found = _recomputation(value, place) if is_pointwise(value) and value.type.nbytes >= MIN_BYTES else None
            if found is not None:
                ops, roots = found
                groups.setdefault(frozenset(r for r in roots if r not in stored), {})[value] = ops
        chosen: dict[Value, list[Node]] = {}
        for roots, values in groups.items():
            # values stored instead must take less memory than those that need no storage any more
            if sum(r.type.nbytes for r in roots) < sum(v.type.nbytes for v in values):
                chosen |= values
        copies: dict[Value, Value] = {}
        uses = [(node, index, value) for value in chosen for node, index in late[value]]
        for node, index, value in sorted(uses, key=lambda use: place[use[0]]):
            graph.set_input(node, index, _recomputed(graph, value, chosen[value], node, copies))


Uses = list[tuple[Node, int]]


def _read_late(graph: Graph, place: Mapping[Node, int], far: int) -> dict[Value, Uses]:
    """Find results that are read at least `far` nodes later, with these uses in graph order."""
    found: dict[Value, Uses] = {}
    for node in graph.nodes:
        for value in node.results if not isinstance(node.op, Constant) else ():
            if isinstance(node.op, Cast) and node.operands[0] in graph.inputs:
                continue  # one kernel casts all parameters, once
            uses = [(user, i) for user, i in value.uses if user is not graph.return_node and not _is_bias(user, i)]
            uses = [(user, i) for user, i in uses if place[user] - place[node] >= far]
            if uses:
                found[value] = sorted(uses, key=lambda use: place[use[0]])
    return found


def _is_bias(node: Node, index: int) -> bool:
    """Tell if an operand is the bias of an attention, which reads it from memory: to recompute it takes a launch."""
    return isinstance(node.op, Attention) and index == 3


def _recomputation(value: Value, place: Mapping[Node, int]) -> tuple[list[Node], list[Value]] | None:
    """Return the pointwise nodes that compute a value, and their sources; None if they are too many."""
    nodes: dict[Node, None] = {}
    roots: dict[Value, None] = {}
    stack = [value]
    while stack:
        at = stack.pop()
        if at.literal is not None:
            continue
        if not is_pointwise(at):
            roots[at] = None
            continue
        assert at.node is not None
        nodes[at.node] = None
        if len(nodes) > MAX_OPS:
            return None
        stack += at.node.operands
    return sorted(nodes, key=lambda n: place[n]), list(roots)


def _recomputed(graph: Graph, value: Value, ops: list[Node], before: Node, copies: dict[Value, Value]) -> Value:
    """Recompute the value before the first node that reads it late; later readers share that copy."""
    for node in ops:
        result = node.result
        if result not in copies:
            operands = [copies.get(v, v) for v in node.operands]
            twin = graph.insert(
                node.op, operands, before=before, names=(result.name,), types=[result.type], origin=node.origin
            )
            copies[result] = twin.result
    return copies[value]
