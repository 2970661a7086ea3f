"""The names that one graph of a model defines, reads and needs; an inner graph sees those of the outer one too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx import FunctionProto, GraphProto, NodeProto, SparseTensorProto, TensorProto, ValueInfoProto

from fusec.frontends.onnx.emit import Held
from fusec.frontends.onnx.structure import captured


@dataclass
class Scope:
    """The names one graph defines; an inner graph sees those of the outer one too."""

    opsets: Mapping[str, int]
    prefix: str = ""
    outer: Scope | None = None
    values: dict[str, Held] = field(default_factory=dict[str, Held])
    dense: Mapping[str, TensorProto] = field(default_factory=dict[str, TensorProto])
    sparse: Mapping[str, SparseTensorProto] = field(default_factory=dict[str, SparseTensorProto])
    inputs: Mapping[str, ValueInfoProto] = field(default_factory=dict[str, ValueInfoProto])
    annotations: Mapping[str, ValueInfoProto] = field(default_factory=dict[str, ValueInfoProto])  # of all other names
    outputs: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    failed: set[str] = field(default_factory=set[str])  # missing because of a problem already noted

    @property
    def opset(self) -> int:
        return self.opsets.get("", 0)


def scope_of(graph: GraphProto, opsets: Mapping[str, int], outputs: frozenset[str]) -> Scope:
    """What a graph of the model defines before any of its nodes is imported."""
    return Scope(
        opsets,
        dense={t.name: t for t in graph.initializer},
        sparse={t.values.name: t for t in graph.sparse_initializer},
        inputs={v.name: v for v in graph.input},
        annotations={v.name: v for v in (*graph.value_info, *graph.output)},
        outputs=outputs,
        read=reads(graph, outputs),
    )


def reads(graph: GraphProto | FunctionProto, outputs: frozenset[str]) -> frozenset[str]:
    """The names that its nodes or its outputs read."""
    return outputs | {n for node in graph.node for n in node.input}


def without(absent: set[str], node: NodeProto) -> NodeProto:
    """The node with those operands left out that the call leaves out."""
    if not absent.intersection(node.input):
        return node
    changed = NodeProto()
    changed.CopyFrom(node)
    kept = ["" if n in absent else n for n in node.input]
    while kept and not kept[-1]:
        kept.pop()
    del changed.input[:]
    changed.input.extend(kept)
    return changed


def live_nodes(members: Sequence[tuple[str, NodeProto]], outputs: Sequence[str]) -> set[int]:
    """Indices of the nodes an output depends on; a node with bodies of its own may read any name."""
    wanted, live = set(outputs), set[int]()
    for index in range(len(members) - 1, -1, -1):
        node = members[index][1]
        if wanted.intersection(node.output):
            live.add(index)
            wanted.update(node.input)
            wanted.update(captured(node))
    return live
