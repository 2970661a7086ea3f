"""Check a model's graph (each name defined once, none missing, no cycle), and sort its nodes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from onnx import AttributeProto, GraphProto, NodeProto

from fusec.errors import ModelError
from fusec.ir import quote_string
from fusec.system.printable import printable

_SHOWN = 8  # problems that a message lists; further ones are counted
_FIRST = 4  # the same of names
RANDOM = frozenset(
    {
        *("RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike"),
        *("Bernoulli", "Multinomial", "Dropout"),
    }
)
GRAPHS = frozenset({AttributeProto.GRAPH, AttributeProto.GRAPHS})


def bodies(node: NodeProto) -> Iterable[GraphProto]:
    """Iterate over the graphs among a node's attributes: the bodies of control flow."""
    for attribute in node.attribute:
        if attribute.type in GRAPHS:
            yield from (attribute.g, *attribute.graphs)


def draws(node: NodeProto) -> bool:
    """Tell if a node may draw random numbers without a seed of its own."""
    if node.op_type not in RANDOM or any(attribute.name == "seed" for attribute in node.attribute):
        return False
    return node.op_type != "Dropout" or len(node.input) > 2


def captured(node: NodeProto) -> set[str]:
    """Return the names that the bodies of a node may read from the outer graph."""
    found: set[str] = set()
    for graph in bodies(node):
        for inner in graph.node:
            found.update(inner.input)
            found |= captured(inner)
        found.update(v.name for v in graph.output)
    return found


def abridged(items: Sequence[str]) -> str:
    """Join the first items, and the number of further ones."""
    more = len(items) - _FIRST
    return ", ".join(items[:_FIRST]) + (f" and {more} more" if more > 0 else "")


def report(file: str, problems: Sequence[str]) -> ModelError:
    """Make one error of all problems found."""
    if len(problems) == 1:
        return ModelError(f"{file}: {problems[0]}")
    lines = [f"  {problem}" for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"  and {len(problems) - _SHOWN} more")
    return ModelError("\n".join([f"{file}: {len(problems)} problems:", *lines]))


def node_names(nodes: Iterable[NodeProto]) -> list[str]:
    """Name each node for messages and for `origin`: its own name, or its op and index."""
    return [node.name or f"{node.op_type}_{index}" for index, node in enumerate(nodes)]


def constants(graph: GraphProto) -> list[str]:
    """List the names of the initializers, dense and sparse."""
    return [t.name for t in graph.initializer] + [t.values.name for t in graph.sparse_initializer]


def ordered(graph: GraphProto, file: str) -> list[int]:
    """Return the indices of the nodes that an output depends on, each after the nodes that it reads.

    Raises ModelError if a name is missing or defined twice, or the graph has a cycle or no output.
    """
    names = node_names(graph.node)
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
    """Iterate over the problems with the names that the graph defines."""
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
    """Iterate over the problems with names that are read but not defined."""
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
    """Sort nodes topologically, and otherwise by index. Nodes on a cycle, and their readers, are left out."""
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
    """Find a node on a cycle: from a node left out, follow such nodes backwards until one repeats."""
    index = next(i for i in range(len(reads)) if i not in done)
    seen: set[int] = set()
    while index not in seen:
        seen.add(index)
        index = min(source for source in reads[index] if source not in done)
    return index
