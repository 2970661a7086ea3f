"""Track the names that one graph of a model defines and reads. An inner graph also sees those of the outer graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from onnx import FunctionProto, GraphProto, NodeProto, SparseTensorProto, TensorProto, ValueInfoProto

from fusec.frontends.onnx.emission.emit import ModelValue
from fusec.frontends.onnx.model_file.structure import captured
from fusec.system.dataclass import dataclass


@dataclass
class Scope:
    """Names that one graph defines, with their values.

    opsets: version of each domain.
    prefix: put before the names of the graph's values and nodes.
    outer: scope of the outer graph, whose names this graph also sees.
    values: values that are imported already.
    dense, sparse: initializers.
    inputs, outputs: declared inputs of the graph, and names of its outputs.
    annotations: declared types of all names but inputs.
    read: names that nodes or outputs of the graph read.
    failed: names that have no value because of a problem that is already noted.
    """

    opsets: Mapping[str, int]
    prefix: str = ""
    outer: Scope | None = None
    values: dict[str, ModelValue] = field(default_factory=dict[str, ModelValue])
    dense: Mapping[str, TensorProto] = field(default_factory=dict[str, TensorProto])
    sparse: Mapping[str, SparseTensorProto] = field(default_factory=dict[str, SparseTensorProto])
    inputs: Mapping[str, ValueInfoProto] = field(default_factory=dict[str, ValueInfoProto])
    annotations: Mapping[str, ValueInfoProto] = field(default_factory=dict[str, ValueInfoProto])
    outputs: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    failed: set[str] = field(default_factory=set[str])

    @property
    def opset(self) -> int:
        return self.opsets.get("", 0)


def scope_of(graph: GraphProto, opsets: Mapping[str, int], outputs: frozenset[str]) -> Scope:
    """Make the scope of a graph before its nodes are imported."""
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
    """Return the names that nodes or outputs of a graph read."""
    return outputs | {n for node in graph.node for n in node.input}


def without(absent: set[str], node: NodeProto) -> NodeProto:
    """Remove operands that the call of the function leaves out."""
    if not absent.intersection(node.input):
        return node
    changed = NodeProto()
    changed.CopyFrom(node)
    operands = ["" if n in absent else n for n in node.input]
    while operands and not operands[-1]:
        operands.pop()
    del changed.input[:]
    changed.input.extend(operands)
    return changed


def live_nodes(members: Sequence[tuple[str, NodeProto]], outputs: Sequence[str]) -> set[int]:
    """Return the indices of the nodes that an output depends on. Bodies of a node may read further names."""
    wanted, live = set(outputs), set[int]()
    for index in range(len(members) - 1, -1, -1):
        node = members[index][1]
        if wanted.intersection(node.output):
            live.add(index)
            wanted.update(node.input)
            wanted.update(captured(node))
    return live
