"""Verify a graph: links, names, use lists, order, and result types that the ops agree with."""

# the links and use lists of a graph, which this module checks, are private to `fusec.ir`
# pyright: reportPrivateUsage=false

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING

from fusec.errors import VerifyError
from fusec.graph.printer import quote

if TYPE_CHECKING:
    from fusec.ir import Graph, Node, Value


def check(graph: Graph) -> None:
    """Check every rule.

    Raises VerifyError: names the first node that breaks one.
    """
    defined: set[Value] = set()
    names: set[str] = set()
    for index, value in enumerate(graph.inputs):
        _value(graph, value, None, index, names)
        defined.add(value)
    members = [*graph.nodes, graph.return_node]
    previous: Node | None = None
    for node in members:
        if node.graph is not graph or node._prev is not previous:
            raise VerifyError(f"{node!r}: is not linked to the node before it")
        _node(node, defined)
        for index, value in enumerate(node.results):
            _value(graph, value, node, index, names)
            defined.add(value)
        previous = node
    if len(members) != len(graph) + 1:
        raise VerifyError(f"graph {graph.name!r} counts {len(graph)} nodes but holds {len(members) - 1}")
    if len(set(graph.output_names)) != len(graph.output_names):
        raise VerifyError(f"{graph.return_node!r}: two outputs have the same name")
    present = set(members)
    for value in defined:
        for node, index in value._uses:
            there = node in present and index < len(node._operands) and node._operands[index] is value
            if not there:
                raise VerifyError(f"{quote(value.name)} has a use in {node.op.name} that is not there")


def _node(node: Node, defined: set[Value]) -> None:
    for index, operand in enumerate(node.operands):
        if operand not in defined:
            raise VerifyError(f"{node!r}: operand {quote(operand.name)} is not defined before its use")
        if (node, index) not in operand._uses:
            raise VerifyError(f"{node!r}: operand {quote(operand.name)} does not know of this use")
    # an op's verdict depends on nothing else, and all of it is immutable, so it is asked once, not after every pass
    said = (node.op, *(v.type for v in node.operands), *(v.type for v in node.results))
    if len(said) == len(node._agreed) and all(map(is_, said, node._agreed)):
        return
    try:
        inferred = node.op.infer(*(v.type for v in node.operands))
    except VerifyError as error:
        raise VerifyError(f"{node!r}: {error}") from None
    if len(inferred) != len(node.results):
        raise VerifyError(f"{node!r}: has {len(node.results)} results, the op gives {len(inferred)}")
    for value, type in zip(node.results, inferred, strict=True):
        if not value.type.same_value_type(type):
            raise VerifyError(f"{node!r}: {quote(value.name)} is {value.type} but the op gives {type}")
    node._agreed = said


def _value(graph: Graph, value: Value, node: Node | None, index: int, names: set[str]) -> None:
    if value.graph is not graph or value.node is not node or value.index != index:
        raise VerifyError(f"{quote(value.name)} does not know where it is made")
    if value.name in names:
        raise VerifyError(f"two values are named {quote(value.name)}")
    if value.name not in graph._names:
        raise VerifyError(f"graph {graph.name!r} does not know the name {quote(value.name)}")
    names.add(value.name)
