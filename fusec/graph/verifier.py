"""Verify a graph: its links, names, uses and order, and that each op agrees with the types of its results."""

# Links and uses are private to `fusec.ir`; this module only reads them.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING

from fusec.errors import VerifyError
from fusec.graph.printer import quote

if TYPE_CHECKING:
    from fusec.ir import Graph, Node, Value


def check(graph: Graph) -> None:
    """Check every rule of the IR.

    Raises VerifyError that names the first node that breaks one.
    """
    defined: set[Value] = set()
    names: set[str] = set()
    for index, value in enumerate(graph.inputs):
        _check_value(graph, value, None, index, names)
        defined.add(value)
    members = [*graph.nodes, graph.return_node]
    previous: Node | None = None
    for node in members:
        if node.graph is not graph or node._prev is not previous:
            raise VerifyError(f"{node!r}: is not linked to the node before it")
        _check_node(node, defined)
        for index, value in enumerate(node.results):
            _check_value(graph, value, node, index, names)
            defined.add(value)
        previous = node
    if len(members) != len(graph) + 1:
        raise VerifyError(f"graph {graph.name!r} counts {len(graph)} nodes but holds {len(members) - 1}")
    if len(set(graph.output_names)) != len(graph.output_names):
        raise VerifyError(f"{graph.return_node!r}: two outputs have the same name")
    present = set(members)
    for value in defined:
        for node, index in value._uses:
            if node not in present or index >= len(node._operands) or node._operands[index] is not value:
                raise VerifyError(f"{quote(value.name)} has a use in {node.op.name} that is not there")


def _check_node(node: Node, defined: set[Value]) -> None:
    operands = node.operands
    for index, operand in enumerate(operands):
        if operand not in defined:
            raise VerifyError(f"{node!r}: operand {quote(operand.name)} is not defined before its use")
        if (node, index) not in operand._uses:
            raise VerifyError(f"{node!r}: operand {quote(operand.name)} does not know of this use")
    # `infer` depends only on these immutable objects, so it is not called again for the same ones after each pass.
    checked = (node.op, *[v.type for v in operands], *[v.type for v in node.results])
    if len(checked) == len(node._checked) and all(map(is_, checked, node._checked)):
        return
    try:
        inferred = node.op.infer(*(v.type for v in operands))
    except VerifyError as error:
        raise VerifyError(f"{node!r}: {error}") from None
    if len(inferred) != len(node.results):
        raise VerifyError(f"{node!r}: has {len(node.results)} results, the op gives {len(inferred)}")
    for value, type in zip(node.results, inferred, strict=True):
        if not value.type.same_value_type(type):
            raise VerifyError(f"{node!r}: {quote(value.name)} is {value.type} but the op gives {type}")
    node._checked = checked


def _check_value(graph: Graph, value: Value, node: Node | None, index: int, names: set[str]) -> None:
    if value.graph is not graph or value.node is not node or value.index != index:
        raise VerifyError(f"{quote(value.name)} does not know where it is made")
    if value.name in names:
        raise VerifyError(f"two values are named {quote(value.name)}")
    if value.name not in graph._names:
        raise VerifyError(f"graph {graph.name!r} does not know the name {quote(value.name)}")
    names.add(value.name)
