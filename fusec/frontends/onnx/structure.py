"""Is the model's graph sound: every name defined once, nothing missing, no cycle? Then: in which order?"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from onnx import AttributeProto, GraphProto, NodeProto

from fusec.errors import ModelError
from fusec.ir import quote_string
from fusec.system.printable import printable

_SHOWN = 8  # problems listed in full
GRAPHS = frozenset({AttributeProto.GRAPH, AttributeProto.GRAPHS})


def bodies(node: NodeProto) -> Iterable[GraphProto]:
    """The graphs among a node's attributes: the bodies of control flow."""
    for attribute in node.attribute:
        if attribute.type in GRAPHS:
            yield from (attribute.g, *attribute.graphs)


def captured(node: NodeProto) -> set[str]:
    """Names the bodies of a node may read from outside."""
    found: set[str] = set()
    for graph in bodies(node):
        for inner in graph.node:
            found.update(inner.input)
            found |= captured(inner)
        found.update(v.name for v in graph.output)
    return found


def abridged(items: Sequence[str], shown: int = 4) -> str:
    """The first items, and how many more there are."""
    return ", ".join(items[:shown]) + (f" and {len(items) - shown} more" if len(items) > shown else "")


def report(file: str, problems: Sequence[str]) -> ModelError:
    """One error for all the problems found."""
    if len(problems) == 1:
        return ModelError(f"{file}: {problems[0]}")
    lines = [f"  {problem}" for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"  and {len(problems) - _SHOWN} more")
    return ModelError("\n".join([f"{file}: {len(problems)} problems:", *lines]))


def node_names(graph: GraphProto) -> list[str]:
    """What each node is called in messages and in `origin`: its name, or its op and index."""
    return [node.name or f"{node.op_type}_{index}" for index, node in enumerate(graph.node)]


def constants(graph: GraphProto) -> list[str]:
    """Names of the initializers, dense and sparse."""
    return [t.name for t in graph.initializer] + [t.values.name for t in graph.sparse_initializer]


def ordered(graph: GraphProto, file: str) -> list[int]:
    """Indices of the nodes some output depends on, each after what it reads; ModelError for a broken graph."""
    names = node_names(graph)
    problems = [*_definitions(graph, names), *_uses(graph, names)]
    if not graph.output:
        problems.append("the graph has no outputs")
    if problems:
        raise report(file, problems)
    producer = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    reads = [
        {producer[name] for name in (*node.input, *captured(node)) if name in producer and name not in node.output}
        if any(True for _ in bodies(node))
        else {producer[name] for name in node.input if name in producer}
        for node in graph.node
    ]
    order = _sorted(reads)
    if len(order) < len(reads):
        index = _on_cycle(reads, set(order))
        op = graph.node[index].op_type
        raise ModelError(f"{file}: node {names[index]!r} ({op}): is part of a cycle: it needs its own result")
    live: set[int] = {producer[v.name] for v in graph.output if v.name in producer}
    for index in reversed(order):
        if index in live:
            live |= reads[index]
    return [index for index in order if index in live]


def _definitions(graph: GraphProto, names: Sequence[str]) -> Iterable[str]:
    """What is wrong with the names the graph defines: each may be defined once."""
    inputs: set[str] = set()
    for value in graph.input:
        if not value.name:
            yield "a graph input has no name"
        elif value.name in inputs:
            yield f"two graph inputs are named {value.name!r}"
        inputs.add(value.name)
    defined: dict[str, str] = {}
    for name in constants(graph):  # an initializer may be listed among the inputs, as its default
        if not name:
            yield "an initializer has no name"
        elif name in defined:
            yield f"two initializers are named {name!r}"
        defined[name] = "an initializer"
    defined.update({name: "a graph input" for name in inputs if name not in defined})
    for name, node in zip(names, graph.node, strict=True):
        if not node.op_type:
            yield f"node {name!r}: has no op type"
        if not any(node.output):
            yield f"node {name!r} ({printable(node.op_type)}): has no output"
        for output in filter(None, node.output):
            if output in defined:
                where = f"node {name!r} ({printable(node.op_type)})"
                yield f"{where}: its output {output!r} is already defined by {defined[output]}"
            defined[output] = f"node {name!r}"
    outputs: set[str] = set()
    for value in graph.output:
        if value.name in outputs:
            yield f"two graph outputs are named {value.name!r}"
        outputs.add(value.name)


def _uses(graph: GraphProto, names: Sequence[str]) -> Iterable[str]:
    """Names that are read but nowhere defined."""
    known = {v.name for v in graph.input} | set(constants(graph))
    known.update(name for node in graph.node for name in node.output)
    for name, node in zip(names, graph.node, strict=True):
        for operand in node.input:
            if operand and operand not in known:
                yield (
                    f"node {name!r} ({printable(node.op_type)}): its input {operand!r} is neither a graph input, "
                    "an initializer, nor the output of a node"
                )
    for value in graph.output:
        if not value.name or value.name not in known:
            yield f"graph output {quote_string(value.name)} is not defined"


def _sorted(reads: Sequence[set[int]]) -> list[int]:
    """Indices in an order where each follows what it reads; the given order is kept where it can be."""
    readers: list[list[int]] = [[] for _ in reads]
    for index, sources in enumerate(reads):
        for source in sources:
            readers[source].append(index)
    waiting = [len(sources) for sources in reads]
    ready = [index for index, count in enumerate(waiting) if count == 0]  # ascending: a heap
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for reader in readers[index]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, reader)
    return order


def _on_cycle(reads: Sequence[set[int]], done: set[int]) -> int:
    """A node on a cycle: walking back from a stuck node through stuck ones must come round."""
    index = next(i for i in range(len(reads)) if i not in done)
    seen: set[int] = set()
    while index not in seen:
        seen.add(index)
        index = min(source for source in reads[index] if source not in done)
    return index
