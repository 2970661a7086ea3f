"""Merge equal nodes: the same op with the same attributes on the same values.

Of two reductions that differ in `keepdims` alone, such as those of ReduceMax and ArgMax, one becomes a reshape.
"""

from __future__ import annotations

from collections.abc import Hashable

from fusec.ir import Constant, Graph, Node, Op
from fusec.ops import Reduce, Reshape
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.derived_constants import EAGER_BYTES
from fusec.passes.rewriting.rewriter import replace_node


class Cse(Pass):
    """Compute equal things once (common subexpression elimination)."""

    name = "cse"

    def run(self, graph: Graph, options: Options) -> None:
        first: dict[Hashable, Node] = {}
        for node in list(graph.nodes):
            earlier = first.setdefault(_key(node), node)
            if earlier is not node:
                replace_node(graph, node, earlier)
                continue
            earlier = first.setdefault(_key_without_dims(node), node)
            if earlier is not node:
                shape = node.result.type.shape
                replace_node(graph, node, graph.insert(Reshape(shape), [earlier.result], before=node))


def _key_without_dims(node: Node) -> Hashable:
    """Return a key that is equal for row-major reductions with and without `keepdims`; of other ops the node itself."""
    if not isinstance(node.op, Reduce) or node.operands[0].type.order or node.result.type.order:
        return node
    return (node.op.kind, node.op.axes, id(node.operands[0]), node.result.type.dtype)


def _key(node: Node) -> Hashable:
    types = tuple(v.type for v in node.results)
    if isinstance(node.op, Constant):
        literal = node.op.literal
        # comparing bytes, not numbers, keeps 0.0 and -0.0 apart; large payloads are not read for it
        small = literal.type.nbytes <= EAGER_BYTES
        return (types, literal.digest) if small else (types, literal)
    operands = [id(v) for v in node.operands]
    return (_attributes(node.op), tuple(sorted(operands) if node.op.commutative else operands), types)


def _attributes(op: Op) -> Hashable:
    """Return a key of the op that tells zeros apart by sign: clip(min=0.0) is not clip(min=-0.0)."""
    signs = tuple(str(v) for v in op.attributes.values() if isinstance(v, float) and v == 0.0)
    return (op, signs)
