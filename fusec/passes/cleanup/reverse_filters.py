"""Reverse the filters of flipped convolutions, so that kernels and rules for plain convolutions apply."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fusec.ir import Graph, Node, Value
from fusec.ops import FlippedConv
from fusec.ops.convolution import flipped, reversal
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import NoMatch, erase_unused, local

recorded(flipped)  # an op's function, which is below this package


@local(
    "conv_flipped", equation="conv_flipped(x, w) = conv(x, w reversed) for constant filters, or a window of one pixel"
)
def reverse_filters(graph: Graph, node: Node) -> Value | None:
    """Reverse constant filters at compile time. cuDNN reverses others while it reads them, and a kernel would cost."""
    x, w = node.operands
    assert isinstance(node.op, FlippedConv)
    if all(size == 1 for size in w.type.shape[2:]):
        return graph.add(node.op.unflipped, x, w, before=node)
    if w.literal is None:
        raise NoMatch("the filters are not constant", w)
    reversed_filters = derive(graph, node, w.type, [w.literal], flipped, w.literal)
    return graph.add(node.op.unflipped, x, reversed_filters, before=node)


def expand_flipped(graph: Graph, names: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """Expand the flipped convolutions whose results have these names into a reversal and a plain convolution.

    Returns for each name the values that replace it: filters and result. The result keeps its name.
    """
    made: dict[str, tuple[str, ...]] = {}
    for node in list(graph.nodes):
        if not isinstance(node.op, FlippedConv) or node.result.name not in names:
            continue
        name, w = node.result.name, node.operands[1]
        filters = graph.insert(reversal(w.type.shape), [w], before=node, origin=node.origin).result
        _unflip(graph, node, node.op, filters)
        made[name] = (filters.name, name)
    return made


def unflipped(body: Graph) -> Graph:
    """Return a copy whose flipped convolutions take their filters as they are."""
    plain = body.clone()
    for node in list(plain.nodes):
        if isinstance(node.op, FlippedConv):
            _unflip(plain, node, node.op, node.operands[1])
    return plain


def _unflip(graph: Graph, node: Node, op: FlippedConv, filters: Value) -> None:
    """Put a plain convolution in the place of a flipped one, with its name and type."""
    name, operands = node.result.name, [node.operands[0], filters]
    made = graph.insert(op.unflipped, operands, before=node, types=[node.result.type], origin=node.origin).result
    graph.replace(node.result, made)
    erase_unused(graph, node)
    graph.rename(made, name)
